import math
import time

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from core.plan import prefix_tree
from tests.core.plan import forests

FIELDS = ("tokens", "depths", "ends", "parents", "chains", "rectangles")


@hypothesis.given(forests.sequences())
def test_nodes_are_those_of_a_brute_force_trie_each_once(rows):
    tree = prefix_tree.build(forests.arrays(rows))
    nodes = forests.prefixes(tree)
    assert len(nodes) == len(set(nodes))
    assert set(nodes) == forests.trie(rows)
    assert tree.depths.tolist() == [len(node) - 1 for node in nodes]


@hypothesis.given(forests.sequences(), st.booleans())
def test_every_sequence_is_recovered_from_its_path(rows, share):
    tree = prefix_tree.build(forests.arrays(rows), share=share)
    nodes, offsets = prefix_tree.paths(tree)
    assert offsets.tolist() == [sum(map(len, rows[:stop])) for stop in range(len(rows) + 1)]
    for i, row in enumerate(rows):
        one = prefix_tree.path(tree, i)
        assert one.tolist() == nodes[offsets[i] : offsets[i + 1]].tolist()
        assert tree.tokens[one].tolist() == row
        assert tree.depths[one].tolist() == list(range(len(row)))
        assert tree.leaves[i] == (one[-1] if row else -1)


@hypothesis.given(forests.sequences(), st.booleans())
def test_ends_say_who_is_an_ancestor(rows, share):
    tree = prefix_tree.build(forests.arrays(rows), share=share)
    query, key = np.ogrid[: len(tree.tokens), : len(tree.tokens)]
    assert (((query >= key) & (query < tree.ends[None])) == forests.ancestors(tree)).all()


@hypothesis.given(forests.sequences())
def test_chains_and_rectangles_cover_every_allowed_pair_exactly_once(rows):
    tree = prefix_tree.build(forests.arrays(rows))
    size = len(tree.tokens)
    covered = np.zeros((size, size), int)
    merges = np.zeros(size, int)
    for start, stop in tree.chains:
        covered[start:stop, start:stop] += np.tri(stop - start, dtype=int)
    for start, stop, key, key_stop in tree.rectangles:
        covered[start:stop, key:key_stop] += 1
        merges[start:stop] += 1
    assert (covered == forests.ancestors(tree)).all()
    leaves = size - len(set(tree.parents.tolist()) - {-1})
    assert len(tree.chains) == leaves
    assert len(tree.rectangles) <= max(leaves - 1, 0)
    assert merges.max(initial=0) <= math.log2(max(size, 1))


@hypothesis.given(forests.sequences())
def test_chains_cover_the_nodes_in_order_and_go_to_the_largest_child(rows):
    tree = prefix_tree.build(forests.arrays(rows))
    borders = [0, *tree.chains[:, 1].tolist()]
    assert tree.chains[:, 0].tolist() == borders[:-1]
    assert borders[-1] == len(tree.tokens)
    sizes = tree.ends - np.arange(len(tree.tokens))
    for node, parent in enumerate(tree.parents.tolist()):
        if parent >= 0 and parent + 1 != node:
            assert tree.parents[parent + 1] == parent
            assert sizes[node] <= sizes[parent + 1]


@hypothesis.given(forests.sequences(), st.randoms(use_true_random=False))
def test_the_order_of_sequences_changes_nothing_but_leaves(rows, random):
    moved = random.sample(range(len(rows)), len(rows))
    one = prefix_tree.build(forests.arrays(rows))
    two = prefix_tree.build(forests.arrays([rows[i] for i in moved]))
    for field in FIELDS:
        assert np.array_equal(getattr(one, field), getattr(two, field)), field
    assert two.leaves.tolist() == [one.leaves[i] for i in moved]


@hypothesis.given(forests.sequences(), st.integers(1, 4))
def test_duplicates_share_every_node(rows, times):
    one = prefix_tree.build(forests.arrays(rows))
    many = prefix_tree.build(forests.arrays(rows * times))
    for field in FIELDS:
        assert np.array_equal(getattr(one, field), getattr(many, field)), field
    assert many.leaves.tolist() == one.leaves.tolist() * times


@hypothesis.given(forests.sequences())
def test_without_sharing_every_sequence_is_a_chain_in_the_order_given(rows):
    tree = prefix_tree.build(forests.arrays(rows), share=False)
    assert tree.tokens.tolist() == [token for row in rows for token in row]
    assert [tree.tokens[a:b].tolist() for a, b in tree.chains] == [row for row in rows if row]
    assert len(tree.rectangles) == 0
    assert (tree.parents == -1).sum() == sum(bool(row) for row in rows)


@hypothesis.given(forests.sequences(), st.integers(1, 20))
def test_pieces_cover_the_preorder_within_the_budget_and_are_as_few_as_can_be(rows, budget):
    tree = prefix_tree.build(forests.arrays(rows))
    pieces = prefix_tree.pieces(tree, budget)
    size = len(tree.tokens)
    assert [node for start, stop in pieces for node in range(start, stop)] == list(range(size))
    assert all(0 < stop - start <= budget for start, stop in pieces)
    assert len(pieces) == -(-size // budget)


def test_a_cut_falls_between_chains_where_there_is_room():
    rows = [[1] * 10, [2] * 6]
    tree = prefix_tree.build(forests.arrays(rows))
    assert prefix_tree.pieces(tree, 12) == ((0, 10), (10, 16))


def test_pieces_of_no_nodes_are_refused():
    with pytest.raises(ValueError, match="at least 1 node"):
        prefix_tree.pieces(prefix_tree.build(forests.arrays([[1]])), 0)


def test_three_rows_of_seventeen_tokens_make_nine_nodes():
    prompt, a, b, c = [1, 2, 3], [4, 5], [6, 7], [8, 9]
    rows = [prompt + a, prompt + b, prompt + a + c]
    tree = prefix_tree.build(forests.arrays(rows))
    assert sum(map(len, rows)) == 17
    assert tree.tokens.tolist() == [*prompt, *a, *c, *b]
    assert tree.leaves.tolist() == [4, 8, 6]
    assert tree.chains.tolist() == [[0, 7], [7, 9]]
    assert tree.rectangles.tolist() == [[7, 9, 0, 3]]


def test_siblings_at_one_place_share_a_rectangle_and_the_deepest_place_comes_first():
    tree = prefix_tree.build(forests.arrays([[1, 1, 1, 1, 1, 1], [1, 2, 2], [1, 3], [1, 1, 1, 4]]))
    assert tree.tokens.tolist() == [1, 1, 1, 1, 1, 1, 4, 2, 2, 3]
    assert tree.rectangles.tolist() == [[6, 7, 0, 3], [7, 10, 0, 1]]


def test_keys_keep_apart_what_only_looks_alike():
    rows = forests.arrays([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    keys = [None, np.array([0, 0, 0]), np.array([0, 5, 0])]
    tree = prefix_tree.build(rows, keys=keys)
    assert len(tree.tokens) == 5
    assert tree.leaves[0] == tree.leaves[1] != tree.leaves[2]
    assert all(tree.tokens[prefix_tree.path(tree, i)].tolist() == [1, 2, 3] for i in range(3))
    assert len(prefix_tree.build(rows, keys=keys, share=False).tokens) == 9


@pytest.mark.parametrize("rows", [[], [[]], [[], []], [[5]], [[], [5]], [[5], [5]]])
def test_the_smallest_forests_are_forests(rows):
    tree = prefix_tree.build(forests.arrays(rows))
    assert len(tree.tokens) == len(forests.trie(rows))
    assert tree.leaves.tolist() == [0 if row else -1 for row in rows]
    assert prefix_tree.pieces(tree, 3) == (((0, 1),) if len(tree.tokens) else ())


def caterpillar(length):
    """Return rows that leave a trunk one after the other, the longest first."""
    return [np.repeat([0, 1], [leave, 2 * (length - leave)]) for leave in range(length)]


@pytest.mark.parametrize(
    "rows",
    [
        np.random.default_rng(0).integers(0, 50_000, (10_000, 100)),
        np.random.default_rng(1).integers(0, 2, (10_000, 100)),
        [np.zeros(length, np.int64) for length in range(1, 1_400)],
        caterpillar(1_000),
        np.tile(np.arange(1_000), (1_000, 1)),
    ],
    ids=["nothing shared", "two tokens", "each a prefix of the next", "caterpillar", "duplicates"],
)
def test_a_million_tokens_take_no_python_step_a_token(rows):
    start = time.process_time()
    tree = prefix_tree.build(list(rows))
    prefix_tree.paths(tree)
    assert time.process_time() - start < 4
    assert tree.ends.max() == len(tree.tokens)
