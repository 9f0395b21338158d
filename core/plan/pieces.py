"""A forest that is over budget, cut into contiguous spans of its preorder that run one at a time.

Whoever is an ancestor of any node of a span, and lies before it, is an ancestor of its first node: one path.
So a span needs the keys and values of one path, and a node's are needed later only if its subtree reaches
beyond its own span.
"""

from collections.abc import Sequence

import attrs
import numpy as np

from core.plan import spans as kinds


@attrs.frozen(kw_only=True, eq=False)
class Piece:
    """One span, in coordinates of its own.

    Attributes:
        start, stop: its nodes.
        ancestors: nodes before `start` that its nodes attend to, ascending, int64 `[ancestors]`; they are the
            first keys.
        table: (kind, query start, stop, key start, stop), queries counted from `start`, keys from the first
            ancestor.
        kept: its nodes that later spans attend to, ascending, int64 `[kept]`.
    """

    start: int
    stop: int
    ancestors: np.ndarray
    table: np.ndarray
    kept: np.ndarray


def cut(ends: np.ndarray, table: np.ndarray, spans: Sequence[tuple[int, int]]) -> tuple[Piece, ...]:
    """Cut a forest's attention into that of its spans.

    Args:
        ends: one past the last descendant of each node, int64 `[nodes]`.
        table: (kind, query start, stop, key start, stop) of the whole forest, int64 `[blocks, 5]`: its chains
            and rectangles, which are causal and dense, none of them fused or in a batch.
        spans: contiguous, in order, covering every node.

    Returns:
        A piece a span; their blocks together cover each pair of the forest's exactly once.
    """
    assert table[:, 0].max(initial=0) <= kinds.CAUSAL, "blocks of a fused table cannot be cut"
    nodes = np.arange(len(ends))
    pieces = []
    for start, stop in spans:
        ancestors = nodes[:start][ends[:start] > start]
        own = nodes[start:stop]
        pieces.append(
            Piece(
                start=start,
                stop=stop,
                ancestors=ancestors,
                table=_clipped(table, start, stop, ancestors),
                kept=own[ends[start:stop] > stop],
            )
        )
    return tuple(pieces)


def _clipped(table: np.ndarray, start: int, stop: int, ancestors: np.ndarray) -> np.ndarray:
    """Keep the queries of a span; split their keys into those before it and its own."""
    causal = table[:, 0] == kinds.CAUSAL
    first, last = np.maximum(table[:, 1], start), np.minimum(table[:, 2], stop)
    there = first < last
    causal, first, last, keys, keys_end = (
        column[there] for column in (causal, first, last, table[:, 3], table[:, 4])
    )
    own = np.where(causal, first, np.maximum(keys, start))
    own_end = np.where(causal, last, np.minimum(keys_end, stop))
    before_end = np.minimum(np.where(causal, first, keys_end), start)
    shift = len(ancestors) - start
    inside = _rows(causal, first - start, last - start, own + shift, own_end + shift)
    before = _rows(
        np.zeros_like(causal),
        first - start,
        last - start,
        np.searchsorted(ancestors, keys),
        np.searchsorted(ancestors, before_end),
    )
    both = np.concatenate([inside, before])
    both = both[both[:, 3] < both[:, 4]]
    return both[np.argsort(both[:, 0] == kinds.DENSE, kind="stable")]


def _rows(*columns: np.ndarray) -> np.ndarray:
    """Put columns beside each other."""
    return np.stack([column.astype(np.int64) for column in columns], axis=1)
