"""What a run promises before its first step: the dry run's table, and run.json's."""

import time
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from adapters import static_cache
from core import pack, ports
from core.plan import batching, cost, memory, sizes
from shell import config, feed, footprint

MAX_STEPS = 64
MAX_TOKENS = 2_000_000  # what a plan looks at in a second or two
PROBE = 1024  # rows of the square matrices that the speed of a device is guessed from


@attrs.frozen(kw_only=True)
class Promise:
    """A plan in figures.

    Attributes:
        steps: optimizer steps of the whole run.
        steps_planned: steps of the first epochs that the figures below were counted on.
        rows: rows of the dataset; of a stream, those read for the plan.
        samples, packs: per step, on average.
        packing_ratio, flop_ratio, row_fill_frac, row_imbalance, pad_frac: as the metrics of these names.
        largest_pack: unique tokens in the largest pack.
        token_budget: most unique tokens in a forward.
        peak_memory_bytes: estimate for one process.
        host_memory_bytes: of activations that wait in host memory, beside the device's.
        held: what takes what of the estimate, by moment of a step and part.
        flops: of the whole run.
        trained_tokens: of the whole run.
        sizes: numbers of tokens that forwards are padded to; empty: nothing is padded.
        cache: rows and places of the static cache that completions are drawn from; empty: there is none.
    """

    steps: int
    steps_planned: int
    rows: int
    samples: float
    packs: float
    packing_ratio: float
    flop_ratio: float
    row_fill_frac: float
    row_imbalance: float
    pad_frac: float
    largest_pack: int
    token_budget: int
    peak_memory_bytes: int
    flops: int
    trained_tokens: int
    sizes: tuple[int, ...] = ()
    host_memory_bytes: int = 0
    held: memory.Plan = attrs.field(factory=dict)
    cache: tuple[int, ...] = ()


def promise(
    rows: feed.Feed,
    num_steps: int,
    packing: Mapping[str, Any],
    couples: str,
    ranks: ports.Ranks,
    *,
    levers: memory.Levers,
    static: static_cache.Shapes | None = None,
) -> Promise:
    """Plan the run's first steps without building a tensor, and extrapolate.

    Args:
        rows: what is trained on.
        num_steps: of the whole run.
        packing: how packs are made, the arguments of `feed.packs`.
        couples: what must be seen together.
        ranks, levers: who shares the steps, and what memory depends on.
        static: shapes that drawing keeps to; None: they follow what is drawn, or nothing is.
    """
    budget, share, shape = packing["budget"], packing["share"], packing["shape"]
    padded: sizes.Sizes | None = packing.get("sizes")
    size = None if padded is None else lambda nodes: sizes.fitting(padded, nodes, 0)[0]
    place, planned, trained, seen, alone = rows.start, [], 0, 0, True
    while len(planned) < min(num_steps, MAX_STEPS) and seen < MAX_TOKENS:
        samples, place = rows.take(place)
        seen += sum(len(s.tokens) for s in samples)
        trained += pack.count(samples).terms
        assigned = batching.assign(
            samples, budget=budget, couples=couples, num_ranks=ranks.num, share=share, shape=shape
        )
        alone = alone and max(map(len, assigned)) == 1
        planned.append(cost.summarize(samples, assigned, shape, budget=budget, share=share, size=size))
    count, nodes = len(planned), sum(p.nodes for p in planned)
    flops = sum(p.flops for p in planned)
    largest = max(p.largest for p in planned)
    levers = attrs.evolve(levers, one_pack=alone and largest <= budget)
    forward, shared = min(largest, budget), max(0, largest - budget)
    held = memory.plan(shape, forward, levers, shared=shared, drawn=footprint.drawn(rows, ranks.num, static))
    return Promise(
        steps=num_steps,
        steps_planned=count,
        rows=rows.counts.used,
        samples=sum(p.samples for p in planned) / count,
        packs=sum(p.packs for p in planned) / count,
        packing_ratio=sum(p.rows for p in planned) / max(1, nodes),
        flop_ratio=sum(p.flop_ratio * p.flops for p in planned) / max(1, flops),
        row_fill_frac=nodes / max(1.0, sum(p.nodes / p.fill for p in planned if p.fill)),
        row_imbalance=sum(p.imbalance for p in planned) / count,
        pad_frac=sum(p.pad_share for p in planned) / count,
        largest_pack=largest,
        token_budget=budget,
        peak_memory_bytes=footprint.highest(held)[1],
        flops=flops * num_steps // count,
        trained_tokens=trained * num_steps // count,
        sizes=() if padded is None else padded.nodes,
        host_memory_bytes=memory.hosted(shape, forward, levers, shared=shared),
        held=held,
        cache=() if static is None else (static.rows, static.places),
    )


def table(promised: Promise, chosen: config.Options, device: ports.Device, ranks: ports.Ranks) -> str:
    """Lay a promise out for a person, with what it would cost when a price is given.

    Args:
        promised: the plan in figures.
        chosen: the options.
        device: whose speed is guessed, from one product of matrices.
        ranks: who shares the steps.
    """
    lines = {
        "steps": f"{promised.steps}",
        "rows": f"{promised.rows}",
        "samples a step": f"{promised.samples:.1f}",
        "packs a step": f"{promised.packs:.1f} of at most {promised.token_budget} unique tokens",
        "packing ratio": f"{promised.packing_ratio:.2f} tokens of samples to one that runs",
        "FLOP ratio": f"{promised.flop_ratio:.2f}",
        "fill": f"{promised.row_fill_frac:.1%}",
        "imbalance of ranks": f"{promised.row_imbalance:.2f}",
        "padded share": f"{promised.pad_frac:.1%}",
        "largest pack": f"{promised.largest_pack} unique tokens",
        "peak memory": f"{promised.peak_memory_bytes / 2**30:.2f} GiB (estimate, one process)",
        "trained tokens": f"{promised.trained_tokens}",
        "FLOPs": f"{promised.flops:.2e}",
    }
    if promised.sizes:
        lines["sizes planned"] = ", ".join(map(str, promised.sizes)) + " tokens, padding included"
    if promised.cache:
        size = promised.held["drawing"]["keys_values"] / 2**30
        lines["static cache"] = "{} rows of {} tokens".format(*promised.cache) + f", {size:.2f} GiB"
    if chosen.price_per_hour is not None:
        seconds = promised.flops / speed(device) / ranks.num
        cost_of = seconds / 3600 * chosen.price_per_hour * ranks.num
        million = cost_of / max(1, promised.trained_tokens) * 1e6
        lines["cost"] = f"{cost_of:.2g}, {million:.2g} a million trained tokens (guess from a matrix product)"
    if promised.steps_planned < promised.steps:
        lines["counted on"] = f"the first {promised.steps_planned} steps"
    return "\n".join(f"{name:<20}{value}" for name, value in lines.items())


def speed(device: ports.Device) -> float:
    """Return the FLOPs a second that a product of matrices reaches on a device, the best of three."""
    square = torch.ones(PROBE, PROBE, dtype=device.dtype, device=device.type)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        float((square @ square)[0, 0])
        seconds.append(time.perf_counter() - start)
    return 2 * PROBE**3 / min(seconds)
