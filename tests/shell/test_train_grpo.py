"""Learning from rewards, from end to end: what it leaves, how it goes on, what it refuses."""

import json
import signal

import pytest

from shell import api, checkpoint, log, mistake, rollout
from tests import warm
from tests.shell import runs

PROMPTS = {
    "algorithm": "grpo", "dataset": "task:letters", "dataset_split": "train[:6]", "batch_size": 4,
    "num_generations": 2, "max_completion_length": 4, "max_length": "null", "max_steps": 3,
    "logging_steps": 1,
}  # fmt: skip
EVERY = {
    "loss", "grad_norm", "entropy", "reward", "reward_std", "frac_reward_zero_std", "rewards/letters/mean",
    "rewards/letters/std", "completions/mean_length", "completions/min_length", "completions/max_length",
    "completions/clipped_ratio", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
    "sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max", "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max", "step_time", "perf/trained_tok_s", "num_tokens",
}  # fmt: skip


def words(**options):
    return {**PROMPTS, **options}


def drawn(folder):
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps over six prompts, evaluated on three others."""
    folder = tmp_path_factory.mktemp("run") / "out"
    evaluated = {"eval_dataset": "task:letters", "eval_split": "test[:3]", "eval_steps": 2}
    return runs.made(folder, **words(temperature=0.6, top_p=0.75, **evaluated))


def test_every_logged_step_has_the_metrics_of_the_dashboards(run):
    lines = runs.log.read(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line.keys() >= EVERY for line in lines)
    assert lines[-1]["epoch"] == 1.0
    assert {"eval_reward", "eval_rewards/letters/mean"} <= lines[1].keys()
    assert "eval_reward" not in lines[0]


def test_the_first_ratio_is_1_at_a_temperature_and_on_a_nucleus(run):
    first = runs.log.read(run / "metrics.jsonl")[0]
    assert first["sampling/sampling_logp_difference/max"] < 1e-4
    assert first["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-4)


def test_a_cache_of_fixed_shape_draws_the_same_completions_and_its_first_ratio_is_1(run, tmp_path):
    options = words(temperature=0.6, top_p=0.75, cache_implementation="static")
    folder = runs.made(tmp_path / "out", **options)
    assert drawn(folder) == drawn(run)
    first = runs.log.read(folder / "metrics.jsonl")[0]
    assert first["sampling/sampling_logp_difference/max"] < 1e-4


def test_every_completion_is_in_a_file_with_its_rewards(run):
    rows = drawn(run)
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4 + [3] * 4
    assert rows[0].keys() >= {"prompt", "completion", "ended", "reward", "rewards/letters"}
    assert len({json.dumps(row["prompt"]) for row in rows}) == 6


def test_time_of_rollouts_is_told_apart_from_that_of_steps(run):
    assert set(runs.facts(run)["wall_seconds"]) == {
        "preparing", "loading", "rollouts", "steps", "evaluating", "saving"
    }  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "grpo", "beta": 0.1, "scale_rewards": "batch"},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "delta": 2.0},
        {"loss_type": "bnpo", "top_entropy_quantile": 0.5, "entropy_coef": 0.01},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "sapo", "sapo_temperature_neg": 1.1},
        {"loss_type": "vespo", "vespo_k_pos": 1.5},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"importance_sampling_level": "sequence", "mask_truncated_completions": True},
        {
            "beta": 0.1, "use_bias_correction_kl": True, "reward_funcs": "[length, letters]",
            "reward_weights": "[1, 2]",
        },
        {"algorithm": "rloo"},
        {"algorithm": "rloo", "beta": 0.0, "normalize_advantages": True},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)  # fmt: skip
def test_every_loss_runs_with_its_numbers(tmp_path, options):
    folder = runs.made(tmp_path / "out", **words(max_steps=1, **options))
    line = runs.log.read(folder / "metrics.jsonl")[0]
    assert "reward" in line
    beta = options.get("beta", 0.05 if options.get("algorithm") == "rloo" else 0)
    assert ("kl" in line) == bool(beta)


def test_two_ranks_draw_the_completions_of_one_process_and_train_its_weights(tmp_path):
    options = words(max_steps=2, batch_size=6, steps_per_generation=2, beta=0.1)
    alone = runs.made(tmp_path / "alone", **options)
    (tmp_path / "plan.json").write_text(json.dumps({str(tmp_path / "together"): options}))
    code, _, err = warm.program("tests.shell.ranked", str(tmp_path / "plan.json"), ranks=2)
    assert code == 0, err
    assert drawn(tmp_path / "together") == drawn(alone)
    assert runs.apart(runs.weights(tmp_path / "together"), runs.weights(alone)) < 1e-5
    one, two = (runs.metrics(tmp_path / name, *runs.PLANNED) for name in ("alone", "together"))
    assert two == [
        {key: pytest.approx(value, rel=1e-3, abs=1e-6) for key, value in line.items()} for line in one
    ]


@pytest.mark.parametrize(
    "more",
    [
        {"algorithm": "grpo", "max_steps": 8},
        {"algorithm": "rloo", "max_steps": 8, "steps_per_generation": 2, "num_iterations": 2},
    ],
    ids=["grpo", "rloo in rounds"],
)
def test_a_run_that_is_killed_again_and_again_even_while_it_generates_ends_like_one_that_is_not(
    tmp_path, more
):
    options = json.dumps(words(logging_steps=3, **more))
    code, out, err = warm.program(
        "tests.shell.killed", str(tmp_path), "2", "lines=5", "moments=1", OPTIONS=options
    )
    assert code == 0, err
    assert out.split() == ["lines", "5", "moments", "1"]


def test_a_run_that_is_killed_in_the_middle_of_a_round_goes_on_with_what_the_round_wrote(
    tmp_path, monkeypatch
):
    options = words(max_steps=6, save_steps=1, steps_per_generation=3, num_iterations=2, beta=0.1)
    whole = runs.made(tmp_path / "whole", **options)
    held = checkpoint.load(whole / "checkpoint-2")
    assert held.values["rollouts"]["sizes"] == [4, 4, 4]
    assert {"rollout/column/old_logprobs", "rollout/column/reference_logprobs"} <= held.tensors.keys()
    made, visits = rollout.Rollouts.draw, []

    def draw(self, state, reference):
        if state.step == 4 and not visits:
            visits.append(1)
            signal.raise_signal(signal.SIGTERM)
        return made(self, state, reference)

    monkeypatch.setattr(rollout.Rollouts, "draw", draw)
    assert runs.run(tmp_path / "cut", **options) == 143
    runs.made(tmp_path / "cut", **options)
    runs.same(whole, tmp_path / "cut", 6)
    assert drawn(whole) == drawn(tmp_path / "cut")


def test_completions_drawn_after_a_checkpoint_are_not_in_the_file_twice(tmp_path):
    folder = runs.made(tmp_path / "out", **words(max_steps=2, save_steps=1))
    before = drawn(folder)
    with (folder / "completions.jsonl").open("a") as file:
        file.write('{"step": 3, "completion": "lost"}\n{"step": 3, "compl')
    runs.made(folder, **words(max_steps=3))
    assert drawn(folder)[: len(before)] == before
    assert [row["step"] for row in drawn(folder)] == [1] * 4 + [2] * 4 + [3] * 4


def test_a_function_of_a_caller_in_python_is_a_reward(tmp_path):
    def reward_len(completions, **kwargs):
        return [-abs(200 - len(completion[0]["content"])) / 100 for completion in completions]

    options = {name: value for name, value in PROMPTS.items() if name not in ("algorithm", "max_length")}
    folder = api.train(
        "grpo",
        model="tiny",
        output_dir=tmp_path / "out",
        reward_funcs=reward_len,
        **{**options, "max_steps": 1},
    )
    assert log.read(folder / "metrics.jsonl")[0]["rewards/reward_len/mean"] < -1.9


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": 5}, "5 completions a step came, and 2 of a prompt"),
        ({"num_generations": 1}, "at least 2 were wanted"),
        ({"loss_type": "cispo"}, "cispo bounds the ratio itself by it, and 5.0 is recommended"),
        ({"vespo_k_pos": 1.0}, "not read by loss_type dapo; vespo read it"),
        (
            {"loss_type": "sapo", "importance_sampling_level": "sequence"},
            "loss_type sapo has a ratio a token",
        ),
        ({"reward_funcs": "lenght"}, "Did you mean length?"),
        ({"dataset": "demo", "dataset_split": "train"}, "wanted is prompt"),
        ({"reward_weights": "[1, 2]"}, "2 came for 1 reward_funcs"),
        ({"max_completion_length": 4000}, "have room for 2048 tokens"),
        ({"max_staleness": 1}, "max_staleness is not built yet"),
        (
            {"reward_funcs": "reasoning_accuracy"},
            "takes 'solution', which is no column of the dataset (answer)",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(tmp_path, capsys, options, told):
    if options.get("reward_funcs") == "reasoning_accuracy":
        pytest.importorskip("math_verify")
    assert runs.run(tmp_path / "out", **words(**options)) == 2
    assert told in capsys.readouterr().err


def test_a_reward_function_that_fails_ends_the_run_with_its_name(tmp_path):
    def broken(completions, **kwargs):
        raise KeyError("solution")

    options = {name: value for name, value in PROMPTS.items() if name not in ("algorithm", "max_length")}
    with pytest.raises(mistake.Mistake, match="reward broken failed: KeyError: 'solution'"):
        api.train("grpo", model="tiny", output_dir=tmp_path / "out", reward_funcs=[broken], **options)


def test_a_dry_run_plans_the_longest_completions(tmp_path, capsys):
    assert runs.run(tmp_path / "out", **words(dry_run=True)) == 0
    told = capsys.readouterr().out
    assert "trained tokens      48" in told
    assert not (tmp_path / "out").exists()
