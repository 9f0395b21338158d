"""Which samples go together in which pack on which rank, and in which order the rows of a dataset come."""

import bisect
import heapq
import itertools
import typing
from collections.abc import Hashable, Sequence
from typing import Literal

import attrs
import numpy as np
from jaxtyping import Int64

from core import keys, whole
from core.plan import cost, prefix_order
from core.plan import sample as samples_

Assignment = tuple[tuple[tuple[int, ...], ...], ...]
Couples = Literal["token", "sample", "pair", "group", "step"]
COUPLES = typing.get_args(Couples)


def assign(
    samples: Sequence[samples_.Sample],
    *,
    budget: int,
    couples: str = "sample",
    num_ranks: int = 1,
    share: bool = True,
    shape: cost.ModelShape | None = None,
) -> Assignment:
    """Put every sample into one pack of one rank.

    What `couples` ties together stays together. A group (prompt) is split only when it does not fit the
    budget, or when there are fewer groups than ranks. What is larger than the budget alone gets a pack of
    its own. Every rank gets the same number of packs, as few as possible; then the busiest rank has as
    little to do as possible; then as few tokens as possible are repeated. A prefix that several packs share
    is repeated in each, and counted in each.

    Two ways are tried and the better one taken: runs of the lexicographic order, which keep shared prefixes
    together, and largest first into what room there is, which fills better where little is shared.

    Args:
        samples: what is to be trained in one step.
        budget: most nodes in a pack, at least 1.
        couples: the least that must be seen together: `token`, `sample`, `pair`, `group` or `step`.
        num_ranks: number of ranks, at least 1.
        share: whether packs will share prefixes.
        shape: the model, whose FLOPs are then balanced; None balances tokens.

    Returns:
        Indices of samples, `[rank][pack]`; an empty tuple is a pack with nothing in it.

    Raises:
        ValueError: `couples` is another word, or budget or number of ranks is no whole number from 1 up.
    """
    if couples not in COUPLES:
        raise ValueError(f"couples is {couples!r}; one of {', '.join(COUPLES)} is wanted.")
    budget = whole.number("budget", budget, least=1)
    num_ranks = whole.number("num_ranks", num_ranks, least=1)
    if not samples:
        return ((),) * num_ranks
    table = _table(samples, share, shape)
    blocks = _blocks(table, _units(samples, table, couples), budget, num_ranks)
    plans = [_runs(table, blocks, budget, num_ranks), _largest_first(table, blocks, budget, num_ranks)]
    dealt = [_dealt(table, plan, num_ranks) for plan in plans]
    return min(dealt, key=lambda one: one[0])[1]


def order(num_rows: int, *, seed: int | None, epoch: int) -> Int64[np.ndarray, " rows"]:
    """Return the order in which the rows of an epoch come.

    Rows are sorted by splitmix64 hashes of (seed, epoch, row): the same on every platform and with every
    version of anything, and any epoch's order is known without those before it.

    Args:
        num_rows: number of rows.
        seed: any integer; None leaves the rows as they come.
        epoch: number of the epoch, 0 first.

    Returns:
        A permutation, int64 `[num_rows]`.

    Raises:
        ValueError: a number is not whole, or the number of rows or of the epoch is negative.
    """
    rows = np.arange(whole.number("num_rows", num_rows), dtype=np.int64)
    turn = whole.number("epoch", epoch)
    if seed is None:
        return rows
    start = np.array([whole.number("seed", seed, least=None) % 2**64], np.uint64)
    stream = keys.mixed(keys.mixed(start) + np.uint64(turn))
    return np.argsort(keys.mixed(stream + rows.astype(np.uint64)), kind="stable")


@attrs.frozen(kw_only=True, eq=False)
class _Table:
    """Samples in lexicographic order and what each prefix of each costs.

    Attributes:
        order: index of the sample at each place.
        shared: leading tokens shared with the place before.
        trained: running count of trained tokens of the sample at each place, `[length + 1]` each.
        rates: FLOPs (or nodes) of a node, a pair and an edge.
    """

    order: list[int]
    shared: Int64[np.ndarray, " samples"]
    trained: list[Int64[np.ndarray, " _"]]
    rates: tuple[int, int, int]


def _table(samples: Sequence[samples_.Sample], share: bool, shape: cost.ModelShape | None) -> _Table:
    """Sort samples; without sharing they stay as they come."""
    if share:
        places = prefix_order.sort([one.tokens for one in samples], keys=[one.share for one in samples])
        ordered, shared = places.order.tolist(), places.shared
    else:
        ordered, shared = list(range(len(samples))), np.zeros(len(samples), np.int64)
    rates = (1, 0, 0)
    if shape:
        # A layer's 7/2 of attention keep half a FLOP from being lost in whole numbers.
        node, pair, edge = (cost.flops(shape, *two) // 2 for two in ((2, 0, 0), (0, 2, 0), (0, 0, 2)))
        rates = (node, pair, edge)
    return _Table(
        order=ordered,
        shared=shared,
        trained=[np.concatenate([[0], np.cumsum(samples[i].trained)]) for i in ordered],
        rates=rates,
    )


def _alike(table: _Table, one: int, two: int) -> int:
    """Return the tokens that the samples at two places share: the least that neighbors between them share."""
    low, high = min(one, two), max(one, two)
    return int(table.shared[low + 1 : high + 1].min())


def _price(table: _Table, place: int, start: int, stop: int) -> int:
    """Return what the tokens from start to stop of the sample at a place cost."""
    node, pair, edge = table.rates
    pairs = (stop * (stop + 1) - start * (start + 1)) // 2
    trained = table.trained[place]
    return node * (stop - start) + pair * pairs + edge * int(trained[stop] - trained[start])


def _load(table: _Table, places: Sequence[int]) -> tuple[int, int]:
    """Return the nodes and the price of a tree over samples whose places are given in ascending order."""
    nodes = price = 0
    before = -1
    for place in places:
        common = _alike(table, before, place) if before >= 0 else 0
        stop = len(table.trained[place]) - 1
        nodes += stop - common
        price += _price(table, place, common, stop)
        before = place
    return nodes, price


@attrs.frozen(kw_only=True, eq=False)
class _Block:
    """Samples that are moved together.

    Attributes:
        places: where they stand in the table, ascending.
        nodes, price: of their tree alone.
        saved_nodes, saved_price: how much less that is right behind the block before it.
    """

    places: list[int]
    nodes: int
    price: int
    saved_nodes: int = 0
    saved_price: int = 0


def _units(samples: Sequence[samples_.Sample], table: _Table, couples: str) -> list[list[list[int]]]:
    """Return the units of each group as places; groups and units come in order of their first place."""
    groups: dict[Hashable, dict[Hashable, list[int]]] = {}
    homes: dict[Hashable, Hashable] = {}
    for place, i in enumerate(table.order):
        one = samples[i]
        unit = {"pair": one.unit, "group": one.group, "step": 0}.get(couples, i)
        home = homes.setdefault(unit, 0 if couples == "step" else one.group)
        groups.setdefault(home, {}).setdefault(unit, []).append(place)
    return [list(units.values()) for units in groups.values()]


def _blocks(table: _Table, groups: list[list[list[int]]], budget: int, num_ranks: int) -> list[_Block]:
    """Return what is moved as a whole: groups that fit, units of the others."""
    whole = [sorted(place for unit in units for place in unit) for units in groups]
    loads = [_load(table, places) for places in whole]
    split = [len(units) > 1 and nodes > budget for units, (nodes, _) in zip(groups, loads, strict=True)]
    by_price = sorted(range(len(groups)), key=lambda g: (-loads[g][1], g))
    for g in by_price:
        if sum(len(units) if cut else 1 for units, cut in zip(groups, split, strict=True)) >= num_ranks:
            break
        split[g] = True
    blocks: list[_Block] = []
    for places, units, cut in zip(whole, groups, split, strict=True):
        for part in units if cut else [places]:
            nodes, price = _load(table, part)
            common = _alike(table, blocks[-1].places[-1], part[0]) if blocks else 0
            saved = _price(table, part[0], 0, common)
            blocks.append(
                _Block(places=part, nodes=nodes, price=price, saved_nodes=common, saved_price=saved)
            )
    return blocks


def _runs(table: _Table, blocks: list[_Block], budget: int, num_ranks: int) -> list[list[int]]:
    """Cut the blocks, as they come, into runs; returns the places of each."""
    nodes = _line([(b.nodes, b.saved_nodes) for b in blocks])
    prices = _line([(b.price, b.saved_price) for b in blocks])
    roof = prices.sums[-1] + prices.firsts[0]
    if num_ranks > 1:
        most = -(-_fewest(nodes, prices, budget, roof) // num_ranks) * num_ranks
        floor = max(prices.firsts) - 1
        while roof - floor > 1:
            middle = (roof + floor) // 2
            if _fewest(nodes, prices, budget, middle) <= most:
                roof = middle
            else:
                floor = middle
    cuts = _cheapest(nodes, prices, budget, roof, [b.saved_price for b in blocks])
    runs = [blocks[start:stop] for start, stop in itertools.pairwise(cuts)]
    return _spread(runs, num_ranks)


@attrs.frozen(kw_only=True, eq=False)
class _Line:
    """Costs of runs of blocks in O(1).

    Attributes:
        firsts: what each block costs as the first of a run.
        sums: running sum, `[blocks + 1]`, of what each costs behind the one before it.
    """

    firsts: list[int]
    sums: list[int]


def _line(costs: list[tuple[int, int]]) -> _Line:
    """Take (cost alone, saved behind the one before) of each block."""
    steps = itertools.accumulate((alone - saved for alone, saved in costs), initial=0)
    return _Line(firsts=[alone for alone, _ in costs], sums=list(steps))


def _run(line: _Line, start: int, stop: int) -> int:
    """Return what blocks start to stop (not included) cost together."""
    return line.firsts[start] + line.sums[stop] - line.sums[start + 1]


def _furthest(line: _Line, start: int, limit: int) -> int:
    """Return the largest stop whose run from start costs at most the limit, start + 1 at least."""
    most = limit - line.firsts[start] + line.sums[start + 1]
    return max(bisect.bisect_right(line.sums, most) - 1, start + 1)


def _fewest(nodes: _Line, prices: _Line, budget: int, roof: int) -> int:
    """Return the least number of runs within the budget and the price."""
    count = start = 0
    while start < len(nodes.firsts):
        start = min(_furthest(nodes, start, budget), _furthest(prices, start, roof))
        count += 1
    return count


def _cheapest(nodes: _Line, prices: _Line, budget: int, roof: int, saved: list[int]) -> list[int]:
    """Return the borders of the fewest runs within the limits that repeat the least.

    best[i] = min over the starts s of a run that ends at i of best[s] + (1, what is repeated at s); starts
    leave the window in order, so a queue of rising values holds the minimum at its head.
    """
    size = len(saved)
    best = [(0, -saved[0])]
    back = [0]
    queue: list[tuple[tuple[int, int], int]] = []
    head = low = 0
    for stop in range(1, size + 1):
        count, repeated = best[-1]
        value = (count + 1, repeated + saved[stop - 1])
        while len(queue) > head and queue[-1][0] >= value:
            queue.pop()
        queue.append((value, stop - 1))
        while low < stop - 1 and (_run(nodes, low, stop) > budget or _run(prices, low, stop) > roof):
            low += 1
        while queue[head][1] < low:
            head += 1
        best.append(queue[head][0])
        back.append(queue[head][1])
    cuts = [size]
    while cuts[-1]:
        cuts.append(back[cuts[-1]])
    return cuts[::-1]


def _largest_first(table: _Table, blocks: list[_Block], budget: int, num_ranks: int) -> list[list[int]]:
    """Fill packs with the largest blocks first; only what all blocks share is taken to be shared."""
    common = int(table.shared[1:].min()) if len(table.shared) > 1 else 0
    needs = [block.nodes - common for block in blocks]
    room = budget - common
    packs: list[list[_Block]] = []
    rooms: list[tuple[int, int]] = []
    for b in sorted(range(len(blocks)), key=lambda b: (-needs[b], b)):
        at = bisect.bisect_left(rooms, (needs[b], -1))
        left, pack = rooms.pop(at) if at < len(rooms) else (room, len(packs))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(blocks[b])
        bisect.insort(rooms, (left - needs[b], pack))
    if num_ranks > 1:
        packs = _level(blocks, needs, room, -(-len(packs) // num_ranks) * num_ranks) or packs
    return _spread(packs, num_ranks)


def _level(blocks: list[_Block], needs: list[int], room: int, num_packs: int) -> list[list[_Block]] | None:
    """Put the dearest block first into the pack with room and least to do; None where there is no room."""
    packs: list[list[_Block]] = [[] for _ in range(num_packs)]
    rooms = [room] * num_packs
    heap = [(0, 0, pack) for pack in range(num_packs)]
    for b in sorted(range(len(blocks)), key=lambda b: (-blocks[b].price, b)):
        full = []
        while heap and rooms[heap[0][2]] < needs[b] and packs[heap[0][2]]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, count, pack = heapq.heappop(heap)
        packs[pack].append(blocks[b])
        rooms[pack] -= needs[b]
        for entry in (*full, (load + blocks[b].price, count + 1, pack)):
            heapq.heappush(heap, entry)
    return [pack for pack in packs if pack]


def _spread(packs: list[list[_Block]], num_ranks: int) -> list[list[int]]:
    """Halve packs until every rank can have one, as far as there are blocks; returns places."""
    packs = list(packs)
    while len(packs) < num_ranks and any(len(pack) > 1 for pack in packs):
        widest = max(
            (p for p in range(len(packs)) if len(packs[p]) > 1), key=lambda p: sum(b.price for b in packs[p])
        )
        pack = packs.pop(widest)
        packs += [pack[: len(pack) // 2], pack[len(pack) // 2 :]]
    return [sorted(place for block in pack for place in block.places) for pack in packs]


def _dealt(table: _Table, packs: list[list[int]], num_ranks: int) -> tuple[tuple[int, int, int], Assignment]:
    """Deal packs to ranks, the dearest to the one with least to do; returns how bad it is, and the packs."""
    prices = [_load(table, pack)[1] for pack in packs]
    height = -(-len(packs) // num_ranks)
    heap = [(0, 0, rank) for rank in range(num_ranks)]
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for p in sorted(range(len(packs)), key=lambda p: (-prices[p], p)):
        load, count, rank = heapq.heappop(heap)
        ranks[rank].append(tuple(sorted(table.order[place] for place in packs[p])))
        loads[rank] = load + prices[p]
        if count + 1 < height:
            heapq.heappush(heap, (loads[rank], count + 1, rank))
    padded = tuple((*rank, *((),) * (height - len(rank))) for rank in ranks)
    return (height, max(loads), sum(loads)), padded
