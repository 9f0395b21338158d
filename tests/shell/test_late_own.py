"""A loss of one's own, or a graph, that fails only when something is evaluated: one line; nothing is lost."""

import pytest

from adapters import compiling
from core import algorithms
from core import steps as verbs
from shell import evaluate
from tests.shell import runs


def graded(scores, batch):
    if not scores.logprobs.requires_grad:
        raise ValueError("nothing is graded")
    return -scores.logprobs, {}


def whole(scores, batch):
    return -scores.logprobs.sum(), {}


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
