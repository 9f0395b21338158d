"""Sequences that share prefixes, merged into a forest that holds each token once, laid out for attention."""

from collections.abc import Sequence

import attrs
import numpy as np
from jaxtyping import Int64, Integer

from core.plan import prefix_order


@attrs.frozen(kw_only=True, eq=False)
class PrefixTree:
    """A forest over tokens in preorder, the largest subtree first.

    A *chain* follows the child with the most descendants from its top down to a leaf. The forest is laid
    out chain by chain: a chain, then the subtrees that hang off it, those that leave deepest first. So a
    chain, and each subtree, is one run of nodes; node j is an ancestor of i, or i itself, exactly when `j
    <= i < ends[j]`; and any root-to-node path touches at most log2(nodes) + 1 chains.

    Attributes:
        tokens: token id of each node, int64 `[nodes]`.
        depths: number of ancestors of each node, int64 `[nodes]`: its position in every sequence that it is
            part of.
        ends: one past the last descendant of each node, int64 `[nodes]`.
        parents: parent of each node, -1 at roots, int64 `[nodes]`.
        leaves: node of each sequence's last token, -1 for an empty sequence, int64 `[sequences]`.
        chains: start and stop of each chain, int64 `[chains, 2]`, in order, covering every node once.
        rectangles: int64 `[rectangles, 4]`, query start and stop, key start and stop. All that nodes attend
            to is the causal part of their own chain and these rectangles, each pair exactly once.
    """

    tokens: Int64[np.ndarray, " nodes"]
    depths: Int64[np.ndarray, " nodes"]
    ends: Int64[np.ndarray, " nodes"]
    parents: Int64[np.ndarray, " nodes"]
    leaves: Int64[np.ndarray, " sequences"]
    chains: Int64[np.ndarray, "chains 2"]
    rectangles: Int64[np.ndarray, "rectangles 4"]


def build(
    sequences: Sequence[Integer[np.ndarray, " _"]],
    *,
    keys: Sequence[Integer[np.ndarray, " _"] | None] | None = None,
    share: bool = True,
) -> PrefixTree:
    """Merge the common prefixes of sequences.

    Two tokens become one node when everything before them, they themselves, and their keys where given, are
    equal. The tree does not depend on the order of the sequences; only `leaves` follows it. Equal sequences
    share every node, a sequence that is a prefix of another ends inside it, and an empty one has leaf -1.

    Args:
        sequences: integer arrays of one axis, one a sample.
        keys: an integer array a sequence, as long as it, or None: tokens with different keys are not merged.
        share: False keeps every sequence a chain of its own, in the order given.

    Returns:
        The forest.

    Raises:
        ValueError: a sequence is not an integer array of one axis, or a key does not line up with it.
    """
    rows, width = prefix_order.words(sequences, keys)
    if not share:
        return _separate([row[::width] for row in rows])
    order, shared = prefix_order.places(rows)
    if width > 1:
        rows, shared = [row[::width] for row in rows], [count // width for count in shared]
    return _laid_out(rows, _segments([len(row) for row in rows], order, shared))


def path(tree: PrefixTree, sequence: int) -> Int64[np.ndarray, " length"]:
    """Return the node of each token of one sequence, its first token first, int64 `[length]`."""
    pieces = []
    node = int(tree.leaves[sequence])
    starts = tree.chains[:, 0]
    while node >= 0:
        start = int(starts[np.searchsorted(starts, node, side="right") - 1])
        pieces.append(np.arange(start, node + 1))
        node = int(tree.parents[start])
    return np.concatenate(pieces[::-1]) if pieces else np.zeros(0, np.int64)


def paths(tree: PrefixTree) -> tuple[Int64[np.ndarray, " positions"], Int64[np.ndarray, " offsets"]]:
    """Return the nodes of all sequences' tokens, one sequence after the other.

    A path is a run of nodes in each chain that it touches, at most log2(nodes) + 1 of them, so whole levels
    of chains are taken at once.

    Returns:
        Nodes, int64 `[tokens]`, and where each sequence starts in them, int64 `[sequences + 1]`.
    """
    some = tree.leaves >= 0
    lengths = np.zeros(len(some), np.int64)
    lengths[some] = tree.depths[tree.leaves[some]] + 1
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    starts = tree.chains[:, 0]
    node, place = tree.leaves[some], offsets[1:][some]
    runs = [(np.zeros(0, np.int64),) * 3]
    while len(node):
        start = starts[np.searchsorted(starts, node, side="right") - 1]
        place = place - (node + 1 - start)
        runs.append((place, start, node + 1))
        above = tree.parents[start]
        node, place = above[above >= 0], place[above >= 0]
    places, firsts, stops = (np.concatenate(column) for column in zip(*runs, strict=True))
    order = np.argsort(places)
    nodes = np.arange(len(tree.tokens))
    spans = zip(firsts[order].tolist(), stops[order].tolist(), strict=True)
    return np.concatenate([nodes[:0], *[nodes[first:stop] for first, stop in spans]]), offsets


def pieces(tree: PrefixTree, budget: int) -> tuple[tuple[int, int], ...]:
    """Cut the preorder into spans of at most `budget` nodes, as few as there can be.

    Where there is room to spare, a cut falls between two chains rather than inside one.

    Args:
        tree: the forest.
        budget: most nodes a span may hold, at least 1.

    Returns:
        Start and stop of each span, in order.

    Raises:
        ValueError: the budget is below 1.
    """
    if budget < 1:
        raise ValueError(f"pieces of {budget} nodes came; at least 1 node a piece is wanted.")
    size = len(tree.tokens)
    spare = -(-size // budget) * budget - size
    spans = []
    start = 0
    while size - start > budget:
        stop = start + budget
        border = int(tree.chains[np.searchsorted(tree.chains[:, 0], stop, side="right") - 1, 0])
        if border > start and stop - border <= spare:
            spare -= stop - border
            stop = border
        spans.append((start, stop))
        start = stop
    return (*spans, (start, size)) if size else ()


@attrs.frozen(kw_only=True, eq=False)
class _Segments:
    """Runs of nodes without a fork, as columns over segments, and where each sequence ends.

    Attributes:
        parent, start, stop: segment above (-1 at roots), and the depths between which a segment lies.
        source: a sequence that runs through it.
        size: nodes in it and below it.
        children: segments right below it, in lexicographic order.
        last: segment in which each sequence ends, -1 for an empty one.
        roots: segments without a parent, in lexicographic order.
    """

    parent: list[int]
    start: list[int]
    stop: list[int]
    source: list[int]
    size: list[int]
    children: list[list[int]]
    last: list[int]
    roots: list[int]


def _segments(lengths: list[int], order: list[int], shared: list[int]) -> _Segments:
    """Return the at most 2 sequences - 1 segments of the tree from the common prefixes of sorted neighbors.

    The stack holds the segments of the last sequence, its first tokens lowest. The next one closes those
    that it does not run through and splits the one in which it leaves.
    """
    parent: list[int] = []
    start: list[int] = []
    stop: list[int] = []
    source: list[int] = []
    size: list[int] = []
    children: list[list[int]] = []
    roots: list[int] = []
    last = [-1] * (len(lengths) + 1)
    stack = [-1]

    def opened(begin: int, end: int, sequence: int) -> None:
        stack.append(len(start))
        parent.append(-1)
        start.append(begin)
        stop.append(end)
        source.append(sequence)
        size.append(0)
        children.append([])

    def closed(segment: int, above: int) -> None:
        size[segment] += stop[segment] - start[segment]
        if above < 0:
            roots.append(segment)
        else:
            parent[segment] = above
            children[above].append(segment)
            size[above] += size[segment]

    # One more sequence, of no tokens, closes everything; it writes to the last place of `last`.
    for i, length, depth in zip(
        [*order, -1], [*map(lengths.__getitem__, order), 0], [*shared, 0], strict=True
    ):
        while stack[-1] >= 0 and start[stack[-1]] >= depth:
            top = stack.pop()
            closed(top, stack[-1])
        if stack[-1] >= 0 and stop[stack[-1]] > depth:
            lower = stack.pop()
            opened(start[lower], depth, source[lower])
            start[lower] = depth
            closed(lower, stack[-1])
        if length > depth:
            opened(depth, length, i)
        last[i] = stack[-1]
    return _Segments(
        parent=parent,
        start=start,
        stop=stop,
        source=source,
        size=size,
        children=children,
        last=last[:-1],
        roots=roots,
    )


def _laid_out(rows: Sequence[np.ndarray], tree: _Segments) -> PrefixTree:
    """Lay segments out: a chain, then what hangs off it, deepest first; ties go by lexicographic order."""
    size, children = tree.size, tree.children
    first = [0] * len(size)
    sequence: list[int] = []
    chains: list[tuple[int, int]] = []
    rectangles: list[tuple[int, int, int, int]] = []
    # Tops of chains to come, with the keys that they attend to beyond their own chain and how many nodes,
    # they and their siblings together, do so. Only the first of siblings bears a number of nodes: it opens
    # the rectangle for all.
    tops = [(root, 0, 0, 0) for root in reversed(tree.roots)]
    place = 0
    while tops:
        segment, key, key_stop, queries = tops.pop()
        if queries:
            rectangles.append((place, place + queries, key, key_stop))
        top = place
        while True:
            first[segment] = place
            sequence.append(segment)
            place += tree.stop[segment] - tree.start[segment]
            below = children[segment]
            if not below:
                break
            segment = max(below, key=size.__getitem__) if len(below) > 1 else below[0]
            light = [child for child in below if child != segment]
            if light:
                tops.extend((child, top, place, 0) for child in light[:0:-1])
                tops.append((light[0], top, place, sum([size[child] for child in light])))
        chains.append((top, place))
    return _filled(rows, tree, sequence, first, chains, rectangles)


def _filled(
    rows: Sequence[np.ndarray],
    tree: _Segments,
    sequence: list[int],
    first: list[int],
    chains: list[tuple[int, int]],
    rectangles: list[tuple[int, int, int, int]],
) -> PrefixTree:
    """Spell out the nodes of segments whose order and places are known."""
    parent, start, stop, size = tree.parent, tree.start, tree.stop, tree.size
    counts = np.array([stop[s] - start[s] for s in sequence], np.int64)
    places = np.array([first[s] for s in sequence], np.int64)
    shift = np.array([start[s] - first[s] for s in sequence], np.int64)
    ends = np.array([first[s] + size[s] for s in sequence], np.int64)
    above = [parent[s] for s in sequence]
    runs = [rows[tree.source[s]][start[s] : stop[s]] for s in sequence]
    depths = np.repeat(shift, counts)
    parents = np.arange(len(depths))
    # In place: fresh pages cost more than the arithmetic on them.
    depths += parents
    parents -= 1
    parents[places] = [first[s] + stop[s] - start[s] - 1 if s >= 0 else -1 for s in above]
    return PrefixTree(
        tokens=np.concatenate(runs) if runs else np.zeros(0, np.int64),
        depths=depths,
        ends=np.repeat(ends, counts),
        parents=parents,
        leaves=np.array([first[s] + stop[s] - start[s] - 1 if s >= 0 else -1 for s in tree.last], np.int64),
        chains=np.array(chains, np.int64).reshape(-1, 2),
        rectangles=np.array(rectangles, np.int64).reshape(-1, 4),
    )


def _separate(rows: Sequence[np.ndarray]) -> PrefixTree:
    """Return the forest in which every sequence is a chain of its own."""
    lengths = np.array([len(row) for row in rows], np.int64)
    stops = np.cumsum(lengths)
    starts = stops - lengths
    some = lengths > 0
    nodes = np.arange(int(lengths.sum()))
    parents = nodes - 1
    parents[starts[some]] = -1
    return PrefixTree(
        tokens=np.concatenate(rows) if rows else np.zeros(0, np.int64),
        depths=nodes - np.repeat(starts, lengths),
        ends=np.repeat(stops, lengths),
        parents=parents,
        leaves=np.where(some, stops - 1, -1),
        chains=np.stack([starts, stops], 1)[some],
        rectangles=np.zeros((0, 4), np.int64),
    )
