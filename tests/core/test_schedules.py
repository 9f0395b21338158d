"""Schedules see the updates done so far and give a factor of the base rate."""

import hypothesis
import pytest
from hypothesis import strategies as st

from core import schedules


def factors(schedule, num):
    """The factors of the first updates."""
    return [schedule(k) for k in range(num)]


def test_ten_updates_of_a_line_are_made_at_1_to_a_tenth():
    want = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert factors(schedules.linear(num_updates=10), 10) == pytest.approx(want)
    assert schedules.linear(num_updates=10)(10) == 0.0


def test_a_line_after_a_warm_up_starts_from_1():
    got = factors(schedules.linear(num_updates=6, num_warmup=2), 8)
    assert got == pytest.approx([0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_constant_rises_and_stays():
    assert factors(schedules.constant(), 3) == [1.0, 1.0, 1.0]
    assert factors(schedules.constant(num_warmup=4), 6) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_is_half_a_wave_down_to_its_floor():
    assert factors(schedules.cosine(num_updates=4), 5) == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466, 0.0])
    with_floor = schedules.cosine(num_updates=6, num_warmup=2, floor=0.2)
    assert factors(with_floor, 8) == pytest.approx([0.0, 0.5, 1.0, 0.8828427, 0.6, 0.3171573, 0.2, 0.2])


@hypothesis.given(st.integers(1, 50), st.integers(0, 60), st.integers(0, 200), st.floats(0.0, 1.0))
def test_a_factor_is_between_0_and_1_even_past_the_end(num_updates, num_warmup, done, floor):
    for schedule in (
        schedules.constant(num_warmup=num_warmup),
        schedules.linear(num_updates=num_updates, num_warmup=num_warmup),
        schedules.cosine(num_updates=num_updates, num_warmup=num_warmup, floor=floor),
    ):
        assert 0.0 <= schedule(done) <= 1.0 + 1e-12


@hypothesis.given(st.integers(1, 50), st.integers(0, 49))
def test_a_factor_never_rises_after_the_warm_up(num_updates, num_warmup):
    hypothesis.assume(num_warmup < num_updates)
    for make in (schedules.linear, schedules.cosine):
        schedule = make(num_updates=num_updates, num_warmup=num_warmup)
        tail = [schedule(k) for k in range(num_warmup, num_updates + 3)]
        assert tail[0] == 1.0
        assert tail == sorted(tail, reverse=True)
