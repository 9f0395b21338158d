import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from core.plan import padding

PRICES = st.tuples(st.integers(0, 20), st.integers(0, 4)).map(
    lambda ab: lambda size: float(ab[0] + ab[1] * size)
)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=10)


def total(lengths, sizes, step_cost, compile_cost, cached=()):
    used = [min(size for size in sizes if size >= length) for length in lengths]
    return sum(map(step_cost, used)) + compile_cost * len(set(used) - set(cached))


@hypothesis.given(
    LENGTHS,
    PRICES,
    st.integers(0, 60).map(float),
    st.sampled_from([3, 8, (4, 16), lambda n: 5 * -(-n // 5)]),
    st.sampled_from([1, 2, 3, None]),
    st.sets(st.integers(1, 80), max_size=2),
)
def test_the_plan_is_the_best_of_all(lengths, step_cost, compile_cost, multiple, max_shapes, cached):
    plan = padding.plan(
        lengths,
        step_cost=step_cost,
        compile_cost=compile_cost,
        multiple=multiple,
        max_shapes=max_shapes,
        cached=cached,
    )
    candidates = sorted({padding.rounded(n, multiple) for n in lengths} | cached)
    choices = itertools.chain.from_iterable(
        itertools.combinations(candidates, count)
        for count in range(1, min(len(candidates), max_shapes or 4) + 1)
    )
    best = min(
        total(lengths, sizes, step_cost, compile_cost, cached)
        for sizes in choices
        if sizes[-1] >= max(lengths)
    )
    reached = plan.step_cost + plan.compile_cost
    assert reached == total(lengths, plan.sizes, step_cost, compile_cost, cached)
    assert reached == best if max_shapes else reached <= best
    assert len(plan.sizes) <= (max_shapes or len(lengths))
    assert {padding.size(plan, n) for n in lengths} == set(plan.sizes)
    assert set(plan.new) == set(plan.sizes) - cached


@hypothesis.given(
    st.lists(st.integers(1, 5_000), min_size=1, max_size=60), PRICES, st.integers(0, 100_000).map(float)
)
def test_the_plan_is_never_worse_than_multiples_of_512_or_one_size(lengths, step_cost, compile_cost):
    plan = padding.plan(lengths, step_cost=step_cost, compile_cost=compile_cost, multiple=512)
    reached = plan.step_cost + plan.compile_cost
    every = [512 * i for i in range(1, 11)]
    assert reached <= total(lengths, every, step_cost, compile_cost)
    assert reached <= total(lengths, [padding.rounded(max(lengths), 512)], step_cost, compile_cost)


def test_log_normal_lengths_cost_less_than_by_any_rule_of_thumb():
    lengths = np.random.default_rng(0).lognormal(6.5, 0.7, 500).astype(int) + 1

    def seconds(size):
        return 1.15 * size / 512

    plan = padding.plan(lengths, step_cost=seconds, compile_cost=120.0)
    reached = plan.step_cost + plan.compile_cost
    multiples = [128 * i for i in range(1, 100)]
    doubling = [128 * 2**i for i in range(8)]
    assert reached < total(lengths, multiples, seconds, 120)
    assert reached < total(lengths, doubling, seconds, 120)
    assert reached < total(lengths, [padding.rounded(int(lengths.max()))], seconds, 120)
    assert all(size % 512 == 0 for size in plan.sizes)


def test_cached_sizes_are_used_for_nothing():
    lengths = [100, 100, 600]
    plan = padding.plan(lengths, step_cost=float, compile_cost=1e6, cached=[128, 1024])
    assert (plan.sizes, plan.new, plan.compile_cost) == ((128, 1024), (), 0)


def test_published_pair_of_runs_comes_out_of_the_calibrated_prices():
    # 20 steps at 1,024 positions, 1.71 s each, and 96 s for the one size they share.
    plan = padding.plan([1_000] * 20, step_cost=lambda size: 1.71 * size / 1024, compile_cost=95.8)
    assert plan.sizes == (1024,)
    assert plan.step_cost + plan.compile_cost == pytest.approx(130.0)


def test_padding_is_told_as_a_share():
    plan = padding.plan([96, 128, 128], step_cost=float, compile_cost=0.0)
    assert plan.pad_share == pytest.approx(32 / 384)


@pytest.mark.parametrize(
    ("length", "multiple", "wanted"),
    [
        (1, (128, 512), 128),
        (129, (128, 512), 256),
        (400, (128, 512), 512),
        (513, (128, 512), 1024),
        (100, 64, 128),
        (9, lambda n: 2 * n, 18),
    ],
)
def test_lengths_are_rounded_to_what_the_device_wants(length, multiple, wanted):
    assert padding.rounded(length, multiple) == wanted


def test_the_ladder_grows_by_half_in_the_devices_multiples():
    assert padding.ladder(4_000) == (128, 256, 384, 512, 1024, 1536, 2560, 3584, 4096)
    assert padding.ladder(100) == (128,)


@hypothesis.given(st.integers(1, 100_000))
def test_the_ladder_rises_and_holds_every_length(max_length):
    sizes = padding.ladder(max_length)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == padding.rounded(max_length)
    assert all(padding.rounded(size) == size for size in sizes)


def test_a_length_beyond_the_plan_is_told():
    plan = padding.plan([100], step_cost=float, compile_cost=0.0)
    with pytest.raises(ValueError, match="length of 129 came; the padding plan's largest size is 128"):
        padding.size(plan, 129)


@pytest.mark.parametrize(
    ("lengths", "max_shapes", "told"),
    [([], None, "0 lengths"), ([0], None, "1 or more"), ([5], 0, "max_shapes is 0")],
)
def test_lengths_that_cannot_be_planned_are_refused(lengths, max_shapes, told):
    with pytest.raises(ValueError, match=told):
        padding.plan(lengths, step_cost=float, compile_cost=0.0, max_shapes=max_shapes)
