"""Which sizes a run's forwards are padded to, planned before the first step from the packs that will come."""

from collections.abc import Iterator, Mapping, Sequence

import attrs

from core.plan import batching, cost, padding, sizes
from core.plan import sample as samples_
from shell import data, feed, options, prepare

MAX_TOKENS = 20_000_000
"""A plan looks at so many tokens of samples at most; of more it knows the first, and holds room for any."""

# FLOPs a second, and seconds that a size takes to compile, forward and backward. They are assumptions and not
# measured: the same command must plan the same sizes each time, for a size moves the last bits of a result.
PRICES: Mapping[str, tuple[float, float]] = {
    "cpu": (5e10, 20.0),
    "cuda": (1e14, 60.0),
    "rocm": (1e14, 60.0),
    "neuron": (2.2e12, 96.0),
}
GROWTH = 1.5
"""Of neighbors among sizes for lengths that nobody knows, before they are rounded."""

Forward = tuple[int, int]
"""Nodes and edges."""


def is_asked(chosen: options.Options, *, static: bool) -> bool:
    """Say whether packs are padded to planned sizes.

    Args:
        chosen: the options.
        static: the device compiles each new shape.
    """
    if chosen.pad_to_multiple_of == "auto":
        return static or chosen.max_shapes is not None
    return chosen.pad_to_multiple_of != "none"


def planned(ready: prepare.Ready, *, training: bool = True) -> prepare.Ready:
    """Plan sizes where the options or the device ask for them, and add them to how packs are made.

    Args:
        ready: what is known before the model is loaded.
        training: False: only the rows that are evaluated will come.
    """
    chosen, device = ready.command.options, ready.device
    if not is_asked(chosen, static=device.static_shapes):
        return ready
    given = chosen.pad_to_multiple_of
    multiple = given if isinstance(given, int) else device.multiple
    budget = ready.packing["budget"]
    if chosen.token_budget is None:  # what was planned from the memory is not exceeded by padding
        budget = _floor(budget, multiple)
    ready = attrs.evolve(ready, packing={**ready.packing, "budget": budget})
    trained, whole = _trained(ready) if training else ([], True)
    known = [forward for step in trained for forward in step]
    both = [*known, *_evaluated(ready)] or [(1, 1)]
    largest = max(nodes for nodes, _ in both) if whole else budget
    if training and ready.algorithm.rows == "prompts":
        rooms = _ladder(min(largest, budget), multiple, chosen.max_shapes)
        found = sizes.Sizes(nodes=rooms, edges=rooms)
    else:
        # Evaluation takes the sizes of training; only the largest of them may grow for it.
        lengths = sorted(nodes for nodes, _ in known or both)
        rooms = _best(ready, [*lengths[:-1], largest], len(trained), multiple)
        found = sizes.heads(both, rooms, step=padding.rounded(1, multiple), whole=whole)
    return attrs.evolve(ready, packing={**ready.packing, "sizes": found})


def _best(
    ready: prepare.Ready, lengths: Sequence[int], num_steps: int, multiple: padding.Multiple
) -> tuple[int, ...]:
    """Choose the numbers of nodes that cost least, steps and compilations together."""
    chosen = ready.command.options
    compiles = chosen.compile or ready.device.static_shapes
    speed, seconds = PRICES[ready.device.name]
    often = ready.num_steps / max(1, num_steps)
    return padding.plan(
        lengths,
        step_cost=lambda nodes: often * _flops(ready.packing["shape"], nodes) / speed,
        compile_cost=seconds if compiles else 0.0,
        multiple=multiple,
        max_shapes=chosen.max_shapes,
    ).sizes


def _flops(shape: cost.ModelShape, nodes: int) -> int:
    """Return the FLOPs of a forward and backward over so many nodes in one chain."""
    return cost.flops(shape, nodes, nodes * (nodes + 1) // 2, nodes)


def _trained(ready: prepare.Ready) -> tuple[list[list[Forward]], bool]:
    """Return the forwards of each step of the run, and whether these are all."""
    rows, place, steps, seen = ready.preview, ready.preview.start, [], 0
    wanted = ready.num_steps
    if ready.command.options.precompute_ref_log_probs:  # all rows are asked, in the first epoch's order
        wanted = max(wanted, rows.steps_per_epoch or 0)
    while len(steps) < wanted and seen < MAX_TOKENS:
        samples, place = rows.take(place)
        seen += sum(len(one.tokens) for one in samples)
        steps.append(list(_forwards(ready, samples)))
    return steps, len(steps) == wanted


def _evaluated(ready: prepare.Ready) -> Iterator[Forward]:
    """Return the forwards of an evaluation."""
    rows, size = ready.held_out, ready.rows.batch_size
    if not isinstance(rows, data.Prepared):
        return
    for start in range(0, len(rows), size):
        found = [s for row in range(start, min(start + size, len(rows))) for s in rows.samples(row)]
        yield from _forwards(ready, ready.arrange(found))


def _forwards(ready: prepare.Ready, samples: Sequence[samples_.Sample]) -> Iterator[Forward]:
    """Return the forwards of a step over all ranks; a pack over the budget is several."""
    budget, share, shape = (ready.packing[name] for name in ("budget", "share", "shape"))
    feed.check_lengths(max((len(one.tokens) for one in samples), default=0), budget)
    split = {"budget": budget, "share": share, "shape": shape}
    assigned = batching.assign(samples, couples=ready.algorithm.couples, num_ranks=ready.ranks.num, **split)
    for members in (members for rank in assigned for members in rank):
        own = [samples[i] for i in members]
        work = cost.work(own, share=share)
        if work.nodes <= budget:
            yield work.nodes, work.edges
            continue
        for part in batching.assign(own, budget=budget, couples="token", share=share)[0]:
            again = cost.work([own[i] for i in part], share=share)
            yield again.nodes, again.edges


def _floor(budget: int, multiple: padding.Multiple) -> int:
    """Return the largest allowed size within a budget, the budget where there is none."""
    size = next((n for n in range(budget, 0, -1) if padding.rounded(n, multiple) <= budget), budget)
    return padding.rounded(size, multiple) if size < budget else budget


def _ladder(top: int, multiple: padding.Multiple, most: int | None) -> tuple[int, ...]:
    """Return sizes for what a generator will write, no more than `most`."""
    growth: float = GROWTH
    rooms = padding.ladder(top, multiple=multiple, growth=growth)
    while most is not None and len(rooms) > max(most, 2):
        growth *= GROWTH
        rooms = padding.ladder(top, multiple=multiple, growth=growth)
    return rooms[-1:] if most == 1 else rooms


def told(found: sizes.Sizes | None) -> list[dict[str, int]]:
    """Return planned sizes as run.json tells them.

    Args:
        found: the plan; None: nothing is padded.
    """
    if found is None:
        return []
    return [{"tokens": n, "predicted": e} for n, e in zip(found.nodes, found.edges, strict=True)]
