"""Options to policy losses: the loss that was named, with the numbers that were named."""

import math

import pytest
import torch

from core import algorithms
from shell import config, mistake, policies
from tests.core import tables

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
        (("--loss_type", "sapo"), [1.0], [1.0], [1], -2.0),
        (("--loss_type", "sapo", "--sapo_temperature_neg", "2"), [1.0], [-1.0], [1], 1.0),
    ],
)  # fmt: skip
def test_the_loss_is_the_named_one_with_its_numbers(words, ratio, advantage, lengths, wanted):
    found, _ = value(policies.grpo(chosen(*words)), ratio, advantage, lengths)
    assert found == pytest.approx(wanted, abs=1e-6)


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
