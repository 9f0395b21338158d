"""Options that a caller's own algorithm does not read, and a teacher of one's own loss."""

import re

import pytest

from core import algorithms
from shell import about, config, idle, mistake, options, unread
from tests.shell import runs, words


def drawn(scores, batch):
    return scores.divergences, {"logprobs": scores.logprobs}


taught = algorithms.sft.evolve(loss=drawn, needs=("divergences",), watches=())
prompted = taught.evolve(rows="prompts")
rewarded = algorithms.grpo.evolve(
    loss=lambda scores, batch: (scores.divergences - batch.advantage * scores.logprobs, {}),
    needs=("divergences",),
)
PLAN = {"max_steps": 1, "dataset_split": "train[:6]", "teacher_model": "tiny"}
PROMPTS = {
    "dataset": "task:letters", "max_completion_length": 4, "max_length": "null", "num_generations": 2,
    "batch_size": 4,
}  # fmt: skip


TEACHER = {"teacher_model": "tiny"}


def asked(name, **more):
    return {**PLAN, "algorithm": f"{__name__}:{name}", **more}


def test_a_loss_of_ones_own_reads_how_far_the_student_is_from_its_teacher(tmp_path):
    folder = runs.made(tmp_path / "out", **asked("taught"))
    line = runs.metrics(folder)[0]
    assert line["loss"] > 0
    forward = runs.metrics(runs.made(tmp_path / "forward", **asked("taught", beta=0.0)))[0]
    assert forward["loss"] != pytest.approx(line["loss"], rel=1e-3)


@pytest.mark.parametrize("name", ["prompted", "rewarded"])
def test_completions_are_taught_and_rewarded_where_something_is_made_of_rewards(tmp_path, name):
    lines = runs.metrics(runs.made(tmp_path / "out", **asked(name, **PROMPTS)))
    assert lines[0]["loss"] != 0
    assert any(key.startswith("reward") for key in lines[0]) == (name == "rewarded")


def test_a_loss_that_reads_a_teacher_asks_for_one_before_a_model_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shell.choose.model", None)
    assert runs.run(tmp_path / "out", **asked("taught", teacher_model="null")) == 2
    assert f"{__name__}:taught reads divergences" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("algorithm", "given", "told"),
    [
        ("sft", {"ref_model": "tiny"}, "ref_model: tiny came, and my:own needs no reference_logprobs"),
        ("sft", {"teacher_model": "tiny"}, "teacher_model: tiny came, and my:own reads no divergences"),
        ("sft", {"reward_funcs": "length"}, "reward_funcs: length came, and my:own draws no completions"),
        ("sft", {"temperature": 0.5}, "temperature: 0.5 came, and my:own draws no completions of text"),
        ("dpo", {"completion_only_loss": True}, "my:own trains on pairs, which say themselves"),
        ("grpo", {"ref_model": "tiny"}, "needs no reference_logprobs"),
        ("grpo", {"truncation": "drop"}, "no prompt is cut"),
        ("distill", {**TEACHER, "reward_funcs": "length"}, "its teacher judges every token"),
        ("distill", {**TEACHER, "reward_weights": [2.0]}, "its teacher judges every token"),
        ("distill", {**TEACHER, "dynamic_sampling": 2}, "its teacher judges every token"),
    ],
)
def test_what_an_algorithm_of_ones_own_does_not_read_is_refused(algorithm, given, told):
    command = config.from_values("my:own", {"model": "tiny", "dataset": "demo", **given})
    with pytest.raises(mistake.Mistake) as caught:
        unread.check(command, getattr(algorithms, algorithm))
    assert told in str(caught.value)
    assert str(caught.value).endswith("leave it out.")


@pytest.mark.parametrize(
    ("algorithm", "given"),
    [
        ("dpo", {"ref_model": "tiny"}),
        ("sft", {"completion_only_loss": True}),
        ("grpo", {"temperature": 0.5, "reward_funcs": "length"}),
        ("distill", {"teacher_model": "tiny", "temperature": 0.5, "beta": 0.5, "loss_top_k": 3}),
        ("sft", {}),
    ],
)
def test_what_it_reads_is_not_refused_nor_are_the_defaults_of_a_runs_own_file(tmp_path, algorithm, given):
    command = config.from_values("my:own", {"model": "tiny", "dataset": "demo", **given})
    unread.check(command, getattr(algorithms, algorithm))
    (tmp_path / "config.yaml").write_text(config.to_yaml(command.options))
    again = config.parse(["my:own", "--config", str(tmp_path / "config.yaml")])
    unread.check(again, getattr(algorithms, algorithm))
    unread.check(config.from_values("sft", {"model": "tiny", "dataset": "demo"}), algorithms.sft)


def test_a_reference_that_is_not_read_ends_the_run_in_a_line(tmp_path, capsys):
    (tmp_path / "rows").mkdir()
    file = words.write(tmp_path / "rows" / "rows.jsonl", [{"text": "a", "weight": 1.0}])
    options = {"algorithm": "tests.shell.test_own:weighted", "dataset": file, "ref_model": "tiny"}
    assert runs.run(tmp_path / "out", **options) == 2
    assert "error: ref_model: tiny came" in capsys.readouterr().err


BESIDE = {"distill": ("--teacher_model", "tiny"), "dpo": (), "grpo": (), "rloo": (), "kto": ()}


@pytest.mark.parametrize(
    ("algorithm", "more", "told"),
    [
        ("grpo", "--truncation drop", "truncation: drop came, and no prompt is cut"),
        ("rloo", "--truncation split", "no prompt is cut"),
        ("distill", "--truncation keep_end", "no prompt is cut"),
        ("distill", "--lmbda 0 --top_p 0.5", "top_p: 0.5 came, and with lmbda 0 the student answers nothing"),
        ("distill", "--lmbda 0 --max_completion_length 7", "the student answers nothing"),
        ("distill", "--lmbda 0 --top_k 7", "the student answers nothing"),
        ("distill", "--lmbda 0 --min_p 0.1", "the student answers nothing"),
        ("distill", "--lmbda 0 --cache_implementation static", "the student answers nothing"),
        ("dpo", "--loss_type sft --beta 0.3", "beta: 0.3 came, and loss_type sft imitates the chosen"),
        ("grpo", "--entropy_target 0.3", "only an adaptive coefficient reads it"),
        ("kto", "--ref_model_sync_steps 3", "the reference stays"),
        ("distill", "--teacher_model_init_kwargs {revision: 7}", "revision 7 came; a text was wanted"),
    ],
)
def test_what_does_nothing_under_other_options_is_refused_by_name(algorithm, more, told):
    line = [algorithm, "--model", "tiny", "--dataset", "demo", *BESIDE[algorithm]]
    words_ = [word for part in more.split("--")[1:] for word in (f"--{part}".split(maxsplit=1))]
    with pytest.raises(mistake.Mistake, match=re.escape(told)):
        config.parse([*line, *map(str.strip, words_)])


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("distill", "--lmbda 0.5 --truncation drop --top_p 0.5 --max_completion_length 7"),
        ("distill", "--lmbda 0 --truncation drop --temperature 0.5"),
        ("dpo", "--loss_type sft sigmoid --beta 0.3"),
        ("dpo", "--loss_type orpo --beta 0.3"),
    ],
)
def test_where_it_does_something_it_is_taken(algorithm, more):
    config.parse([algorithm, "--model", "tiny", "--dataset", "demo", *BESIDE[algorithm], *more.split()])


def test_of_a_table_every_option_is_read_by_some_algorithm_when_others_allow_it():
    for row in idle.TABLE:
        for name in row.names:
            assert any(options.reads(algorithm, name) for algorithm in about.ALGORITHMS), name


def test_a_first_coefficient_below_the_least_is_refused_and_left_out_it_is_the_least():
    line = ["grpo", "--model", "tiny", "--dataset", "task:letters", "--output_dir", "x"]
    line += ["--use_adaptive_entropy", "--entropy_coef_min", "0.05"]
    with pytest.raises(mistake.Mistake, match=r"entropy_coef: 0\.01 came, below entropy_coef_min, 0\.05"):
        config.parse([*line, "--entropy_coef", "0.01"])
    assert config.parse(line).options.entropy_coef == 0.0
