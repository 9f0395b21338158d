import math
from functools import partial

import attrs
import pytest
import torch

from core import algorithms, metrics, pack, ratios, reduce
from core.losses import composition, policy
from tests.core import tables

NAMES = (
    "grpo", "dapo", "dapo_prompts", "bnpo", "dr_grpo", "gspo", "luspo", "cispo", "sapo", "vespo", "gmpo",
    "gdpo", "rloo",
)  # fmt: skip
CORNERS = {"ratio": [1.5, 1.5, 0.5, 0.5], "advantage": [1.0, -1.0, 1.0, -1.0]}


def at(ratio, advantage, **fields):
    """Return one sample of one token for each ratio and advantage."""
    logs = [math.log(r) for r in ratio]
    batch = tables.batch([1] * len(ratio), advantage=advantage, old_logprobs=[-5.0] * len(ratio))
    return tables.scores([-5.0 + d for d in logs], **fields), batch


def read(seen):
    return metrics.values(metrics.collect(seen))


@pytest.mark.parametrize("loss", [policy.clipped, partial(policy.sequence_clipped, low=0.2, high=0.2)])
def test_only_the_side_that_the_advantage_pushes_to_counts_as_clipped(loss):
    scores, batch = at(**CORNERS)
    values, seen = loss(scores, batch)
    values.sum().backward()
    assert (scores.logprobs.grad == 0).tolist() == [True, False, False, True]
    wanted = {"clip_ratio/low_mean": 0.25, "clip_ratio/high_mean": 0.25, "clip_ratio/region_mean": 0.5}
    assert read(seen) == wanted


def test_what_is_observed_changes_no_value():
    scores, batch = at(**CORNERS)
    batch = attrs.evolve(
        batch, terms=pack.Axis(columns={**batch.terms.columns, "sampled_logprobs": batch.old_logprobs - 0.5})
    )
    plain, _ = policy.clipped(scores, batch)
    values, seen = composition.observed(scores, batch, loss=policy.clipped)
    assert torch.equal(values, plain)
    assert read(seen)["sampling/importance_sampling_ratio/mean"] == pytest.approx(math.exp(0.5))
    assert read(seen)["sampling/sampling_logp_difference/max"] == pytest.approx(0.5)


def test_the_upper_bound_is_its_own_or_that_of_the_lower():
    for numbers, wanted in (({"high": 0.28}, [-1.25, -1.28]), ({}, [-1.2, -1.2])):
        values, _ = policy.clipped(*at([1.25, 1.4], [1.0, 1.0]), **numbers)
        assert values.tolist() == pytest.approx(wanted)


def test_a_second_bound_caps_what_a_bad_answer_costs():
    for numbers, wanted in (({"delta": 4.0}, 4.0), ({}, 10.0)):
        values, _ = policy.clipped(*at([10.0], [-1.0]), **numbers)
        assert values.item() == pytest.approx(wanted)


def test_the_cap_of_cispo_is_that_of_the_ratio_itself():
    scores, batch = at([7.0, 7.0, 2.0], [1.0, -1.0, 1.0])
    values, seen = policy.cispo(scores, batch, cap=5.0)
    values.sum().backward()
    assert scores.logprobs.grad.tolist() == pytest.approx([-5.0, 5.0, -2.0])
    assert read(seen)["cispo_clip_ratio"] == pytest.approx(1 / 3)


def test_the_weight_of_vespo_is_1_at_a_ratio_of_1_and_0_far_from_it():
    scores, batch = at([1.0, 1.0, 1e6, 1e-6], [1.0, -1.0, 1.0, 1.0])
    values, seen = policy.vespo(scores, batch)
    values.sum().backward()
    assert scores.logprobs.grad.tolist() == pytest.approx([-1.0, 1.0, 0.0, 0.0], abs=1e-9)
    assert read(seen)["vespo/phi_seq_mean"] == pytest.approx(0.5)


def test_gmpo_clips_each_token_before_the_mean_and_only_where_it_is_pushed():
    e = math.exp(1)
    wanted = [-math.exp(0.4), e, -1 / e, math.exp(-0.4)]
    values, seen = policy.gmpo(*at([e, e, 1 / e, 1 / e], CORNERS["advantage"]))
    assert values.tolist() == pytest.approx(wanted)
    assert read(seen) == {
        "clip_ratio/low_mean": 0.25,
        "clip_ratio/high_mean": 0.25,
        "clip_ratio/region_mean": 0.5,
    }
    pair = tables.batch([2], advantage=[1.0], old_logprobs=[-5.0, -5.0])
    values, _ = policy.gmpo(tables.scores([-4.0, -5.2]), pair)
    assert values.tolist() == pytest.approx([-math.exp((0.4 - 0.2) / 2)] * 2)


def test_what_a_sequence_has_one_of_is_logged_over_sequences_not_tokens():
    batch = tables.batch([1, 3], advantage=[1.0, 1.0], old_logprobs=[-5.0] * 4)
    scores = tables.scores([-4.0, -5.0, -5.0, -5.0])
    assert read(policy.sequence_clipped(scores, batch)[1])["clip_ratio/high_mean"] == pytest.approx(0.5)
    phi = math.exp(3 + 2 - 3 * math.exp(1))
    assert read(policy.vespo(scores, batch)[1])["vespo/phi_seq_mean"] == pytest.approx((phi + 1) / 2)
    assert read(policy.clipped(scores, batch)[1])["clip_ratio/high_mean"] == 0.25


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_on_policy_the_gradient_is_that_of_reinforce(name, advantage):
    algorithm, batch = getattr(algorithms, name), tables.batch([1], advantage=[advantage])
    scores = tables.scores([-1.3])
    values, _ = algorithm.loss(scores, batch)
    values.sum().backward()
    assert scores.logprobs.grad.item() == pytest.approx(-advantage, rel=1e-12)


def test_eight_completions_weigh_the_same_in_any_micro_batches():
    rows = tables.samples(list(range(1, 9)), groups=[0] * 8)
    counts, length = pack.count(rows), torch.arange(1.0, 9.0, dtype=torch.float64)
    wanted = {reduce.token_mean: 204 / 36, reduce.sequence_mean: 4.5, reduce.prompt_mean: 204 / 36}
    for reduction, value in wanted.items():
        for size in (1, 2, 4, 8):
            total = 0.0
            for start in range(0, 8, size):
                batch = pack.build(rows[start : start + size], counts, dtype=torch.float64).batch
                total += reduction(batch.num_terms.clone(), batch).item()
            assert total == pytest.approx(value, abs=1e-12), (reduction.__name__, size)
    assert (length * length).sum().item() == 204


def test_one_length_divides_all_sums():
    batch = tables.batch([2, 3])
    values = torch.tensor([1.0, 3.0, 1.0, 2.0, 2.0], dtype=torch.float64)
    assert reduce.constant(values, batch, length=8).item() == pytest.approx(0.5625)
    assert reduce.sequence_sum(values, batch).item() == pytest.approx(4.5)


def test_prompts_count_alike_however_long_their_answers_are():
    batch = tables.batch([1, 3, 4], groups=[5, 5, 2])
    values = torch.tensor([4.0, 0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 3.0], dtype=torch.float64)
    assert reduce.prompt_mean(values, batch).item() == pytest.approx((1.0 + 3.0) / 2)


@pytest.mark.parametrize("reduction", [reduce.token_mean, reduce.sequence_mean, reduce.prompt_mean])
def test_an_answer_that_is_masked_out_leaves_the_denominator_too(reduction):
    batch = tables.batch([4, 6], groups=[0, 1], ended=[True, False])
    assert reduction(torch.ones(4, dtype=torch.float64), batch).item() == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_a_step_whose_answers_are_all_cut_off_is_exactly_0(name):
    algorithm = getattr(algorithms, name)
    batch = tables.batch([4, 6], advantage=[1.0, -1.0], ended=[False, False])
    scores = tables.scores([], entropies=[])
    values, seen = algorithm.loss(scores, batch)
    value = algorithm.reduce(values, batch)
    value.backward()
    assert value.item() == 0.0
    assert scores.logprobs.grad.shape == (0,)
    assert read(seen) == {}


def test_a_sample_mean_over_nothing_is_0_with_a_gradient_of_0():
    batch = tables.batch([4], ended=[False])
    values = torch.ones(1, dtype=torch.float64, requires_grad=True)
    value = reduce.sample_mean(values, batch)
    value.backward()
    assert (value.item(), values.grad.tolist()) == (0.0, [0.0])


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_algorithm_trains_on_prompts_and_watches_entropy(name):
    algorithm = getattr(algorithms, name)
    assert algorithm.rows == "prompts"
    scores, batch = at([1.1, 0.9], [1.0, -1.0], entropies=[1.0, 2.0])
    _, seen = algorithm.loss(scores, batch)
    assert read(seen)["entropy"] == 1.5


def test_columns_of_each_algorithm_are_the_advantages_it_names():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.int64)
    assert algorithms.dr_grpo.columns(rewards, groups)["advantage"].tolist() == [0.5, -0.5, -0.5, 0.5]
    third = algorithms.rloo.columns(rewards, groups)["advantage"]
    assert third.tolist() == pytest.approx([0.6667, -0.6667, -0.6667, 0.6667], abs=1e-4)
    drifted = algorithms.rloo.columns(rewards, groups, divergences=torch.tensor([20.0, 0.0, 0.0, 0.0]))
    assert drifted["advantage"][0].item() == pytest.approx(1.0 - 0.05 * 20 - 1 / 3, abs=1e-6)
    parts = torch.stack([rewards, rewards * 100], 1)
    alone, both = (algorithms.gdpo.columns(rewards, groups, parts=p)["advantage"] for p in (None, parts))
    assert alone.tolist() == pytest.approx(both.tolist(), abs=1e-3)


def test_a_penalty_is_added_and_logged_before_its_coefficient():
    scores, batch = (
        tables.scores([-1.0, -1.0]),
        tables.batch([2], advantage=[0.0], reference_logprobs=[-0.5, -1.0]),
    )
    values, seen = composition.with_kl(scores, batch, loss=policy.clipped, beta=0.1)
    assert values.tolist() == pytest.approx([0.0148721, 0.0], abs=1e-7)
    assert read(seen)["kl"] == pytest.approx(0.148721 / 2, abs=1e-6)


def test_weights_do_not_reach_what_stands_around_them():
    scores = tables.scores([-1.0])
    batch = tables.batch(
        [1], advantage=[2.0], old_logprobs=[-1.0], sampled_logprobs=[-9.0], reference_logprobs=[-0.5]
    )
    inner = partial(composition.weighted, loss=policy.clipped, weights=ratios.token_mask)
    values, _ = composition.with_kl(scores, batch, loss=inner, beta=1.0)
    assert values.item() == pytest.approx(0.148721, abs=1e-6)
    outer = partial(composition.with_kl, loss=policy.clipped, beta=1.0)
    assert composition.weighted(scores, batch, loss=outer, weights=ratios.token_mask)[0].item() == 0.0


def test_the_surest_tokens_can_be_left_out():
    scores, batch = at([1.0] * 5, [1.0] * 5, entropies=[0.1, 0.5, 0.2, 0.9, 0.3])
    for part, kept in ((0.4, [0, 1, 0, 1, 0]), (1.0, [1] * 5)):
        values, _ = composition.top_entropy(scores, batch, loss=policy.clipped, part=part)
        assert (values != 0).tolist() == [bool(k) for k in kept]


def test_without_entropies_the_bonus_says_how_to_ask_for_them():
    with pytest.raises(ValueError, match="add 'entropies' to the algorithm's needs"):
        composition.with_entropy(*at([1.0], [1.0]), loss=policy.clipped, coefficient=0.1)


@pytest.mark.parametrize(
    "reduction",
    [
        reduce.token_mean,
        reduce.sequence_mean,
        reduce.sequence_sum,
        reduce.prompt_mean,
        partial(reduce.constant, length=7),
    ],
)
def test_the_entropy_bonus_is_a_mean_over_tokens_under_every_reduction(reduction):
    batch = tables.batch([1, 4], groups=[0, 1], advantage=[1.0, -2.0])
    scores = tables.scores([-1.0] * 5, entropies=[0.5, 1.0, 2.0, 3.0, 4.0])
    plain, _ = policy.clipped(scores, batch)
    values, _ = composition.with_entropy(scores, batch, loss=policy.clipped, coefficient=0.1, by=reduction)
    bonus = reduction(plain, batch) - reduction(values, batch)
    bonus.backward()
    assert bonus.item() == pytest.approx(0.1 * 2.1)
    assert scores.entropies.grad.tolist() == pytest.approx([0.1 / 5] * 5)


def test_a_bonus_that_is_switched_off_adds_nothing_and_counts_for_nothing():
    batch = tables.batch([1, 4], groups=[0, 1], advantage=[1.0, -2.0])
    scores = tables.scores([-1.0] * 5, entropies=[0.5, 1.0, 2.0, 3.0, 4.0])
    values, seen = composition.with_entropy(
        scores, batch, loss=policy.clipped, coefficient=0.3, active=0.0, by=reduce.token_mean
    )
    assert torch.equal(values, policy.clipped(scores, batch)[0])
    assert read(seen)["entropy_coef"] == 0.0
    values.sum().backward()
    assert not scores.entropies.grad.any()


def test_the_coefficient_follows_the_entropy_and_acts_only_when_it_lacks():
    follow = partial(composition.adapted_entropy, target=1.0, step=0.5, high=1.2)
    carry, seen = {"coefficient": 0.0, "active": 0.0}, []
    for entropy in (0.9, 1.0, 0.5, 1.1):
        carry = follow(carry, {"entropy": entropy})
        seen.append((carry["coefficient"], carry["active"]))
    assert seen == [(0.5, 1.0), (1.0, 1.0), (1.2, 1.0), (pytest.approx(0.7), 0.0)]
    assert follow(carry, {}) == carry


def test_an_algorithm_can_carry_an_adapted_bonus():
    mine = algorithms.grpo.evolve(
        loss=partial(composition.with_entropy, loss=policy.clipped, by=algorithms.grpo.reduce),
        needs=("entropies",),
        carry={"coefficient": 0.3, "active": 1.0},
        next_carry=composition.adapted_entropy,
    )
    scores, batch = at([1.0], [0.0], entropies=[2.0])
    values, _ = mine.loss(scores, batch, **mine.carry)
    assert values.item() == pytest.approx(-0.6)
    assert mine.next_carry(mine.carry, {"entropy": 2.0}) == {
        "coefficient": pytest.approx(0.295),
        "active": 0.0,
    }


def test_gradients_of_smooth_losses_are_those_of_differences():
    batch = tables.batch(
        [2, 1], advantage=[1.5, -0.5], old_logprobs=[-1.1, -0.8, -2.1], reference_logprobs=[-1.0] * 3
    )
    base = tables.scores([-1.0, -1.0, -2.0], entropies=[1.0, 1.0, 1.0])
    losses = [
        policy.sapo,
        policy.gmpo,
        policy.clipped,
        partial(policy.sequence_clipped, low=0.5, high=0.5),
        partial(composition.with_kl, loss=policy.sapo, beta=0.3),
        partial(composition.with_corrected_kl, loss=policy.sapo, beta=0.3),
    ]
    for loss in losses:

        def total(logprobs, loss=loss):
            return loss(attrs.evolve(base, logprobs=logprobs), batch)[0]

        assert torch.autograd.gradcheck(total, base.logprobs)
