import math

import pytest
import torch

from core import head, metrics, ratios, reduce, segments
from core.losses import policy
from tests.core import tables

LENGTH, DRIFT = 100, 0.012


def drifted(**columns):
    """Return a sample of 100 tokens that the trainer finds .012 nats a token likelier than the generator."""
    batch = tables.batch([LENGTH], old_logprobs=[-1.0 + DRIFT] * LENGTH, sampled_logprobs=[-1.0] * LENGTH)
    return tables.scores([-1.0 + DRIFT] * LENGTH), batch


def test_the_level_of_a_ratio_says_how_it_grows_with_length():
    scores, batch = (
        tables.scores([-1.0 + DRIFT] * LENGTH),
        tables.batch([LENGTH], old_logprobs=[-1.0] * LENGTH),
    )
    wanted = {ratios.token: 1.012072, ratios.sequence: 1.012072, ratios.sequence_sum: 3.320117}
    for level, value in wanted.items():
        got = level(scores, batch)
        assert got.shape == (LENGTH,)
        assert got.tolist() == pytest.approx([value] * LENGTH, abs=1e-6)


@pytest.mark.parametrize(
    ("weights", "fold", "value"),
    [
        (ratios.sequence_mask, segments.sample_sums, 0.0),
        (ratios.sequence_truncate, segments.sample_sums, 3.0),
        (ratios.sequence_mask, segments.sample_means, 1.012072),
        (ratios.sequence_truncate, segments.sample_means, 1.012072),
    ],
)
def test_a_cap_of_3_drops_a_long_answer_by_its_product_and_keeps_it_by_its_mean(weights, fold, value):
    weight, _ = weights(*drifted(), fold=fold)
    assert weight.tolist() == pytest.approx([value] * LENGTH, abs=1e-6)
    assert weights(*drifted())[0].tolist() == weights(*drifted(), fold=segments.sample_sums)[0].tolist()


def test_tokens_are_truncated_or_masked_each_for_itself():
    batch = tables.batch([3], old_logprobs=[0.0, -1.0, -3.0], sampled_logprobs=[-2.0, -1.0, 0.0])
    scores = tables.scores([0.0, -1.0, -3.0])
    low = math.exp(-3)
    assert ratios.token_truncate(scores, batch)[0].tolist() == pytest.approx([3.0, 1.0, low])
    assert ratios.token_truncate(scores, batch, floor=0.5, cap=2.0)[0].tolist() == pytest.approx(
        [2.0, 1.0, 0.5]
    )
    assert ratios.token_mask(scores, batch)[0].tolist() == pytest.approx([0.0, 1.0, low])
    assert ratios.token_mask(scores, batch, floor=0.5)[0].tolist() == pytest.approx([0.0, 1.0, 0.0])


@pytest.mark.parametrize("weights", [ratios.token_mask, ratios.token_truncate, ratios.sequence_mask])
def test_what_is_logged_is_the_ratio_before_any_mask(weights):
    batch = tables.batch(
        [1, 1, 2], old_logprobs=[0.0] * 4, sampled_logprobs=[-2.0, 0.0, -9.0, -9.0], ended=[True, True, False]
    )
    weight, seen = weights(tables.scores([0.0, 0.0]), batch)
    assert not weight.requires_grad
    ratio, gap = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"
    assert metrics.values(metrics.collect(seen)) == pytest.approx(
        {
            f"{ratio}/min": 1.0,
            f"{ratio}/mean": (math.exp(2) + 1) / 2,
            f"{ratio}/max": math.exp(2),
            f"{gap}/mean": 1.0,
            f"{gap}/max": 2.0,
        }
    )


def test_a_sample_without_a_trained_token_is_not_among_the_ratios():
    for sampled, side in ((-1.0, "max"), (1.0, "min")):
        batch = tables.batch(
            [1, 1], old_logprobs=[-2.0] * 2, sampled_logprobs=[-2.0 - sampled, 0.0], ended=[True, False]
        )
        _, seen = ratios.sequence_mask(tables.scores([-2.0]), batch)
        assert metrics.values(metrics.collect(seen))[
            f"sampling/importance_sampling_ratio/{side}"
        ] == pytest.approx(math.exp(sampled))


def test_on_the_first_update_every_ratio_is_exactly_1_and_has_a_gradient():
    batch = tables.batch([2, 3])
    for level in (ratios.token, ratios.sequence, ratios.sequence_sum):
        scores = tables.scores([-0.1, -2.0, -30.0, -0.7, -1e4])
        ratio = level(scores, batch)
        assert ratio.tolist() == [1.0] * 5
        ratio.sum().backward()
        assert (scores.logprobs.grad > 0).all()


def test_the_gradient_of_a_sequences_ratio_reaches_all_its_tokens_alike():
    scores, batch = tables.scores([-1.0, -2.0, -3.0]), tables.batch([1, 2], old_logprobs=[-1.5, -2.5, -2.0])
    reduce.sequence_mean(ratios.sequence(scores, batch), batch).backward()
    second = math.exp(((-2.0 + 2.5) + (-3.0 + 2.0)) / 2)
    wanted = [math.exp(0.5) / 2, second / 2 / 2, second / 2 / 2]
    assert scores.logprobs.grad.tolist() == pytest.approx(wanted, rel=1e-12)


def test_a_sequences_ratio_does_not_weigh_it_by_its_length():
    batch = tables.batch([2, 6], advantage=[1.0, -1.0])
    values, _ = policy.sequence_clipped(tables.scores([-1.0] * 8), batch)
    assert reduce.sequence_mean(values, batch).item() == pytest.approx(0.0, abs=1e-15)
    assert reduce.token_mean(values, batch).item() == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_ratio_overflows(dtype):
    batch = tables.batch([2], dtype=dtype, old_logprobs=[-1e4] * 2, sampled_logprobs=[-1e5] * 2)
    for level in (ratios.token, ratios.sequence, ratios.sequence_sum):
        scores = tables.scores([0.0, 0.0], dtype=dtype)
        ratio = level(scores, batch)
        ratio.sum().backward()
        assert ratio.isfinite().all()
        assert scores.logprobs.grad.isfinite().all()
    for weights in (ratios.token_truncate, ratios.token_mask, ratios.sequence_truncate, ratios.sequence_mask):
        assert weights(scores, batch)[0].isfinite().all()


def logprobs(logits, temperature=1.0):
    """Score each token of a vocabulary under given logits, as the trainer does."""
    size = len(logits)
    return head.score(
        torch.tensor([logits] * size),
        torch.eye(size),
        torch.arange(size),
        shape=head.Shape(temperature=temperature),
    )["logprobs"]


def test_the_temperature_divides_logits_before_they_are_normalized():
    assert logprobs([2.0, 0.0], 0.5)[0].item() == pytest.approx(-0.018150, abs=1e-6)
    assert logprobs([2.0, 0.0])[0].item() == pytest.approx(-0.126928, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 0.6, 1.7])
def test_at_any_temperature_the_ratio_to_an_equal_generator_is_1(temperature):
    mine = logprobs([2.0, 0.0, -1.0], temperature)
    generator = (torch.tensor([2.0, 0.0, -1.0]).double() / temperature).log_softmax(0)
    batch = tables.batch([3], old_logprobs=mine.tolist(), sampled_logprobs=generator.tolist())
    for weights in (ratios.token_truncate, ratios.sequence_mask):
        assert weights(tables.scores(mine.tolist()), batch)[0].tolist() == pytest.approx([1.0] * 3, abs=1e-3)


def test_a_generator_that_keeps_the_likeliest_tokens_is_compared_over_all_tokens():
    full = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    mine = logprobs(full.tolist())[:2].tolist()
    for sampled, ratio in ((full[:2], 1.0), (full[:2] - math.log(0.8), 0.8)):
        batch = tables.batch([2], old_logprobs=mine, sampled_logprobs=sampled.tolist())
        got, _ = ratios.token_truncate(tables.scores(mine), batch)
        assert got.tolist() == pytest.approx([ratio] * 2, abs=1e-6)
