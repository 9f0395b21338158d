import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from core import advantages, metrics

NAN = math.nan
PAIRS = torch.tensor([0.0, 1.0, 10.0, 12.0]), torch.tensor([7, 7, 3, 3])
BY_GROUP = [
    advantages.group_normalized,
    advantages.batch_normalized,
    advantages.centered,
    advantages.leave_one_out,
]


def test_groups_are_compared_with_themselves_alone():
    wanted = {
        advantages.centered: [-0.5, 0.5, -1.0, 1.0],
        advantages.group_normalized: [-0.707007, 0.707007, -0.707057, 0.707057],
    }
    for function, values in wanted.items():
        assert function(*PAIRS).tolist() == pytest.approx(values, abs=1e-6)


def test_a_group_whose_samples_lie_apart_is_one_group():
    order = torch.tensor([2, 0, 3, 1])
    got = advantages.group_normalized(PAIRS[0][order], PAIRS[1][order])
    assert torch.equal(got, advantages.group_normalized(*PAIRS)[order])


def test_the_baseline_of_a_sample_is_the_mean_of_the_others():
    got = advantages.leave_one_out(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.int64))
    assert got.tolist() == pytest.approx([0.6667, -0.6667, -0.6667, 0.6667], abs=1e-4)


def test_rounding_does_not_blow_up_a_deviation():
    rewards, group = torch.tensor([0.0] + [0.95] * 7), torch.zeros(8, dtype=torch.int64)
    raw = advantages.leave_one_out(rewards, group)
    assert raw[0].item() == pytest.approx(-0.95, abs=1e-6)
    for scaled in (advantages.standardized(raw), advantages.group_normalized(rewards, group)):
        assert scaled.abs().max() < 10


@hypothesis.example(reward=0.1, size=6, others=[0.0, 1.0])
@hypothesis.given(
    st.floats(-1e6, 1e6),
    st.integers(2, 9),
    st.lists(st.floats(-5, 5), min_size=2, max_size=4),
)
def test_a_group_of_equal_rewards_gives_exactly_0(reward, size, others):
    # In float64 the mean of seven times .1 is not .1.
    rewards = torch.tensor([reward] * size + others, dtype=torch.float64)
    groups = torch.tensor([1] * size + [0] * len(others))
    for function in BY_GROUP:
        assert function(rewards, groups)[:size].tolist() == [0.0] * size
    assert advantages.without_variance(rewards, groups)[:size].all()
    assert advantages.normalize_then_sum(rewards[:size, None], groups[:size]).tolist() == [0.0] * size


@pytest.mark.parametrize(
    "function", [advantages.group_normalized, advantages.batch_normalized, advantages.leave_one_out]
)
def test_a_group_of_one_is_refused_where_nothing_can_be_compared(function):
    with pytest.raises(ValueError, match=r"group 5 has one sample.* num_generations"):
        function(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4, 4, 5]))


def test_a_group_of_one_is_0_where_rewards_are_only_centered():
    got = advantages.centered(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4, 4, 5]))
    assert got.tolist() == [-0.5, 0.5, 0.0]


def test_a_function_that_abstains_is_left_out_of_that_sum_alone():
    parts, groups = torch.tensor([[1.0, NAN], [NAN, 2.0]]), torch.tensor([0, 0])
    totals = advantages.weighted_sum(parts)
    assert totals.tolist() == [1.0, 2.0]
    assert metrics.values({name: metrics.mean(parts[:, i]) for i, name in enumerate("ab")}) == {
        "a": 1.0,
        "b": 2.0,
    }
    for got in (advantages.group_normalized(totals, groups), advantages.normalize_then_sum(parts, groups)):
        assert got.isfinite().all()


def test_weights_scale_the_functions_and_must_be_one_each():
    parts = torch.tensor([[1.0, 10.0], [2.0, NAN]])
    assert advantages.weighted_sum(parts, weights=(1.0, 0.5)).tolist() == [6.0, 2.0]
    with pytest.raises(ValueError, match="1 came for 2 reward functions"):
        advantages.weighted_sum(parts, weights=(1.0,))


def test_a_sample_without_any_reward_leaves_mean_and_deviation():
    rewards, groups = torch.tensor([0.0, NAN, 1.0, 10.0, 12.0, NAN]), torch.tensor([0, 0, 0, 1, 1, 1])
    there = ~rewards.isnan()
    for function in BY_GROUP:
        got = function(rewards, groups)
        assert torch.equal(got[there], function(rewards[there], groups[there]))
        assert got[~there].tolist() == [0.0, 0.0]
    assert advantages.group_mean(rewards, groups).tolist() == [0.5] * 3 + [11.0] * 3


def test_a_group_without_any_reward_has_mean_and_advantage_0():
    rewards, groups = torch.tensor([NAN, NAN, 1.0, 2.0]), torch.tensor([0, 0, 1, 1])
    for function in (*BY_GROUP, advantages.group_mean):
        assert function(rewards, groups)[:2].tolist() == [0.0, 0.0]
    assert advantages.without_variance(rewards, groups).tolist() == [True, True, False, False]


@pytest.mark.parametrize("function", BY_GROUP)
def test_a_suppressed_reward_does_not_shift_the_others(function):
    groups, kept = torch.tensor([0, 0, 1, 1]), torch.tensor([True, False, True, True])
    first, second = (
        function(advantages.leave_out(torch.tensor([1.0, suppressed, 0.0, 1.0]), kept), groups)
        for suppressed in (1.0, 100.0)
    )
    assert torch.equal(first, second)


def test_an_infinite_reward_is_refused_by_its_sample():
    with pytest.raises(ValueError, match="sample 1 has a reward of inf"):
        advantages.centered(torch.tensor([0.0, math.inf]), torch.tensor([0, 0]))


def test_the_penalty_comes_after_the_clip():
    got = advantages.penalized(
        torch.tensor([5.0, -5.0]), torch.tensor([2.0, 4.0]), beta=0.05, low=-1.0, high=1.0
    )
    assert got.tolist() == pytest.approx([0.9, -1.2])


def test_rewards_that_add_up_to_the_same_stay_apart_when_each_is_normalized():
    parts, groups = (
        torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 1.0]]),
        torch.zeros(4, dtype=torch.int64),
    )
    summed = advantages.group_normalized(advantages.weighted_sum(parts), groups)
    apart = advantages.normalize_then_sum(parts, groups)
    assert summed[0] == summed[1]
    assert (apart[0] - apart[1]).abs() > 0.1


# The loops that the vectorized code replaces.


def deviation(values):
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def centered_loop(rewards, groups):
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r)]
        flat = not mine or max(mine) == min(mine)
        found.append(NAN if math.isnan(reward) else 0.0 if flat else reward - math.fsum(mine) / len(mine))
    return found


def deviations_loop(rewards, groups):
    return [
        deviation([r for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r)])
        for group in groups
    ]


def zeroed(values):
    return [0.0 if math.isnan(v) else v for v in values]


def z_loop(rewards, groups):
    parts = zip(centered_loop(rewards, groups), deviations_loop(rewards, groups), strict=True)
    return [above / (spread + 1e-4) for above, spread in parts]


def leave_one_out_loop(rewards, groups):
    found = []
    for i, group in enumerate(groups):
        others = [r for j, r in enumerate(rewards) if groups[j] == group and j != i and not math.isnan(r)]
        alone = math.isnan(rewards[i]) or not others
        found.append(0.0 if alone else rewards[i] - math.fsum(others) / len(others))
    return found


def batch_loop(rewards, groups):
    spread = deviation([r for r in rewards if not math.isnan(r)])
    return zeroed([above / (spread + 1e-4) for above in centered_loop(rewards, groups)])


def decoupled_loop(parts, groups, weights):
    scores = [z_loop(list(column), groups) for column in zip(*parts, strict=True)]
    totals = []
    for row in zip(*scores, strict=True):
        there = [w * s for w, s in zip(weights, row, strict=True) if not math.isnan(s)]
        totals.append(math.fsum(there) if there else NAN)
    return zeroed(z_loop(totals, [0] * len(totals)))


REWARD = st.one_of(st.just(NAN), st.sampled_from([0.0, 1.0, 0.5]), st.floats(-10, 10))


@st.composite
def groupings(draw):
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    return draw(st.permutations([g for g, size in enumerate(sizes) for _ in range(size)]))


@hypothesis.given(groupings(), st.data())
def test_every_function_is_its_loop(groups, data):
    rewards = data.draw(st.lists(REWARD, min_size=len(groups), max_size=len(groups)))
    given = torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)
    wanted = {
        advantages.centered: zeroed(centered_loop(rewards, groups)),
        advantages.group_normalized: zeroed(z_loop(rewards, groups)),
        advantages.batch_normalized: batch_loop(rewards, groups),
        advantages.leave_one_out: leave_one_out_loop(rewards, groups),
    }
    for function, values in wanted.items():
        assert function(*given).tolist() == pytest.approx(values, rel=1e-10, abs=1e-10), function.__name__


@hypothesis.given(groupings(), st.data())
def test_normalizing_before_the_sum_is_its_loop(groups, data):
    parts = data.draw(st.lists(st.tuples(REWARD, REWARD), min_size=len(groups), max_size=len(groups)))
    weights = data.draw(st.tuples(st.floats(0, 2), st.floats(0, 2)))
    got = advantages.normalize_then_sum(
        torch.tensor(parts, dtype=torch.float64), torch.tensor(groups), weights=weights
    )
    assert got.tolist() == pytest.approx(decoupled_loop(parts, groups, weights), rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_rewards_give_what_the_same_numbers_in_float32_give(dtype):
    rewards, groups = torch.tensor([60000.0, -60000.0, 0.5, 3.0], dtype=dtype), torch.tensor([0, 0, 1, 1])
    for function in (*BY_GROUP, advantages.group_mean):
        assert torch.equal(function(rewards, groups), function(rewards.float(), groups))
