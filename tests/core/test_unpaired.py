"""Losses on answers that stand alone, and the mismatches that tell how far a policy has moved at large."""

import math
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core import algorithms, check, metrics, pack, reduce
from core.losses import unpaired
from core.plan import mismatch, sample
from tests.core import pair_rows

FEW = settings(max_examples=12)


def answer(ratios, label, *, mismatched=0.0, unit=0):
    """A sample whose tokens have these log-ratios, the reference giving each -1."""
    return pair_rows.side(
        [x - 1.0 for x in ratios], [-1.0] * len(ratios), unit=unit, label=label, mismatched=mismatched
    )


def step(samples, loss=unpaired.kto, dtype=torch.float64, **numbers):
    """Return the reduced loss, the scores that can be differentiated, and the metrics."""
    scores, batch = pair_rows.scored([attrs.evolve(s, unit=i) for i, s in enumerate(samples)], dtype=dtype)
    values, watched = loss(scores, batch, **numbers)
    return reduce.sample_mean(values, batch), scores, watched


def sig(x):
    """The logistic function."""
    return 1 / (1 + math.exp(-x))


def row(prompt, completion, unit=0, **columns):
    """A sample of a prompt and a completion."""
    tokens = np.array([*prompt, *completion], dtype=np.int64)
    trained = np.arange(len(tokens)) >= len(prompt)
    return sample.Sample(tokens=tokens, trained=trained, columns=columns, group=unit, unit=unit)


# Mismatches.


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_no_prompt_meets_its_own_completion(size):
    rows = [row([100 + i, 200 + i], [300 + i], unit=i, label=1.0) for i in range(size)]
    found = mismatch.rotated(rows)
    assert len(found) == 2 * size
    for i, one in enumerate(found[size:]):
        assert one.tokens.tolist() == [100 + i, 200 + i, 300 + (i + 1) % size]
        assert one.trained.tolist() == [False, False, True]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=8))
def test_prompts_that_repeat_meet_the_completion_of_another_prompt_where_there_is_one(rows):
    samples = [row([10 + p, 7], [20 + p, 30 + c], unit=i) for i, (p, c) in enumerate(rows)]
    prompts = {p for p, _ in rows}
    for (p, _), one in zip(rows, mismatch.rotated(samples)[len(rows) :], strict=True):
        assert one.tokens[0] == 10 + p
        if len(prompts) > 1:
            assert one.tokens[2] != 20 + p


def test_the_partner_is_the_next_row_of_another_prompt():
    prompts = [0, 0, 1, 0]
    samples = [row([10 + p], [30 + i], unit=i) for i, p in enumerate(prompts)]
    found = [int(one.tokens[1]) - 30 for one in mismatch.rotated(samples)[4:]]
    assert found == [2, 2, 3, 2]


def test_one_sample_alone_is_refused():
    with pytest.raises(ValueError, match="at least 2 are wanted"):
        mismatch.rotated([row([1], [2])])
    assert mismatch.rotated([]) == []


def test_mismatches_keep_what_belongs_to_the_prompt_and_drop_what_was_scored():
    rows = [
        row([1, 2], [3, 4], unit=5, label=1.0, reference_logprobs=np.zeros(4)),
        row([6], [7], unit=9, label=0.0, reference_logprobs=np.zeros(2)),
    ]
    found = mismatch.rotated(rows)
    assert [s.columns["mismatched"] for s in found] == [0.0, 0.0, 1.0, 1.0]
    assert [s.columns["label"] for s in found] == [1.0, 0.0, 1.0, 0.0]
    assert [s.group for s in found] == [5, 9, 5, 9]
    assert len({s.unit for s in found}) == 4
    assert ["reference_logprobs" in s.columns for s in found] == [True, True, False, False]


def test_share_keys_travel_with_their_tokens():
    keyed = attrs.evolve(row([1, 2], [3], unit=0), share=np.array([5, 6, 7]))
    found = mismatch.rotated([keyed, row([8], [9, 4], unit=1)])
    assert found[2].share.tolist() == [5, 6, 0, 0]
    assert found[3].share.tolist() == [0, 7]


def test_an_empty_completion_takes_part():
    found = mismatch.rotated([row([1, 2], [], unit=0), row([3], [4], unit=1)])
    assert found[2].tokens.tolist() == [1, 2, 4]
    assert found[3].tokens.tolist() == [3]
    assert not found[3].trained.any()


def test_mismatches_are_no_samples_tokens_or_groups_of_a_step():
    rows = [row([1, 2], [3, 4], unit=0, label=1.0), row([6], [7], unit=1, label=0.0)]
    plain, doubled = (attrs.asdict(pack.count(samples)) for samples in (rows, mismatch.rotated(rows)))
    columns = {**plain["columns"], "mismatched": False}
    assert doubled == {**plain, "mismatched": 2, "columns": columns}
    assert plain["terms"] == 3


# The loss.


def test_a_policy_that_is_its_reference_costs_a_half():
    samples = [answer([0.0, 0.0], 1.0), answer([0.0], 0.0), answer([0.0], 1.0, mismatched=1.0)]
    loss, _, watched = step(samples)
    assert loss.item() == pytest.approx(0.5, abs=1e-12)
    assert metrics.values(metrics.collect(watched))["kl"] == 0.0


def test_both_kinds_are_measured_from_the_mean_of_the_mismatches():
    samples = [
        answer([1.0, 2.0], 1.0),
        answer([-0.5], 0.0),
        answer([0.5, 0.5], 1.0, mismatched=1.0),
        answer([1.0], 0.0, mismatched=1.0),
    ]
    loss, _, watched = step(samples, beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    z = 1.0
    want = (2.0 * (1 - sig(0.5 * (3.0 - z))) + 3.0 * (1 - sig(0.5 * (z + 0.5)))) / 2
    assert loss.item() == pytest.approx(want, abs=1e-12)
    assert metrics.values(metrics.collect(watched))["kl"] == pytest.approx(z)


def test_a_drift_below_zero_counts_as_none():
    samples = [answer([1.0], 1.0), answer([0.0], 0.0), answer([-3.0], 1.0, mismatched=1.0)]
    loss, _, watched = step(samples)
    assert metrics.values(metrics.collect(watched))["kl"] == 0.0
    assert loss.item() == pytest.approx((1 - sig(0.1) + 0.5) / 2, abs=1e-12)


def test_no_gradient_flows_through_the_mismatches():
    samples = [answer([1.0], 1.0), answer([0.0], 0.0), answer([2.0, 1.0], 1.0, mismatched=1.0)]
    loss, scores, _ = step(samples)
    (grad,) = torch.autograd.grad(loss, scores.logprobs)
    assert grad[0] < 0.0
    assert grad[1] > 0.0
    assert (grad[2:] == 0.0).all()


@pytest.mark.parametrize("loss", [unpaired.kto, unpaired.apo_zero_unpaired])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_kind_alone_is_finite_and_leaves_the_metrics_of_the_other_out(loss, label):
    value, scores, watched = step([answer([0.5], label), answer([0.1, 0.1], label)], loss)
    (grad,) = torch.autograd.grad(value, scores.logprobs)
    assert value.isfinite()
    assert grad.isfinite().all()
    found = metrics.values(metrics.collect(watched))
    assert ("rewards/chosen" in found) == (label == 1.0)
    assert ("rewards/rejected" in found) == (label == 0.0)


@pytest.mark.parametrize("loss", [unpaired.kto, unpaired.apo_zero_unpaired])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_and_empty_answers_stay_finite(loss, dtype):
    for x in (-1e4, -100.0, 0.0, 100.0, 1e4):
        for y in (-1e4, 100.0):
            samples = [
                answer([x], 1.0),
                answer([y, y], 0.0),
                answer([], 1.0),
                answer([], 0.0),
                answer([y], 1.0, mismatched=1.0),
            ]
            value, scores, watched = step(samples, loss, dtype)
            (grad,) = torch.autograd.grad(value, scores.logprobs)
            assert value.isfinite()
            assert grad.isfinite().all()
            assert all(math.isfinite(x) for x in metrics.values(metrics.collect(watched)).values())


def test_a_pack_without_mismatches_has_no_say_in_the_drift():
    full = [answer([1.0], 1.0), answer([0.5], 0.0), answer([2.0], 1.0, mismatched=1.0)]
    parts = [metrics.collect(step(samples)[2]) for samples in (full, full[:2])]
    assert metrics.values(metrics.merge(*parts))["kl"] == pytest.approx(2.0)


def test_metrics_are_of_trained_samples_alone():
    samples = [answer([1.0], 1.0), answer([-2.0], 0.0), answer([50.0], 1.0, mismatched=1.0)]
    _, _, watched = step(samples)
    found = metrics.values(metrics.collect(watched))
    assert found["rewards/chosen"] == pytest.approx(0.1)
    assert found["rewards/rejected"] == pytest.approx(-0.2)
    assert found["logps/chosen"] == pytest.approx(0.0)
    assert found["logps/rejected"] == pytest.approx(-3.0)
    assert found["kl"] == pytest.approx(50.0)


def drawn(seed):
    """Draw labeled samples and their mismatches, all with reference log-probabilities."""
    source = np.random.default_rng(seed)
    samples = [
        attrs.evolve(s, unit=i, group=i, columns={**s.columns, "label": float(source.integers(2))})
        for i, s in enumerate(pair_rows.drawn(seed))
    ]
    return [
        attrs.evolve(s, columns={**s.columns, "reference_logprobs": -3.0 * source.random(len(s.tokens))})
        for s in mismatch.rotated(samples)
    ]


@FEW
@given(seed=pair_rows.seeds)
def test_a_step_is_the_loop_over_samples_alone(seed):
    samples = drawn(seed)
    kinds = [(s.columns["label"], s.columns["mismatched"]) for s in samples]

    def loop(params):
        flat = [side for both in pair_rows.sides(params, samples) for side in both]
        told = [side.ratio.item() for side, (_, off) in zip(flat, kinds, strict=True) if off]
        z = max(0.0, sum(told) / len(told))
        found = []
        for side, (label, off) in zip(flat, kinds, strict=True):
            if not off and side.n:
                x = 0.3 * (side.ratio - z)
                found.append(0.9 * (1 - torch.sigmoid(x)) if label else 1.4 * (1 - torch.sigmoid(-x)))
        return pair_rows.total(found) / max(len(found), 1)

    loss = partial(unpaired.kto, beta=0.3, desirable_weight=0.9, undesirable_weight=1.4)
    pair_rows.assert_step_equals(algorithms.kto.evolve(loss=loss), samples, loop)


@FEW
@given(seed=pair_rows.seeds)
def test_a_step_without_a_drift_is_the_loop_over_samples_alone(seed):
    samples = [s for s in drawn(seed) if not s.columns["mismatched"]]

    def loop(params):
        found = []
        flat = [side for both in pair_rows.sides(params, samples) for side in both]
        for side, one in zip(flat, samples, strict=True):
            if side.n:
                p = torch.sigmoid(0.1 * side.ratio)
                found.append(1 - p if one.columns["label"] else p)
        return pair_rows.total(found) / len(found)

    pair_rows.assert_step_equals(algorithms.apo_zero_unpaired, samples, loop)


@pytest.mark.parametrize("algorithm", [algorithms.kto, algorithms.apo_zero_unpaired])
def test_the_properties_of_every_algorithm_hold(algorithm):
    check.check(algorithm)
