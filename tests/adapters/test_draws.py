"""Draws follow the distribution, report the uncut one, and are named by what they are for."""

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from adapters import draws
from core import ports

FOUR = torch.tensor([0.5, 0.3, 0.15, 0.05])


def drawn(p, numbers, **rule):
    """Draw once for each number from one distribution."""
    return draws.draw(
        p.log().expand(len(numbers), -1).contiguous(), np.asarray(numbers, np.float64), ports.Sampling(**rule)
    )


def support(p, **rule):
    """Draw at many even numbers; which tokens come."""
    return set(drawn(p, np.arange(4000) / 4000, **rule).tokens.tolist())


def names(count, **fixed):
    """Uniform numbers of `count` samples."""
    return draws.uniforms(fixed.get("key", 5), np.full(count, 3), np.arange(count), fixed.get("position", 0))


def test_numbers_are_the_same_on_every_platform():
    assert draws.uniforms(1, np.array([2, 2]), np.array([3, 4]), 5).tolist() == pytest.approx(
        [reference(1, 2, 3, 5), reference(1, 2, 4, 5)], abs=0
    )


def reference(*words):
    """The same by integers of any size."""
    mask, state = 2**64 - 1, 0
    for word in words:
        state = ((state ^ (word & mask)) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return (state >> 12) / 2**52


word = st.integers(0, 2**63 - 1)


@hypothesis.given(key=word, number=word, nth=st.integers(0, 2**20), position=st.integers(0, 2**20))
def test_numbers_equal_those_by_integers_of_any_size(key, number, nth, position):
    assert draws.uniforms(key, np.array([number]), np.array([nth]), position)[0] == reference(
        key, number, nth, position
    )


def test_numbers_are_uniform_and_unrelated():
    a, b, c = names(20000), names(20000, position=1), names(20000, key=6)
    for each in (a, b, c):
        counts = np.histogram(each, bins=20, range=(0, 1))[0]
        assert ((counts - 1000.0) ** 2 / 1000).sum() < 50
    assert max(abs(np.corrcoef([a, b, c])[np.triu_indices(3, 1)])) < 0.03
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.03


@pytest.mark.parametrize(
    ("rule", "want"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0.5}, np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365),
        ({"top_k": 3}, np.array([0.5, 0.3, 0.15, 0]) / 0.95),
        ({"top_p": 0.75}, [0.625, 0.375, 0, 0]),
        ({"min_p": 0.25}, np.array([0.5, 0.3, 0.15, 0]) / 0.95),
    ],
)
def test_tokens_come_as_often_as_the_distribution_says(rule, want):
    count = 40000
    got = np.bincount(drawn(FOUR, names(count), **rule).tokens, minlength=4) / count
    assert (np.abs(got - want) <= 4 * np.sqrt(np.asarray(want) * (1 - np.asarray(want)) / count)).all()


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.75}, {0, 1}),
        ({"top_p": 0.85}, {0, 1, 2}),
        ({"top_p": 0.01}, {0}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 2, "top_p": 0.6}, {0}),
        ({"top_k": 3, "top_p": 0.9, "min_p": 0.5}, {0, 1}),
        ({"temperature": 0.25, "top_p": 0.9}, {0, 1}),
    ],
)
def test_the_support_is_what_was_asked_for(rule, kept):
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        place = {token: order.index(token) for token in range(4)}
        assert support(FOUR[order], **rule) == {place[token] for token in kept}


def test_logprobs_are_of_the_uncut_distribution_and_the_kept_mass_is_told():
    got = drawn(FOUR, [0.0, 0.624, 0.626, 0.999], top_p=0.75)
    assert got.tokens.tolist() == [0, 0, 1, 1]
    assert torch.allclose(got.logprobs.exp(), torch.tensor([0.5, 0.5, 0.3, 0.3]))
    assert torch.allclose(got.kept, torch.full((4,), 0.8))
    assert drawn(FOUR, [0.3]).kept.tolist() == [1.0]


def test_logprobs_are_of_the_tempered_distribution():
    got = draws.draw(torch.tensor([[2.0, 0.0]]), np.array([0.1]), ports.Sampling(temperature=0.5))
    assert got.logprobs.item() == pytest.approx(-0.018150, abs=1e-6)


def test_the_likeliest_token_is_taken_at_temperature_zero_and_scored_at_one():
    got = drawn(FOUR[[1, 0, 2, 3]], [0.999], temperature=0.0)
    assert got.tokens.tolist() == [1]
    assert got.logprobs.exp().item() == pytest.approx(0.5)
    assert got.kept.item() == pytest.approx(0.5)


@hypothesis.settings(deadline=None)
@hypothesis.given(
    seed=st.integers(0, 2**31),
    sharpness=st.floats(0.01, 20),
    vocab=st.integers(1, 3000),
    rule=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(1e-6, 10),
            "top_k": st.integers(1, 400),
            "top_p": st.floats(0.01, 1.0),
            "min_p": st.floats(0.0, 1.0),
        },
    ),
)
def test_draws_equal_a_sort_over_the_whole_vocabulary(seed, sharpness, vocab, rule):
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.standard_normal((3, vocab)) * sharpness)
    numbers = random.random(3)
    got = draws.draw(logits, numbers, ports.Sampling(**rule))
    assert ((got.kept > 0) & (got.kept <= 1)).all()
    for row in range(3):
        p = ((logits[row] - logits[row].max()) / rule.get("temperature", 1.0)).softmax(-1).numpy()
        kept = sorted_support(p, rule)
        assert got.kept[row].item() == pytest.approx(p[kept].sum(), rel=1e-9)
        below = p[: got.tokens[row] + 1][kept[: got.tokens[row] + 1]].sum()
        assert kept[got.tokens[row]]
        assert below - p[got.tokens[row]] - 1e-12 <= numbers[row] * p[kept].sum() <= below + 1e-12
        assert got.logprobs[row].exp().item() == pytest.approx(p[got.tokens[row]], rel=1e-9)


def sorted_support(p, rule):
    """Which tokens are kept, by the definition."""
    order = np.argsort(-p, kind="stable")
    count = min(rule.get("top_k", len(p)), len(p))
    order = order[:count]
    if rule.get("top_p", 1.0) < 1.0:
        sums = np.cumsum(p[order])
        order = order[: int((sums < rule["top_p"] * sums[-1]).sum()) + 1]
    kept = p >= p[order].min()  # with ties
    return kept & (p >= rule.get("min_p", 0.0) * p.max())
