"""What memory a run takes: promised before the model is loaded, and reached once it has run."""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from adapters import live, lora, sampling, static_cache, transformers_lm
from core import metrics, optimizers, ports, record
from core.plan import cost, memory
from shell import choose, feed, generate, mistake, options, rounds

RESERVE = 0.4  # of the device's memory: the estimate knows neither allocator nor neighbors
FALLBACK_BUDGET = 16384
NAMES = {
    "weights": "weights",
    "masters": "float32 masters",
    "moments": "moments",
    "beside": "reference, teacher",
    "gradients": "gradients",
    "activations": "kept by layers",
    "layer": "widest of a layer",
    "head": "head",
    "keys_values": "keys and values",
    "gathered": "gathered parameters",
    "packed": "weights to draw with",
    "step": "all that steps make",
}
"""What the parts of `core.plan.memory` are called in a table."""


def levers(
    chosen: options.Options,
    device: ports.Device,
    beside: Sequence[cost.ModelShape | None],
    adapter: lora.Trained | None,
) -> memory.Levers:
    """Return what a run does that its memory depends on.

    Args:
        chosen: the options.
        device: where it runs.
        beside: frozen models that are held too.
        adapter: what one trains; None: the model's own parameters are trained.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    # As the sampler packs: what one wave draws alone is worth it or not, several together more so.
    narrow = device.type != "cpu" or choose.products(chosen, device) != torch.float32
    steps = chosen.max_completion_length or 0
    return memory.Levers(
        packed=0 if narrow or steps < sampling.WORTH_PACKING else sampling.PACKING_BYTES,
        adapter=None if adapter is None else adapter.num,
        head_columns=0 if adapter is None else adapter.head_columns,
        checkpointing=choose.checkpointing(chosen, device),
        chunk=chosen.chunk_size_feed_forward,
        offloaded=chosen.activation_offloading and device.type != "cpu",
        num_shards=num_ranks if chosen.fsdp else 1,
        summed=num_ranks > 1 and not chosen.fsdp,
        clipped=chosen.max_grad_norm > 0,
        beside=sum(each.parameters * each.element_bytes for each in beside if each is not None),
    )


def budget(
    shape: cost.ModelShape,
    chosen: options.Options,
    device: ports.Device,
    levers: memory.Levers,
    ranks: ports.Ranks,
) -> int:
    """Return the most unique tokens of a forward: as asked for, or what fits every rank by the estimate.

    It is one number on all ranks, for each of them plans the packs of all.

    Args:
        shape: of the model that runs.
        chosen: the options.
        device: whose memory it is, of this rank.
        levers: how steps are run.
        ranks: who plans the same steps; every one of them must call this.

    Raises:
        mistake.Mistake: not even the weights and their state fit.
    """
    if chosen.token_budget is not None:
        return chosen.token_budget
    there, fits = device.memory(), float(FALLBACK_BUDGET)
    if there is not None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
        fits = float(memory.budget(shape, there // local, levers, reserve=RESERVE))
    least = int(metrics.values(ranks.merge({"budget": metrics.Minimum(value=fits)}))["budget"])
    if not least:
        need = memory.peak(shape, 1, levers) / 2**30
        has = f"{device.name} has {there / 2**30:.1f} GiB" if there and not fits else "another rank has less"
        raise mistake.Mistake(
            f"model {chosen.model} needs {need:.1f} GiB to train; {has}. Take a smaller model, or say how "
            "many tokens to try with --token_budget"
        )
    return least


def drawn(rows: feed.Feed, num_ranks: int, static: static_cache.Shapes | None = None) -> int:
    """Return the nodes whose keys and values are held while completions are drawn; 0 where none are.

    Args:
        rows: what is trained on.
        num_ranks: who share the drawing.
        static: shapes that drawing keeps to; None: they follow what is drawn.
    """
    if not isinstance(rows, rounds.Plan) or not len(rows.prompts):
        return 0
    if static is not None:
        return static.rows * static.places
    longest = int(np.diff(rows.prompts.starts).max())
    prompts = -(-rows.num_prompts * rows.steps_per_generation // num_ranks)
    return prompts * longest + min(prompts * rows.num_generations, generate.MOST_ROWS) * rows.max_tokens


def highest(plan: memory.Plan) -> tuple[str, int]:
    """Return the moment of a plan at which most is held, and how much that is."""
    sums = {moment: sum(parts.values()) for moment, parts in plan.items()}
    moment = max(sums, key=lambda name: sums[name])
    return moment, sums[moment]


def table(plan: memory.Plan, hosted: int, reached: Mapping[str, Any] | None = None) -> str:
    """Lay out what takes what, for a person.

    Args:
        plan: what is promised.
        hosted: promised bytes in the memory of the host.
        reached: from `Watch.facts`; None: nothing has run yet.
    """
    moment, peak = highest(plan)
    name, unit = ("GiB", 2**30) if peak >= 2**30 else ("MiB", 2**20)
    used = [part for part in memory.PARTS if any(parts[part] for parts in plan.values())]
    columns: dict[str, Mapping[str, int]] = dict(plan)
    if reached is not None:
        columns["reached"] = reached["parts"]
    used += [part for part in columns.get("reached", ()) if part not in memory.PARTS]
    lines = [f"{f'memory, {name}':<20}" + "".join(f"{column:>13}" for column in columns)]
    for part in used:
        cells = (f"{parts[part] / unit:.2f}" if part in parts else "" for parts in columns.values())
        lines.append(f"{NAMES[part]:<20}" + "".join(f"{cell:>13}" for cell in cells))
    sums = (sum(parts.values()) for parts in columns.values())
    lines.append(f"{'sum':<20}" + "".join(f"{number / unit:>13.2f}" for number in sums))
    lines.append(f"at most {peak / unit:.2f} {name} promised, at the moment {moment!r}")
    if hosted:
        lines.append(f"{hosted / unit:.2f} {name} wait in the memory of the host")
    if reached is not None:
        lines.append(f"{reached['peak_bytes'] / unit:.2f} {name} reached, {reached['how']}")
    return "\n".join(line.rstrip() for line in lines)


class Watch:
    """Measures what a run holds: the allocator's highest on an accelerator, counted bytes on a CPU.

    Where a CPU runs compiled graphs, inside of which nothing is counted, it is the process' resident memory.
    """

    def __init__(self, device: ports.Device, *, compiled: bool) -> None:
        """Begin with nothing seen.

        Args:
            device: where the run takes place.
            compiled: its decoder runs as graphs.
        """
        self._live = live.Live() if device.type == "cpu" and not compiled else None
        self._device, self._parts = device, {}

    def hold(
        self,
        params: ports.Params,
        state: Any,
        reference: ports.Params | None,
        model: transformers_lm.TransformersLM,
    ) -> None:
        """Look at what is there before the first step.

        Args:
            params: the trained ones.
            state: the optimizer's.
            reference: what the policy is compared with.
            model: with its frozen weights and its teacher.
        """
        mastered = isinstance(state, optimizers.Mastered)
        frozen = {} if model.teacher is None else {**model.teacher.model.frozen, **model.teacher.params}
        groups = {
            "weights": [*params.values(), *model.frozen.values()],
            "masters": list(state.masters.values()) if mastered else [],
            "moments": record.tree.leaves(state.rule if mastered else state),
            "beside": [*(reference or {}).values(), *frozen.values()],
        }
        self._parts = {name: live.size(tensors) for name, tensors in groups.items()}
        for tensor in (t for tensors in groups.values() for t in tensors if self._live is not None):
            self._live.see(tensor)  # type: ignore[union-attr]
        self._reset()

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count while a part of the run lasts."""
        with self._live or contextlib.nullcontext():
            yield

    def facts(self) -> dict[str, Any]:
        """Return `parts`, `peak_bytes` and in `how` where these come from."""
        how, peak = self._peak()
        made = max(0, peak - sum(self._parts.values()))
        return {"how": how, "peak_bytes": peak, "parts": {**self._parts, "step": made}}

    def _allocator(self, name: str) -> Any:
        """Return a function of the device's allocator, None where there is none."""
        if self._device.type == "cpu":
            return None
        return getattr(torch.get_device_module(self._device.type), name, None)

    def _reset(self) -> None:
        """Let the allocator note its highest from here on."""
        if (reset := self._allocator("reset_peak_memory_stats")) is not None:
            reset()

    def _peak(self) -> tuple[str, int]:
        if self._live is not None:
            return "counted tensor by tensor while steps ran", self._live.peak
        if (allocated := self._allocator("max_memory_allocated")) is not None:
            return "by the device's allocator", int(allocated())
        return "as resident memory of the process", resident()


def resident() -> int:
    """Return the most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def facts(plan: memory.Plan, hosted: int, watch: Watch) -> dict[str, Any]:
    """Return what run.json tells of memory.

    Args:
        plan: what was promised.
        hosted: of that, in the memory of the host.
        watch: what was measured.
    """
    moment, peak = highest(plan)
    promised = {"moments": plan, "peak_bytes": peak, "moment": moment, "host_bytes": hosted}
    return {"promised": promised, "reached": watch.facts()}
