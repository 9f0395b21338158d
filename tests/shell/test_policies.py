"""Options to policy losses: the loss that was named, with the numbers that were named."""

import math

import attrs
import pytest
import torch

from core import algorithms
from shell import config, mistake, policies
from tests.core import tables

BOUNDS = ("--epsilon", "0.1", "--epsilon_high", "0.2")
BASE = ("--model", "tiny", "--dataset", "task:letters", "--output_dir", "out")


def chosen(*words, algorithm="grpo"):
    return config.parse([algorithm, *BASE, *words]).options


def value(algorithm, ratio, advantage, lengths):
    """Return the loss of sequences whose tokens all have one ratio."""
    logs = [math.log(r) for r, n in zip(ratio, lengths, strict=True) for _ in range(n)]
    scores = tables.scores(logs)
    columns = {"old_logprobs": [0.0] * len(logs), "sampled_logprobs": [0.0] * len(logs)}
    batch = tables.batch(lengths, advantage=advantage, **columns)
    values, seen = algorithm.loss(scores, batch)
    return algorithm.reduce(values, batch).item(), seen


@pytest.mark.parametrize(
    ("words", "ratio", "advantage", "lengths", "wanted"),
    [
        ((), [1.5, 1.5], [1.0, -1.0], [1, 3], (-1.2 + 3 * 1.5) / 4),
        (("--epsilon_high", "0.28"), [1.4], [1.0], [1], -1.28),
        (("--loss_type", "grpo"), [1.0, 1.0], [1.0, -2.0], [1, 3], 0.5),
        (("--loss_type", "bnpo", "--epsilon", "0.1"), [0.5], [-1.0], [2], 0.9),
        (("--loss_type", "dr_grpo", "--max_completion_length", "8"), [1.0] * 2, [-1.0] * 2, [4, 5], 0.5625),
        (("--delta", "4"), [10.0], [-1.0], [1], 4.0),
        (("--loss_type", "cispo", "--epsilon_high", "5"), [1.0], [-1.0], [1], 0.0),
        (("--importance_sampling_level", "sequence"), [1.0, 1.0], [1.0, -1.0], [2, 6], 0.0),
        (
            ("--loss_type", "luspo", "--importance_sampling_level", "sequence"),
            [1.0, 1.0], [1.0, -1.0], [2, 6], 2.0,
        ),
        (("--loss_type", "luspo"), [1.0, 1.0], [1.0, -1.0], [2, 6], 2.0),
        (("--loss_type", "gspo"), [1.1, 1.0], [1.0, -1.0], [2, 6], (-1.0004 + 1.0) / 2),
        (("--loss_type", "gspo", *BOUNDS), [1.1] * 2, [1.0, 1.0], [2, 6], -1.1),
        (("--loss_type", "gmpo"), [math.e, 1.0], [1.0, -1.0], [2, 6], (1.0 - math.exp(0.4)) / 2),
        (("--loss_type", "gmpo", *BOUNDS), [math.e], [1.0], [2], -math.exp(0.2)),
        (("--loss_type", "dapo_prompts"), [1.0, 1.0], [1.0, -2.0], [1, 3], (-1.0 + 3 * 2.0) / 4),
        (("--loss_type", "sapo"), [1.0], [1.0], [1], -2.0),
        (("--loss_type", "sapo", "--sapo_temperature_neg", "2"), [1.0], [-1.0], [1], 1.0),
    ],
)  # fmt: skip
def test_the_loss_is_the_named_one_with_its_numbers(words, ratio, advantage, lengths, wanted):
    found, _ = value(policies.grpo(chosen(*words)), ratio, advantage, lengths)
    assert found == pytest.approx(wanted, abs=1e-6)


def test_a_mean_over_prompts_weighs_every_prompt_alike():
    made = policies.grpo(chosen("--loss_type", "dapo_prompts"))
    batch = tables.batch([1, 3], groups=[0, 1], advantage=[-1.0, -3.0], sampled_logprobs=[0.0] * 4)
    values, _ = made.loss(tables.scores([0.0] * 4), batch)
    assert made.reduce(values, batch).item() == pytest.approx((1.0 + 3.0) / 2)


def test_rewards_are_normalized_one_by_one_where_that_is_asked():
    made = policies.grpo(
        chosen("--multi_objective_aggregation", "normalize_then_sum", "--reward_weights", "[1, 3]")
    )
    groups, parts = torch.tensor([0, 0, 0, 0]), torch.tensor([[0.0, 9.0], [1.0, 9.0], [0.0, 5.0], [1.0, 0.0]])
    found = made.columns(parts @ torch.tensor([1.0, 3.0]), groups, parts=parts)["advantage"]
    wanted = algorithms.decoupled_advantage(parts.sum(1), groups, parts=parts, weights=(1.0, 3.0))[
        "advantage"
    ]
    assert torch.equal(found, wanted)
    assert not torch.allclose(
        found, algorithms.advantage(parts @ torch.tensor([1.0, 3.0]), groups)["advantage"]
    )


def drifted(words, *, advantage, ratio=(1.0, 1.0), sampled=(0.0, 0.0)):
    """Return the values of a sample of two tokens, by their ratios and what the generator said of them."""
    made = policies.grpo(chosen(*words))
    columns = {"old_logprobs": [-math.log(r) for r in ratio], "sampled_logprobs": list(sampled)}
    values, seen = made.loss(tables.scores([0.0, 0.0]), tables.batch([2], advantage=[advantage], **columns))
    return values.tolist(), seen, made


WEIGHED = ("--vllm_importance_sampling_correction",)
MODE = (*WEIGHED, "--vllm_importance_sampling_mode")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), [1.0, 1.0]),
        (WEIGHED, [4.0 / 2, 4.0 / 2]),
        ((*WEIGHED, "--vllm_importance_sampling_clip_max", "1.9"), [0.0, 0.0]),
        ((*WEIGHED, "--vllm_importance_sampling_clip_min", "2.1"), [0.0, 0.0]),
        ((*MODE, "sequence_truncate", "--vllm_importance_sampling_cap", "1.5"), [1.5, 1.5]),
        ((*MODE, "token_mask"), [0.0, 0.5]),
        ((*MODE, "token_truncate"), [3.0, 0.5]),
        ((*MODE, "sequence_mean_mask"), [math.sqrt(2)] * 2),
        ((*MODE, "sequence_mean_truncate", "--vllm_importance_sampling_cap", "1.2"), [1.2, 1.2]),
    ],
)  # fmt: skip
def test_answers_are_weighed_by_trainer_over_generator_as_asked(words, wanted):
    values, seen, made = drifted(words, advantage=-1.0, sampled=(-math.log(4.0), math.log(2.0)))
    assert values == pytest.approx(wanted)
    assert seen.keys() >= {"sampling/importance_sampling_ratio/max", "sampling/sampling_logp_difference/mean"}
    assert made.couples == ("sample" if words else "token")


def test_weights_are_on_by_default_for_a_server_and_reach_vespo_from_inside(monkeypatch):
    asked = chosen("--loss_type", "vespo", *WEIGHED)
    assert asked.vllm_importance_sampling_mode == "token_truncate"
    plain, weighed = (
        value(policies.grpo(one), [1.2], [1.0], [2])[0] for one in (chosen("--loss_type", "vespo"), asked)
    )
    assert plain == pytest.approx(weighed)  # the generator said what the old policy does
    server = attrs.evolve(chosen(), engine="vllm")
    assert policies.grpo(server).couples == "sample"
    assert policies.grpo(attrs.evolve(server, vllm_importance_sampling_correction=False)).couples == "token"


def test_bad_answers_that_the_policy_has_left_are_left_out_and_good_ones_stay():
    words = ("--off_policy_mask_threshold", "0.5")
    for sampled, advantage, wanted in (
        ((0.7, 0.5), -1.0, [0.0, 0.0]),  # 0.6 nats a token likelier for the generator
        ((0.5, 0.4), -1.0, [1.0, 1.0]),
        ((0.7, 0.5), 1.0, [-1.0, -1.0]),
    ):
        values, seen, made = drifted(words, advantage=advantage, sampled=sampled)
        assert values == wanted
        assert float(seen["sampling/off_policy_masked"].total) == (wanted == [0.0, 0.0])
        assert made.couples == "sample"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--ref_model", "tiny"), "beta is 0, so nothing is compared with it"),
        (("--loss_type", "gspo", "--importance_sampling_level", "token"), "gspo has one ratio a sequence"),
        (("--loss_type", "gmpo", "--delta", "2"), "not read by loss_type gmpo"),
        (("--loss_type", "gmpo", "--importance_sampling_level", "sequence"), "gmpo has a ratio a token"),
        (("--multi_objective_aggregation", "normalize_then_sum", "--scale_rewards", "none"), "leave it out"),
        (("--multi_objective_aggregation", "sum"), "one of sum_then_normalize, normalize_then_sum"),
        (("--off_policy_mask_threshold", "-1"), "at least 0"),
        (("--vllm_importance_sampling_mode", "token_mask"), "set vllm_importance_sampling_correction"),
        (("--vllm_importance_sampling_mode", "tokens"), "one of sequence_mask"),
        ((*WEIGHED, "--vllm_importance_sampling_clip_min", "4"), "above vllm_importance_sampling_clip_max"),
        (
            ("--loss_type", "vespo", *WEIGHED, "--vllm_importance_sampling_mode", "sequence_mask"),
            "token_mask",
        ),
    ],
)
def test_numbers_that_do_nothing_or_contradict_each_other_are_refused(words, told):
    with pytest.raises(mistake.Mistake) as caught:
        chosen(*words)
    assert told in str(caught.value)


def test_what_people_ask_of_a_server_is_read():
    asked = chosen("--vllm_importance_sampling_correction", "true", "--vllm_importance_sampling_cap", "2.0")
    assert asked.vllm_importance_sampling_clip_max == 2.0
    assert policies.grpo(asked).couples == "sample"


def test_rloo_has_one_ratio_for_a_whole_answer_and_its_divergence_in_the_reward():
    made = policies.rloo(chosen(algorithm="rloo"))
    found, _ = value(made, [1.1, 1.0], [1.0, -1.0], [2, 1])
    assert found == pytest.approx((-1.2 + 1.0) / 2, abs=1e-6)
    assert made.needs == ("reference_logprobs",)
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    advantage = made.columns(rewards, groups, divergences=torch.tensor([2.0, 0.0]))["advantage"]
    assert advantage.tolist() == pytest.approx([0.9, -0.9])
    assert policies.rloo(chosen("--beta", "0", algorithm="rloo")).needs == ()
    whole = policies.rloo(chosen("--normalize_advantages", algorithm="rloo"))
    assert whole.columns(rewards, groups)["advantage"].tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)


@pytest.mark.parametrize(
    ("scale", "wanted"), [("group", [-0.707, 0.707]), ("none", [-0.5, 0.5]), ("batch", [-0.707, 0.707])]
)
def test_rewards_are_scaled_as_asked(scale, wanted):
    made = policies.grpo(chosen("--scale_rewards", scale))
    found = made.columns(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]))["advantage"]
    assert found.tolist() == pytest.approx(wanted, abs=1e-3)


def test_a_reference_is_needed_only_where_beta_is_above_0():
    assert policies.grpo(chosen()).needs == ()
    assert policies.grpo(chosen("--beta", "0.1")).needs == ("reference_logprobs",)
    asked = policies.grpo(chosen("--top_entropy_quantile", "0.2", "--entropy_coef", "0.1"))
    assert (asked.needs, asked.couples) == (("entropies",), "step")


def test_the_drift_from_the_generator_is_reported_and_changes_nothing():
    made = policies.grpo(chosen())
    scores = tables.scores([-1.0, -1.0])
    batch = tables.batch([2], advantage=[1.0], old_logprobs=[-1.0, -1.0], sampled_logprobs=[-1.0, -1.5])
    values, seen = made.loss(scores, batch)
    assert values.tolist() == [-1.0, -1.0]
    assert seen["sampling/sampling_logp_difference/mean"].tolist() == [0.0, 0.5]
    assert seen.keys() >= {"clip_ratio/low_mean", "sampling/importance_sampling_ratio/max"}


def test_files_that_count_generation_in_parts_of_a_step_mean_the_same_here(tmp_path):
    def visits(accumulation, parts):
        path = tmp_path / "run.yaml"
        path.write_text(
            f"gradient_accumulation_steps: {accumulation}\nsteps_per_generation: {parts}\n"
            "per_device_train_batch_size: 8\n"
        )
        return chosen("--config", str(path)).steps_per_generation

    assert [visits(1, 4), visits(4, 4), visits(4, 8), visits(4, 2)] == [4, 1, 2, 1]
    with pytest.raises(mistake.Mistake, match="a multiple of gradient_accumulation_steps, 4, was wanted"):
        visits(4, 6)
    assert chosen("--steps_per_generation", "3").steps_per_generation == 3


def test_the_defaults_are_those_that_people_know():
    asked = chosen()
    numbers = (asked.epsilon, asked.epsilon_high, asked.beta, asked.num_generations, asked.temperature)
    assert numbers == (0.2, None, 0.0, 8, 1.0)
    assert (asked.learning_rate, asked.loss_type, asked.scale_rewards) == (1e-6, "dapo", "group")
    other = chosen(algorithm="rloo")
    assert (other.beta, other.num_generations, other.epsilon) == (0.05, 2, 0.2)
    assert algorithms.rloo.couples == policies.rloo(other).couples == "sample"
