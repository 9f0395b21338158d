"""Pieces of a forest attend to what the whole forest does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.plan import pieces, prefix_tree, spans
from tests.core.plan import forests


def _table(tree):
    chains = np.concatenate([np.ones((len(tree.chains), 1), np.int64), tree.chains, tree.chains], axis=1)
    rest = np.concatenate([np.zeros((len(tree.rectangles), 1), np.int64), tree.rectangles], axis=1)
    return np.concatenate([chains, rest])


def _seen(piece, size):
    """Count how often each pair of the whole forest is covered by one piece's blocks."""
    keys = np.concatenate([piece.ancestors, np.arange(piece.start, piece.stop)])
    seen = np.zeros((size, size), np.int64)
    for causal, a, b, x, y in piece.table.tolist():
        block = np.tril(np.ones((b - a, y - x), np.int64)) if causal else np.ones((b - a, y - x), np.int64)
        seen[np.ix_(np.arange(a, b) + piece.start, keys[x:y])] += block
    return seen


@given(forests.sequences(max_sequences=8), st.integers(1, 9))
def test_the_pieces_cover_each_pair_of_the_forest_exactly_once(sequences, budget):
    tree = prefix_tree.build(forests.arrays(sequences))
    size = len(tree.tokens)
    cut = pieces.cut(tree.ends, _table(tree), prefix_tree.pieces(tree, budget))
    place = np.arange(size)
    wanted = (place[:, None] >= place) & (place[:, None] < tree.ends)
    assert (sum((_seen(piece, size) for piece in cut), np.zeros((size, size), np.int64)) == wanted).all()


@given(forests.sequences(max_sequences=8), st.integers(1, 9))
def test_a_piece_keeps_just_what_later_pieces_attend_to(sequences, budget):
    tree = prefix_tree.build(forests.arrays(sequences))
    cut = pieces.cut(tree.ends, _table(tree), prefix_tree.pieces(tree, budget))
    wanted = {int(node) for piece in cut for node in piece.ancestors}
    assert {int(node) for piece in cut for node in piece.kept} == wanted


def test_blocks_of_another_kind_than_chains_and_rectangles_are_not_taken_for_rectangles():
    tree = prefix_tree.build([np.array([1, 2]), np.array([1, 3])])
    table = np.concatenate([_table(tree), [[spans.MASKED, 1, 3, 0, 3]]])
    with pytest.raises(AssertionError, match="fused"):
        pieces.cut(tree.ends, table, ((0, 3),))


@given(forests.sequences(max_sequences=8), st.integers(1, 9))
def test_every_query_of_a_piece_starts_in_one_causal_block_before_any_rectangle(sequences, budget):
    tree = prefix_tree.build(forests.arrays(sequences))
    for piece in pieces.cut(tree.ends, _table(tree), prefix_tree.pieces(tree, budget)):
        causal = piece.table[piece.table[:, 0] == 1]
        started = np.concatenate([np.arange(a, b) for _, a, b, _, _ in causal.tolist()])
        assert sorted(started.tolist()) == list(range(piece.stop - piece.start))
        assert (np.diff(piece.table[:, 0]) <= 0).all()
