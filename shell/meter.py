"""What a run measures about itself: time by part, tokens, FLOPs, memory."""

import collections
import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from adapters import compiling, signatures
from core import metrics, pack, padded, ports
from core.plan import cost, sample
from shell import footprint

FORMS = {form.__name__: form for form in (metrics.Mean, metrics.Sum, metrics.Minimum, metrics.Maximum)}
SAME = ("seconds", "rows", "alone", "trained", "steps")
"""Fields of a tally that are those of the whole step on every rank."""
DECISIVE = ("loss", "grad_norm")
"""Metrics whose NaN means that a run has diverged."""


@attrs.define(kw_only=True, eq=False)
class Tally:
    """Sums over steps, this rank's.

    Attributes:
        seconds: planning, forward, backward and update.
        rows: tokens of all samples, each alone; of the whole step, the same on every rank.
        alone: FLOPs of every sample alone, likewise.
        trained: trained tokens, likewise.
        nodes: tokens that ran through the model.
        flops: FLOPs of that.
        room: nodes that the packs had room for.
        padded: tokens that ran, padding among them.
        steps: steps made.
    """

    seconds: float = 0.0
    rows: int = 0
    alone: int = 0
    trained: int = 0
    nodes: int = 0
    flops: int = 0
    room: int = 0
    padded: int = 0
    steps: int = 0

    def add(self, other: "Tally") -> None:
        """Add field by field."""
        for field in attrs.fields(Tally):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Step:
    """One step being measured."""

    def __init__(self) -> None:
        """Begin with nothing counted."""
        self.tally = Tally(steps=1)
        self.means: metrics.Metrics = {}

    def planned(
        self,
        samples: Sequence[sample.Sample],
        packs: Sequence[pack.Pack],
        shape: cost.ModelShape,
        budget: int,
    ) -> None:
        """Count what the step is made of.

        Args:
            samples: of the whole step.
            packs: this rank's.
            shape: of the model, for FLOPs.
            budget: most nodes in a forward.
        """
        alone, counted = cost.work(samples, share=False), self.tally
        counted.rows, counted.trained = alone.nodes, pack.count(samples).terms
        counted.alone = cost.flops(shape, alone.nodes, alone.pairs, alone.edges)
        for each in packs:
            nodes, pairs = len(each.tokens), int(each.depths.sum()) + len(each.tokens)
            counted.nodes += nodes
            counted.padded += padded.num_nodes(each)
            counted.flops += cost.flops(shape, nodes, pairs, len(each.edge_nodes))
            counted.room += budget * -(-nodes // budget)

    def made(self, means: metrics.Metrics) -> None:
        """Take the metrics of the step."""
        self.means = means


class Meter:
    """Measures a run; windows of steps are read and begin anew.

    Attributes:
        parts: wall time by part, in seconds.
        total, window: of the whole run, and since it was last read.
        nonfinite: names of the decisive metrics that were not finite in the last step.
        graphs: counts of compiled graphs, where there are any; what compiling took is a part of its own.
        drawing: counts of the graphs that completions are drawn with, likewise.
        signatures: counts those of steps, where that was asked for.
        watch: measures what steps and completions hold, likewise.
        counted: sums of the whole run of every metric that is a count: what was left out, masked, empty.
    """

    def __init__(self, ranks: ports.Ranks = ports.ALONE) -> None:
        """Begin to measure.

        Args:
            ranks: who shares the steps.
        """
        self.parts: dict[str, float] = collections.defaultdict(float)
        self.total, self.window = Tally(), Tally()
        self.nonfinite: tuple[str, ...] = ()
        self.graphs: compiling.Counts | None = None
        self.drawing: compiling.Counts | None = None
        self.signatures: signatures.Signatures | None = None
        self.watch: footprint.Watch | None = None
        self.counted: dict[str, float] = collections.defaultdict(float)
        self._means: metrics.Metrics = {}
        self._new = 0
        self._ranks = ranks

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the wall time of a part of the run, but for what compiling took of it."""
        start, before = time.perf_counter(), self._compiling()
        try:
            with self._watched(name == "rollouts"):
                yield
        finally:
            compiled = self._compiling() - before
            self.parts[name] += time.perf_counter() - start - compiled
            self._add_compiling(compiled)

    @contextlib.contextmanager
    def step(self) -> Iterator[Step]:
        """Measure a step; its metrics join the window."""
        start, step, before = time.perf_counter(), Step(), self._compiling()
        known = 0 if self.signatures is None else len(self.signatures.seen)
        with self.signatures or contextlib.nullcontext(), self._watched():
            yield step
        if self.signatures is not None:
            self._new += len(self.signatures.seen) - known
        compiled = self._compiling() - before
        step.tally.seconds = time.perf_counter() - start - compiled
        self._add_compiling(compiled)
        self.parts["steps"] += step.tally.seconds
        self.total.add(step.tally)
        self.window.add(step.tally)
        means = metrics.host(step.means)
        self.nonfinite = tuple(name for name in DECISIVE if _is_odd(means, name))
        self._means = metrics.merge(self._means, means)
        for name, metric in means.items():
            if isinstance(metric, metrics.Sum) and metric.total:
                self.counted[name] += float(metric.total)

    def read(self) -> dict[str, float]:
        """Return the metrics of the window over all ranks, and begin a new one; every rank calls it."""
        found = metrics.values(self._means)
        found["step_time"] = self.window.seconds / max(1, self.window.steps)
        found |= self.ratios(self.window)
        found["peak_memory_gb"] = footprint.resident() / 2**30
        if self.signatures is not None:
            found["compile/new_signatures"], self._new = float(self._new), 0
        if self.graphs is not None:
            told = ("forward", "backward", "fallbacks")
            found |= {f"compile/{name}": float(getattr(self.graphs, name)) for name in told}
        if self.drawing is not None:
            found["compile/drawing"] = float(self.drawing.forward)
        self.window, self._means = Tally(), {}
        return found

    def _watched(self, counts: bool = True) -> contextlib.AbstractContextManager[None]:
        """Return what counts the memory that is held meanwhile, where that was asked for."""
        return self.watch.counting() if counts and self.watch is not None else contextlib.nullcontext()

    def _compiling(self) -> float:
        """Return the seconds that compiling has taken so far."""
        return 0.0 if self.graphs is None else self.graphs.seconds

    def _add_compiling(self, seconds: float) -> None:
        """Let what compiling took be a part, where it took anything."""
        if seconds:
            self.parts["compiling"] += seconds

    def ratios(self, tally: Tally) -> dict[str, float]:
        """Return what a tally says in ratios, over all ranks."""
        nodes, flops = float(tally.nodes), float(tally.flops)
        room, whole, busiest = float(tally.room), float(tally.padded), flops
        if self._ranks.num > 1:
            own = torch.tensor([nodes, flops, room, whole], dtype=torch.float64)
            nodes, flops, room, whole = self._ranks.sum(own).tolist()
            worst = self._ranks.merge({"flops": metrics.Maximum(value=busiest)})
            busiest = metrics.values(worst)["flops"]
        seconds = max(tally.seconds, 1e-9)
        return {
            "perf/trained_tok_s": tally.trained / seconds,
            "perf/forwarded_tok_s": nodes / seconds,
            "batch/packing_ratio": tally.rows / max(1.0, nodes),
            "batch/flop_ratio": tally.alone / max(1.0, flops),
            "batch/row_fill_frac": nodes / max(1.0, room),
            "batch/row_imbalance": busiest * self._ranks.num / max(1.0, flops),
            "batch/pad_frac": 1.0 - nodes / max(1.0, whole, nodes),
        }

    def split(self) -> dict[str, Any]:
        """Return what was measured so far as plain values, for a checkpoint; every rank calls it.

        A window that is not full yet is in it, so that a run that goes on logs what one without a stop would.
        """
        own = {"total": self.total, "window": self.window}
        told = {f"{self._ranks.index}/{n}/{f}": v for n, t in own.items() for f, v in attrs.asdict(t).items()}
        gathered = metrics.values(self._ranks.merge({n: metrics.Sum(total=v) for n, v in told.items()}))
        means = {
            name: {"form": type(metric).__name__, **{n: getattr(metric, n) for n in _fields(type(metric))}}
            for name, metric in self._means.items()
        }
        counted = {"counted": dict(self.counted)}
        return {"tallies": gathered, "means": means, "parts": dict(self.parts), **counted}

    def join(self, measured: Mapping[str, Any]) -> None:
        """Go on from what was measured before a stop.

        Args:
            measured: from `split`; where other ranks shared the steps then, each takes an equal part.
        """
        tallies = measured["tallies"]
        count = len({name.partition("/")[0] for name in tallies})
        for name, tally in (("total", self.total), ("window", self.window)):
            for field in attrs.fields(Tally):
                parts = [tallies[f"{rank}/{name}/{field.name}"] for rank in range(count)]
                if count == self._ranks.num:
                    value = parts[self._ranks.index]
                else:
                    value = parts[0] if field.name in SAME else sum(parts) / self._ranks.num
                setattr(tally, field.name, value if field.name == "seconds" else round(value))
        self._means = {
            name: FORMS[values["form"]](**{n: v for n, v in values.items() if n != "form"})
            for name, values in measured["means"].items()
        }
        for name, seconds in measured["parts"].items():
            self.parts[name] += seconds
        self.counted.update(measured.get("counted", {}))

    def told(self) -> str:
        """Return what was counted over the whole run in one line."""
        return ", ".join(f"{name} {number:g}" for name, number in sorted(self.counted.items()))

    def facts(self, price_per_hour: float | None) -> Mapping[str, Any]:
        """Return what run.json tells of time, tokens and money; every rank calls it.

        Args:
            price_per_hour: of one device, in any currency; None: no cost is told.
        """
        reached = self.ratios(self.total) | {
            "trained_tokens": self.total.trained,
            "flops": self.total.flops,
            "steps": self.total.steps,
            "peak_memory_bytes": footprint.resident(),
        }
        if price_per_hour is not None and self.total.trained:
            hours = self.total.seconds / 3600 * self._ranks.num
            reached["cost_per_million_trained_tokens"] = hours * price_per_hour / self.total.trained * 1e6
        return {"reached": reached, "wall_seconds": dict(self.parts), "counted": dict(self.counted)} | (
            {} if self.signatures is None else {"signatures": len(self.signatures.seen)}
        )


def _is_odd(means: metrics.Metrics, name: str) -> bool:
    """Say whether a metric, or a value that was left out of it, is not finite."""
    read = metrics.values({n: means[n] for n in (name, metrics.NONFINITE + name) if n in means})
    return metrics.NONFINITE + name in read or not math.isfinite(read.get(name, 0.0))


def _fields(form: type) -> tuple[str, ...]:
    """Return the names of a metric's fields."""
    return tuple(field.name for field in attrs.fields(form))
