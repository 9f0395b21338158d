"""What rows see of the prompts is their own prompt, each node once, in few products."""

import itertools

import hypothesis
import numpy as np
from hypothesis import strategies as st

from adapters import cache
from core.plan import prefix_tree

prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6).map(np.array), min_size=1, max_size=8)


def planned(rows, counts):
    """Return the tree of prompts, the rows' leaves, and what they see."""
    tree = prefix_tree.build(rows)
    leaves = np.sort(np.repeat(tree.leaves, counts[: len(rows)]))
    return tree, leaves, cache.spans(tree, leaves)


@hypothesis.given(rows=prompts, counts=st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_the_spans_of_a_row_are_the_path_of_its_prompt(rows, counts):
    tree, leaves, found = planned(rows, counts)
    for row, leaf in enumerate(leaves):
        seen = [np.arange(s.nodes.start, s.nodes.stop) for s in found if s.rows.start <= row < s.rows.stop]
        path = prefix_tree.path(tree, int(np.flatnonzero(tree.leaves == leaf)[0]))
        assert np.array_equal(np.concatenate(seen), path)


@hypothesis.given(rows=prompts, counts=st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_runs_hold_every_span_once_and_rows_follow_each_other_in_them(rows, counts):
    _, leaves, found = planned(rows, counts)
    made = cache.runs(found, len(leaves))
    assert sorted(map(repr, found)) == sorted(repr(span) for run in made for span in run)
    for run in made:
        assert all(a.rows.stop == b.rows.start for a, b in itertools.pairwise(run))


def test_prompts_that_share_nothing_are_merged_at_once():
    _, leaves, found = planned([np.array([i, 9, 9]) for i in range(5)], [2] * 5)
    assert [len(run) for run in cache.runs(found, len(leaves))] == [5]


def test_what_all_share_is_one_product():
    _, leaves, found = planned([np.array([7, 7, i]) for i in range(5)], [2] * 5)
    assert [len(run) for run in cache.runs(found, len(leaves))] == [1, 5]
    assert found[0] == cache.Span(slice(0, 10), slice(0, 2))
