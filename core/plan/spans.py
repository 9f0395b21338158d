"""Which blocks a forest's attention is run as: what a device's prices make of chains and rectangles."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

# What the queries of a block see of its keys: all; all up to themselves; their ancestors. From BATCH on a
# kind is the number of a batch: causal blocks that one call runs, filled up to the longest of them.
DENSE, CAUSAL, MASKED, BATCH = 0, 1, 2, 3
# Places of a batch: so many that a call costs nothing beside them, so few that copies take little memory.
PLACES = 4096
# Queries that a kernel takes at once, at the least, and keys: of a causal block it looks at all keys of a
# tile that any of its queries sees, so a short block costs as much as if it were dense.
TILE, KEYS = 32, 512

Sizes = int | np.integer | np.ndarray
Row = tuple[int, int, int, int, int]
"""Kind, query start and stop, key start and stop."""


@attrs.frozen(kw_only=True)
class Price:
    """What blocks cost on a device, forward and backward, in nanoseconds.

    Attributes:
        launch: of a block, whatever its size.
        head: of a head of a block, whatever its size.
        pair: of a (query, key) pair that a kernel looks at, for each number of each head.
        masked: of a masked block beyond that, whatever its size.
        mask: of a pair of a masked block, once for all heads: its mask is made.
        row: of merging a query of a dense block, for each number of each head.
        key: of adding the gradients of a key of a dense block, for each number of each head.
        item: of a head of a causal block in a batch, whatever its size.
        moved: of a place of a batch, for each number of each head: it is copied.
    """

    launch: float
    head: float
    pair: float
    masked: float
    mask: float
    row: float
    key: float
    item: float
    moved: float


@attrs.frozen(kw_only=True)
class Rates:
    """What blocks cost for a model, in nanoseconds: `Price` for its heads.

    Attributes:
        block: of a block, whatever its size.
        pair: of a pair that a kernel looks at.
        masked: of a masked block beyond that of any block.
        mask: of a pair of a masked block beyond that of any pair.
        row: of merging a query of a dense block.
        key: of adding the gradients of a key of a dense block.
        batch: of a batch, whatever is in it.
        item: of a causal block in a batch, whatever its size.
        moved: of a place of a batch.
    """

    block: float
    pair: float
    masked: float
    mask: float
    row: float
    key: float
    batch: float
    item: float
    moved: float


def rates(price: Price, *, heads: int, width: int) -> Rates:
    """Return what blocks of so many heads of a width cost."""
    return Rates(
        block=price.launch + price.head * heads,
        pair=price.pair * heads * width,
        masked=price.masked,
        mask=price.mask,
        row=price.row * heads * width,
        key=price.key * heads * width,
        batch=price.launch,
        item=price.item * heads,
        moved=price.moved * heads * width,
    )


def within(
    dense: Sequence[Sequence[int]], query_depths: np.ndarray, key_depths: np.ndarray, window: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Cut dense blocks into runs along one path each, and to what their windows reach.

    Depths rise by one along a run, so a window is a band. Flash kernels align it at the last query and key:
    query i sees keys from i + keys - queries - left.

    Args:
        dense: (query start, stop, key start, stop), keys along one path.
        query_depths, key_depths: positions in the sequences, int64.
        window: how many tokens back a query sees, itself among them.

    Yields:
        (query start, stop, key start, stop, left).
    """
    for a, b, x, y in dense:
        breaks = (a + 1 + np.flatnonzero(np.diff(query_depths[a:b]) != 1)).tolist()
        last = int(key_depths[y - 1])
        for start, end in zip([a, *breaks], [*breaks, b], strict=True):
            ahead = int(query_depths[start]) - last
            stop = min(end, start + window - ahead)
            first = max(x, y + ahead - window)
            if start < stop and first < y:
                yield start, stop, first, y, window - ahead - (stop - start)


def fused(table: np.ndarray, rates: Rates) -> np.ndarray:
    """Run small blocks together and cut large ones otherwise, where that is cheaper.

    Causal blocks of like lengths become batches. Runs of small chains and the rectangles among them become
    masked blocks, all in one run being the dense mask. The cheaper of two is taken: batches alone, and
    batches of what the cheapest masked blocks leave over. A causal block that is left by itself is cut into
    two halves and the rectangle between them, and these again, down to where a call costs more than the pairs
    that a kernel looks at in vain. Dense blocks that form stairs are cut into squarer ones, of which fewer
    queries and keys have to be merged.

    Args:
        table: (kind, query start, stop, key start, stop), causal and dense blocks, int64 `[blocks, 5]`.
        rates: what blocks cost.

    Returns:
        A table that covers the same pairs, dense blocks last.
    """
    rows = table[table[:, 1] < table[:, 2]]
    plans = (_recut(_batched(found, rates), rates) for found in (rows, _masked_runs(rows, rates)))
    return min(plans, key=lambda found: cost(found, rates))


def cost(table: np.ndarray, rates: Rates) -> float:
    """Price a table, in nanoseconds."""
    rows = table[table[:, 1] < table[:, 2]]
    kinds, sizes, keys = rows[:, 0], rows[:, 2] - rows[:, 1], rows[:, 4] - rows[:, 3]
    total = _dense(sizes, keys, rates)[kinds == DENSE].sum()
    total += _whole(sizes[kinds == CAUSAL], rates).sum()
    total += _masked(sizes[kinds == MASKED], rates).sum()
    for kind in np.unique(kinds[kinds >= BATCH]):
        held = sizes[kinds == kind]
        total += rates.batch + len(held) * _item(held.max(), rates)
    return float(total)


def _batched(rows: np.ndarray, rates: Rates) -> np.ndarray:
    """Put causal blocks into batches of like lengths, where these are cheaper.

    In the order of their lengths, the cheapest way to cut them is found by a dynamic programme over lengths.
    """
    sizes = np.where(rows[:, 0] == CAUSAL, rows[:, 2] - rows[:, 1], 0)
    lengths, counts = np.unique(sizes[sizes > 0], return_counts=True)
    before = _cuts(lengths, counts, rates)
    found, number, last = rows.copy(), BATCH, len(lengths)
    while last:
        first, together = before[last]
        if together:
            inside = np.flatnonzero((sizes >= lengths[first]) & (sizes <= lengths[last - 1]))
            held = max(1, PLACES // int(lengths[last - 1]))
            found[inside, 0] = number + np.arange(len(inside)) // held
            number += -(-len(inside) // held)
        last = first
    return found


def _cuts(lengths: np.ndarray, counts: np.ndarray, rates: Rates) -> list[tuple[int, bool]]:
    """Return for each number of lengths, shortest first, where the last part of its cheapest plan begins.

    With it stands whether that part is run together.
    """
    best, before = np.zeros(len(lengths) + 1), [(0, False)]
    below = np.concatenate([[0], np.cumsum(counts)])
    for last in range(1, len(lengths) + 1):
        length = int(lengths[last - 1])
        held = below[last] - below[:last]
        batches = -(-held // max(1, PLACES // length))
        together = best[:last] + batches * rates.batch + held * _item(length, rates)
        apart = best[last - 1] + counts[last - 1] * _causal(length, rates)
        first = int(together.argmin())
        best[last] = min(together[first], apart)
        before.append((first, True) if together[first] < apart else (last - 1, False))
    return before


def _item(size: Sizes, rates: Rates) -> Any:
    """Price a causal block in a batch of blocks of a size."""
    return rates.item + size * rates.moved + causal_pairs(size) * rates.pair


def _masked_runs(rows: np.ndarray, rates: Rates) -> np.ndarray:
    """Exchange runs of small chains and the rectangles among them for masked blocks, where that is cheaper.

    Chains are put into runs of neighbors; the cheapest way is found by a dynamic programme over where runs
    end. A run of one chain stays a causal block. A longer one is one masked block: rectangles inside it go,
    and one whose keys lie in it and whose queries reach beyond it keeps those beyond.
    """
    chains = rows[rows[:, 0] == CAUSAL]
    chains = chains[np.argsort(chains[:, 1], kind="stable")]
    dense = rows[rows[:, 0] == DENSE]
    if len(chains) < 2:
        return rows
    owner = np.searchsorted(chains[:, 3], dense[:, 3], side="right") - 1
    of_chain: list[list[tuple[int, int, int]]] = [[] for _ in range(len(chains))]
    for number, (_, a, b, x, y) in zip(owner.tolist(), dense.tolist(), strict=True):
        if number >= 0:
            of_chain[number].append((a, b, y - x))
    cuts = _cheapest(chains[:, 1].tolist(), chains[:, 2].tolist(), of_chain, rates)
    return _rewritten(chains, dense, owner, cuts)


def causal_pairs(size: Sizes) -> Any:
    """Count the pairs that a kernel looks at in causal blocks of a size."""
    tiles, rest = size // KEYS, size % KEYS
    return tiles * (tiles + 1) // 2 * KEYS**2 + rest * size


def _whole(size: Sizes, rates: Rates) -> Any:
    """Price a causal block that is one call."""
    return rates.block + causal_pairs(size) * rates.pair


def _causal(size: Sizes, rates: Rates) -> float:
    """Price a causal block that may be cut."""
    return _halving(int(size), rates)[0]


@functools.lru_cache(maxsize=1 << 14)
def _halving(size: int, rates: Rates) -> tuple[float, int]:
    """Return the least price of a causal block and how long the first of its halves is; 0: it stays whole."""
    whole = float(_whole(size, rates))
    first = -(-size // (2 * TILE)) * TILE
    if first >= size:
        return whole, 0
    halves = _halving(first, rates)[0] + _halving(size - first, rates)[0] + _dense(size - first, first, rates)
    return min((whole, 0), (halves, first))


def _recut(rows: np.ndarray, rates: Rates) -> np.ndarray:
    """Cut causal blocks that are calls of their own, and stairs of dense ones, which come last."""
    found: list[Row] = []
    stairs: list[list[Row]] = []
    of_keys: dict[int, list[Row]] = {}
    for row in sorted(map(tuple, rows.tolist()), key=lambda row: row[1]):
        kind, a, b, x, y = row
        if kind != DENSE:
            found += _halved(a, b, x, rates) if kind == CAUSAL else [row]
        elif (stair := of_keys.get(x)) and stair[-1][2] == a and y < stair[-1][4]:
            stair.append(row)
        else:
            of_keys[x] = [row]
            stairs.append(of_keys[x])
    for stair in stairs:
        found += _squarer(stair, rates)[1]
    found.sort(key=lambda row: row[0] == DENSE)
    return np.array(found, dtype=rows.dtype).reshape(-1, rows.shape[1])


def _halved(a: int, b: int, x: int, rates: Rates) -> list[Row]:
    """Cut a causal block whose keys begin at `x`, as `_halving` says."""
    first = _halving(b - a, rates)[1]
    if not first:
        return [(CAUSAL, a, b, x, x + b - a)]
    middle = a + first
    halves = _halved(a, middle, x, rates) + _halved(middle, b, x + first, rates)
    return [*halves, (DENSE, middle, b, x, x + first)]


def _squarer(stair: list[Row], rates: Rates) -> tuple[float, list[Row]]:
    """Return the price of a stair, whose rows see fewer and fewer of the same keys, and its cheapest blocks.

    Either each row is a block; or what the first half of them all see is one, and what is left of these,
    and the other half, are stairs again. The blocks are as many, but squarer.
    """
    apart = sum(float(_dense(b - a, y - x, rates)) for _, a, b, x, y in stair)
    if len(stair) < 2:
        return apart, stair
    half = len(stair) // 2 + 1
    _, _, stop, x, seen = stair[half - 1]
    block = (DENSE, stair[0][1], stop, x, seen)
    total, blocks = float(_dense(stop - block[1], seen - x, rates)), [block]
    for part in ([(kind, a, b, seen, y) for kind, a, b, _, y in stair[: half - 1]], stair[half:]):
        price, cut = _squarer(part, rates)
        total, blocks = total + price, blocks + cut
    return (apart, stair) if apart <= total else (total, blocks)


def _masked(size: Sizes, rates: Rates) -> Any:
    """Price a masked block."""
    return rates.block + rates.masked + size * size * (rates.pair + rates.mask)


def _dense(queries: Sizes, keys: Sizes, rates: Rates) -> Any:
    """Price a dense block."""
    return rates.block + queries * keys * rates.pair + queries * rates.row + keys * rates.key


def _cheapest(
    starts: list[int], stops: list[int], dense: list[list[tuple[int, int, int]]], rates: Rates
) -> list[int]:
    """Return where the runs of the cheapest plan begin, and the number of chains.

    A dense block belongs to the chain that holds its keys, so the cost of a plan is a sum over its runs.
    """
    num = len(starts)
    best, before = [0.0] + [float("inf")] * num, [0] * (num + 1)
    alone = [
        _causal(b - a, rates) + sum(_dense(last - first, keys, rates) for first, last, keys in blocks)
        for a, b, blocks in zip(starts, stops, dense, strict=True)
    ]
    for first in range(num):
        apart = 0.0
        for last in range(first, num):
            apart += alone[last]
            found = alone[first]
            if last > first:
                found = _masked(stops[last] - starts[first], rates)
                if found > apart:
                    break  # a longer run is dearer still: masks grow by the square, what they save does not
                run = dense[first : last + 1]
                left = ((b - max(a, stops[last]), n) for of in run for a, b, n in of)
                found += sum(_dense(queries, keys, rates) for queries, keys in left if queries > 0)
            if best[first] + found < best[last + 1]:
                best[last + 1], before[last + 1] = best[first] + found, first
    cuts = [num]
    while cuts[-1]:
        cuts.append(before[cuts[-1]])
    return cuts[::-1]


def _rewritten(chains: np.ndarray, dense: np.ndarray, owner: np.ndarray, cuts: list[int]) -> np.ndarray:
    """Write the table of a plan."""
    firsts, lasts = np.array(cuts[:-1]), np.array(cuts[1:]) - 1
    blocks = chains[firsts].copy()
    blocks[:, 0] = np.where(lasts > firsts, MASKED, CAUSAL)
    blocks[:, 2], blocks[:, 4] = chains[lasts, 2], chains[lasts, 4]
    run = np.searchsorted(firsts, owner, side="right") - 1
    kept = dense.copy()
    masked = (owner >= 0) & (blocks[run, 0] == MASKED)
    kept[:, 1] = np.where(masked, np.maximum(dense[:, 1], blocks[run, 2]), dense[:, 1])
    return np.concatenate([blocks, kept[kept[:, 1] < kept[:, 2]]])
