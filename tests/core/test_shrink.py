"""Failing batches become as small as the fault allows, and stay batches."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from core import algorithms, check, shrink


def measure(samples):
    return len(samples), sum(len(s.tokens) for s in samples), sum(int(s.trained.sum()) for s in samples)


def drawn(name, seed):
    return check.draw(getattr(algorithms, name), seed)


@settings(max_examples=20)
@given(name=st.sampled_from(["sft", "dpo", "grpo", "kto"]), seed=st.integers(0, 1000), data=st.data())
def test_what_is_left_still_fails_and_nothing_more_can_be_left_out(name, seed, data):
    samples = drawn(name, seed)
    tokens = data.draw(st.integers(2, sum(len(s.tokens) for s in samples)))

    def fails(few):
        return sum(len(s.tokens) for s in few) >= tokens

    least = shrink.smallest(samples, fails)
    assert sum(len(s.tokens) for s in least) >= tokens
    if name != "dpo":
        # A sample must keep two tokens, one of them trained.
        assert sum(len(s.tokens) for s in least) <= max(tokens, 2)
    assert all(s.trained.sum() == 1 and not s.trained[0] for s in least)
    assert all(not np.any(values) for s in least for values in s.columns.values())
    assert all(not s.tokens.any() for s in least)


def test_both_sides_of_a_pair_stay_together():
    least = shrink.smallest(drawn("dpo", 3), lambda few: True)
    assert [s.unit for s in least] == [least[0].unit] * 2
    assert measure(least) == (2, 4, 2)


def test_columns_follow_their_tokens_and_lose_their_digits():
    samples = drawn("grpo", 1)

    def fails(few):
        return any((s.columns["old_logprobs"] < -1).any() for s in few)

    assert fails(samples)
    (one,) = shrink.smallest(samples, fails)
    assert len(one.columns["old_logprobs"]) == len(one.tokens) == 2
    assert all(value == round(value, 1) for value in one.columns["old_logprobs"])
    assert one.columns["advantage"] == 0


def test_samples_that_came_are_not_written_to():
    samples = drawn("sft", 0)
    before = [(s.tokens.copy(), s.trained.copy()) for s in samples]
    shrink.smallest(samples, lambda few: True)
    for one, (tokens, trained) in zip(samples, before, strict=True):
        np.testing.assert_array_equal(one.tokens, tokens)
        np.testing.assert_array_equal(one.trained, trained)
