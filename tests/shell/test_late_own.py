"""A loss of one's own, or a graph, that fails only when something is evaluated: one line; nothing is lost."""

import itertools
import types

import attrs
import pytest

from adapters import compiling
from core import algorithms, ports
from core import steps as verbs
from shell import evaluate, loop, mistake, stream
from tests.shell import runs, words


def graded(scores, batch):
    if not scores.logprobs.requires_grad:
        raise ValueError("nothing is graded")
    return -scores.logprobs, {}


def whole(scores, batch):
    return -scores.logprobs.sum(), {}


def third(scores, batch):
    if scores.logprobs.requires_grad and (before := next(COUNT)) == 2:
        raise ValueError(f"failed after {before} steps")
    return -scores.logprobs, {}


COUNT = itertools.count()
drawn = algorithms.grpo.evolve(loss=third, watches=(), linear=False)
read = algorithms.sft.evolve(loss=third, watches=(), linear=False)
late = algorithms.sft.evolve(loss=graded, watches=())
wrong = algorithms.sft.evolve(loss=whole, watches=())
HELD = {"eval_dataset": "demo", "eval_split": "test[:4]", "max_steps": 3, "logging_steps": 5}
TOLD = {
    "late": "error: loss graded failed: ValueError: nothing is graded (test_late_own.py, line",
    "wrong": f"error: algorithm {__name__}:wrong: the loss returned values of shape ()",
}


def unplanned(*args, **more):
    raise compiling.Unplanned("graph 3 was asked for")


@pytest.mark.parametrize("name", TOLD)
def test_evaluation_by_a_loss_that_fails_ends_in_a_line(capsys, name):
    few = ["tiny", "--dataset", "demo", "--dataset_split", "test[:4]", "--max_length", "64"]
    assert evaluate.main([*few, "--algorithm", f"{__name__}:{name}"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[-1].startswith(TOLD[name])


def test_an_evaluation_before_the_first_step_that_fails_leaves_no_checkpoint(tmp_path, capsys):
    options = {**HELD, "algorithm": f"{__name__}:late", "eval_on_start": True}
    assert runs.run(tmp_path / "out", **options) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(TOLD["late"])
    assert runs.steps(tmp_path / "out") == []


def test_an_evaluation_after_a_step_that_fails_keeps_the_step(tmp_path, capsys):
    assert runs.run(tmp_path / "out", **HELD, algorithm=f"{__name__}:late", eval_steps=1) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(TOLD["late"])
    assert "checkpoint-1 holds the steps until here" in lines


def test_a_metric_that_cannot_be_measured_is_told_before_there_is_work_to_lose(tmp_path, capsys):
    options = {**HELD, "algorithm": f"{__name__}:late", "metric_for_best_model": "loss", "eval_steps": 3}
    assert runs.run(tmp_path / "out", **options) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(TOLD["late"])
    assert runs.steps(tmp_path / "out") == []


def test_a_graph_that_was_not_planned_is_told_wherever_it_is_met(tmp_path, capsys, monkeypatch):
    told = "error: compile: model tiny: graph 3 was asked for"
    with monkeypatch.context() as patch:
        patch.setattr("shell.measure.measure", unplanned)
        few = ["tiny", "--dataset", "demo", "--dataset_split", "test[:4]", "--max_length", "64"]
        assert evaluate.main(few) == 2
        assert capsys.readouterr().err.splitlines()[-1] == told
        assert runs.run(tmp_path / "first", **HELD, eval_on_start=True) == 2
        assert capsys.readouterr().err.splitlines()[-1] == told
        assert runs.run(tmp_path / "held", **HELD, eval_steps=1) == 2
        assert capsys.readouterr().err.splitlines()[-1] == told
        assert runs.steps(tmp_path / "held") == [1]
    made = verbs.train_step
    monkeypatch.setattr(verbs, "train_step", lambda *a, **m: unplanned() if a[3].step == 1 else made(*a, **m))
    assert runs.run(tmp_path / "step", **HELD, eval_steps=3) == 2
    assert capsys.readouterr().err.splitlines()[-1] == told
    assert runs.steps(tmp_path / "step") == [1]


FEW = {"batch_size": 4, "max_steps": 4, "logging_steps": 1, "save_total_limit": 1}
ROUNDS = {
    **{**FEW, "algorithm": f"{__name__}:drawn", "dataset": "task:letters", "dataset_split": "train[:6]"},
    **{"num_generations": 2, "max_completion_length": 4, "reward_funcs": "length"},
}


@pytest.mark.parametrize("visits", ["steps_per_generation", "num_iterations"])
def test_a_round_whose_last_step_fails_is_gone_on_with(tmp_path, capsys, monkeypatch, visits):
    monkeypatch.setitem(globals(), "COUNT", itertools.count(1))
    assert runs.run(tmp_path / "out", **ROUNDS, **{visits: 2}) == 2
    assert "checkpoint-1 holds the steps until here" in capsys.readouterr().err
    runs.made(tmp_path / "out", **ROUNDS, **{visits: 2})
    runs.made(tmp_path / "whole", **ROUNDS, **{visits: 2})
    runs.same(tmp_path / "whole", tmp_path / "out", 4)


def test_rows_of_a_step_that_failed_are_counted_once(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "COUNT", itertools.count())
    monkeypatch.setattr(stream, "BLOCK", 2)
    words.write(tmp_path / "rows.jsonl", [{"text": f"row {place}"} for place in range(12)])
    few = FEW | {"algorithm": f"{__name__}:read", "dataset": tmp_path / "rows.jsonl", "streaming": True}
    few |= {"batch_size": 2, "shuffle_dataset": False, "dataset_split": "train"}
    assert runs.run(tmp_path / "out", **few) == 2
    runs.made(tmp_path / "out", **few)
    assert runs.facts(tmp_path / "out")["rows"]["train"]["read"] == 8


@pytest.mark.parametrize(("saved", "told"), [(4, "checkpoint-4 is the newest"), (0, "no checkpoint yet")])
def test_where_others_go_on_what_is_kept_of_a_step_that_failed_is_told(saved, told):
    ranks = attrs.evolve(ports.ALONE, num=2)
    command = types.SimpleNamespace(algorithm="sft", options=None)
    job = types.SimpleNamespace(command=command, chosen=None, ranks=ranks)
    kept = loop._kept(job, None, saved, None, None, alone=True)
    with pytest.raises(mistake.Mistake, match=f"^late.*{told}"), kept:
        raise mistake.Mistake("late")
