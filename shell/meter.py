"""What a run measures about itself: time by part, tokens, FLOPs, memory."""

import collections
import contextlib
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from core import metrics, pack, ports
from core.plan import cost, sample


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
        steps: steps made.
    """

    seconds: float = 0.0
    rows: int = 0
    alone: int = 0
    trained: int = 0
    nodes: int = 0
    flops: int = 0
    room: int = 0
    steps: int = 0

    def add(self, other: "Tally") -> None:
        """Add field by field."""
        for field in attrs.fields(Tally):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Step:
    """One step being measured."""

    def __init__(self, shape: cost.ModelShape, budget: int) -> None:
        """Begin with nothing counted."""
        self.tally = Tally(steps=1)
        self.means: metrics.Metrics = {}
        self._shape, self._budget = shape, budget

    def planned(self, samples: Sequence[sample.Sample], packs: Sequence[pack.Pack]) -> None:
        """Count what the step is made of."""
        alone, counted = cost.work(samples, share=False), self.tally
        counted.rows, counted.trained = alone.nodes, alone.edges
        counted.alone = cost.flops(self._shape, alone.nodes, alone.pairs, alone.edges)
        for each in packs:
            nodes, pairs = len(each.tokens), int(each.depths.sum()) + len(each.tokens)
            counted.nodes += nodes
            counted.flops += cost.flops(self._shape, nodes, pairs, len(each.edge_nodes))
            counted.room += max(nodes, self._budget) if nodes else 0

    def made(self, means: metrics.Metrics) -> None:
        """Take the metrics of the step."""
        self.means = means


class Meter:
    """Measures a run; windows of steps are read and begin anew."""

    def __init__(self, shape: cost.ModelShape, budget: int, ranks: ports.Ranks = ports.ALONE) -> None:
        """Begin to measure.

        Args:
            shape: of the model, for FLOPs.
            budget: most nodes of a pack.
            ranks: who shares the steps.
        """
        self.parts: dict[str, float] = collections.defaultdict(float)
        self.total, self.window = Tally(), Tally()
        self._means: metrics.Metrics = {}
        self._shape, self._budget, self._ranks = shape, budget, ranks

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the wall time of a part of the run."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] += time.perf_counter() - start

    @contextlib.contextmanager
    def step(self) -> Iterator[Step]:
        """Measure a step; its metrics join the window."""
        start, step = time.perf_counter(), Step(self._shape, self._budget)
        yield step
        step.tally.seconds = time.perf_counter() - start
        self.parts["steps"] += step.tally.seconds
        self.total.add(step.tally)
        self.window.add(step.tally)
        self._means = metrics.merge(self._means, metrics.host(step.means))

    def read(self) -> dict[str, float]:
        """Return the metrics of the window over all ranks, and begin a new one; every rank calls it."""
        found = metrics.values(self._means)
        found["step_time"] = self.window.seconds / max(1, self.window.steps)
        found |= self.ratios(self.window)
        found["peak_memory_gb"] = peak_bytes() / 2**30
        self.window, self._means = Tally(), {}
        return found

    def ratios(self, tally: Tally) -> dict[str, float]:
        """Return what a tally says in ratios, over all ranks."""
        nodes, flops = float(tally.nodes), float(tally.flops)
        room, busiest = float(tally.room), flops
        if self._ranks.num > 1:
            own = torch.tensor([nodes, flops, room], dtype=torch.float64)
            nodes, flops, room = self._ranks.sum(own).tolist()
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
            "batch/pad_frac": 0.0,
        }

    def facts(self, price_per_hour: float | None) -> Mapping[str, Any]:
        """Return what run.json tells of time, tokens and money; every rank calls it.

        Args:
            price_per_hour: of one device, in any currency; None: no cost is told.
        """
        reached = self.ratios(self.total) | {
            "trained_tokens": self.total.trained,
            "flops": self.total.flops,
            "steps": self.total.steps,
            "peak_memory_bytes": peak_bytes(),
        }
        if price_per_hour is not None and self.total.trained:
            hours = self.total.seconds / 3600 * self._ranks.num
            reached["cost_per_million_trained_tokens"] = hours * price_per_hour / self.total.trained * 1e6
        return {"reached": reached, "wall_seconds": dict(self.parts)}


def peak_bytes() -> int:
    """Return the most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
