"""Reward models: the score of the last real token, margins, centering, metrics."""

import math
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from core import algorithms, check, metrics, pack, reference, segments
from core.losses import reward
from core.plan import sample
from tests.core import pair_rows
from tests.properties import slow

FEW = settings(max_examples=12)


def scored(*rewards, dtype=torch.float64, margins=None):
    """Return scores and a batch of pairs with these rewards at their last tokens; other rows hold 99."""
    samples, values = [], []
    for i, number in enumerate(rewards):
        size = 1 + i % 3
        column = {} if margins is None else {"margin": margins[i // 2] if i % 2 == 0 else 99.0}
        samples.append(pair_rows.side([-1.0] * size, [-1.0] * size, unit=i // 2, **column))
        values += [99.0] * (size - 1) + [number]
    scores, batch = pair_rows.scored(samples, dtype=dtype)
    return attrs.evolve(scores, values=torch.tensor(values, dtype=dtype).requires_grad_()), batch


def test_equal_rewards_cost_log_two_and_are_a_miss():
    values, watched = reward.bradley_terry(*scored(0.7, 0.7))
    assert values.item() == pytest.approx(0.693147, abs=5e-7)
    assert watched["accuracy"].item() == 0.0


def test_the_loss_is_the_logistic_of_the_difference_at_the_last_tokens():
    values, _ = reward.bradley_terry(*scored(2.0, 0.5, -1.0, 1.0))
    want = [math.log(1 + math.exp(-1.5)), math.log(1 + math.exp(2.0))]
    assert values.tolist() == pytest.approx(want, abs=1e-12)


def test_a_margin_is_taken_from_the_difference():
    values, watched = reward.bradley_terry(*scored(2.0, 0.5, -1.0, 1.0, margins=[1.0, 0.25]))
    want = [math.log(1 + math.exp(-0.5)), math.log(1 + math.exp(2.25))]
    assert values.tolist() == pytest.approx(want, abs=1e-12)
    assert watched["margin"].tolist() == pytest.approx([1.5, -2.0])


def test_centering_adds_the_square_of_the_sum():
    plain, _ = reward.bradley_terry(*scored(2.0, 0.5))
    centered, _ = reward.bradley_terry(*scored(2.0, 0.5), center_rewards_coefficient=0.01)
    assert (centered - plain).item() == pytest.approx(0.01 * 2.5**2, abs=1e-12)


def test_metrics_are_over_all_rewards():
    _, watched = reward.bradley_terry(*scored(2.0, 0.5, -1.0, 1.0))
    found = metrics.values(metrics.collect(watched))
    assert found == pytest.approx(
        {"accuracy": 0.5, "margin": -0.25, "min_reward": -1.0, "mean_reward": 0.625, "max_reward": 2.0}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_rewards_are_finite_in_value_and_gradient(dtype):
    for better in (-1e4, -100.0, 0.0, 100.0, 1e4):
        scores, batch = scored(better, -better, better, better, dtype=dtype)
        values, _ = reward.bradley_terry(scores, batch, center_rewards_coefficient=0.01)
        (grad,) = torch.autograd.grad(values.sum(), scores.values)
        assert values.isfinite().all()
        assert grad.isfinite().all()


def test_a_model_without_a_scalar_head_is_told_what_is_missing():
    with pytest.raises(ValueError, match="add 'values'"):
        reward.bradley_terry(*pair_rows.by_hand(((0.0,), (0.0,))))


def test_the_last_row_is_found_by_length_and_a_sample_without_rows_gives_zero():
    samples = [pair_rows.side([-1.0] * n, [-1.0] * n, unit=n) for n in (2, 0, 3, 1)]
    _, batch = pair_rows.scored(samples)
    values = torch.arange(6, dtype=torch.float64) + 1
    assert segments.last_rows(values, batch).tolist() == [2.0, 0.0, 5.0, 6.0]
    assert segments.positions(batch).tolist() == [0, 1, 0, 1, 2, 0]


def test_the_score_is_read_at_the_last_real_token_whatever_its_value():
    # Token 3 ends every turn; the score is that of the state at the very last one.
    tokens = np.array([1, 3, 2, 3, 3], dtype=np.int64)
    one = sample.Sample(tokens=tokens, trained=np.arange(5) == 4)
    other = sample.Sample(tokens=tokens[:4], trained=np.arange(4) == 3)
    params = reference.params()
    for samples in ([one, other], [other, one], [one], [other]):
        whole = pack.build(samples, pack.count(samples), needs=("values",), dtype=torch.float64)
        scores = reference.Reference().predict(params, whole, None)
        want = [slow.states(params, s.tokens)[-1] @ params["score"] for s in samples]
        torch.testing.assert_close(scores.values, torch.stack(want), rtol=1e-12, atol=1e-12)


@FEW
@given(seed=pair_rows.seeds)
def test_a_step_is_the_mean_of_the_formula_over_pairs_alone(seed):
    samples = pair_rows.drawn(seed)

    def score(params, one):
        if not one.trained.any():
            return torch.zeros((), dtype=torch.float64)
        return slow.states(params, one.tokens)[pair_rows.places(one)[-1]] @ params["score"]

    def loop(params):
        found = []
        for c, r in zip(samples[::2], samples[1::2], strict=True):
            better, worse = score(params, c), score(params, r)
            apart = better - worse - c.columns["margin"]
            found.append(torch.log(1 + torch.exp(-apart)) + 0.2 * (better + worse) ** 2)
        return pair_rows.total(found) / len(found)

    loss = partial(reward.bradley_terry, center_rewards_coefficient=0.2)
    pair_rows.assert_step_equals(algorithms.reward.evolve(loss=loss), samples, loop)


def test_the_properties_of_every_algorithm_hold():
    check.check(algorithms.reward)
    check.check(algorithms.distill)
