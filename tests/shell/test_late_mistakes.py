"""What goes wrong after the first steps: nothing that was trained is lost, and it is told at once."""

import json
import math
import shutil

import pytest
import torch

from core import metrics
from core import steps as verbs
from shell import checkpoint, feed, mistake, plan, stream
from tests import warm
from tests.shell import runs, words


def rows(number, bad=None):
    """Return rows of text, one of which has none."""
    return [{"text": None if place == bad else f"row {place}"} for place in range(number)]


def test_a_bad_row_met_late_in_a_stream_keeps_the_steps_before_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan, "MAX_STEPS", 1)
    monkeypatch.setattr(stream, "BLOCK", 2)
    few = {
        "streaming": True,
        "batch_size": 2,
        "max_steps": 6,
        "shuffle_dataset": False,
        "dataset_split": "train",
    }
    file = words.write(tmp_path / "rows.jsonl", rows(12, bad=7))
    few["dataset"] = file
    assert runs.run(tmp_path / "out", **few) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ")
    assert "row 7" in lines[-1]
    assert "checkpoint-3 holds the steps until here" in lines
    assert runs.steps(tmp_path / "out") == [3]
    words.write(tmp_path / "rows.jsonl", rows(12))
    runs.made(tmp_path / "out", **few, resume="force")  # the file was mended, so it is another
    runs.made(tmp_path / "whole", **few)
    runs.same(tmp_path / "whole", tmp_path / "out", 6)
    counted = [runs.facts(tmp_path / name)["rows"]["train"] for name in ("whole", "out")]
    assert counted[0] == counted[1]


def test_a_mistake_met_in_evaluation_keeps_the_steps_before_it(tmp_path, capsys, monkeypatch):
    def measured(*args, **more):
        raise mistake.Mistake("this cannot be measured")

    monkeypatch.setattr("shell.measure.measure", measured)
    held = {"eval_dataset": "demo", "eval_split": "test[:5]", "eval_steps": 2}
    assert runs.run(tmp_path / "out", max_steps=4, **held) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: this cannot be measured"
    assert runs.steps(tmp_path / "out") == [2]


def test_a_mistake_met_before_the_first_step_leaves_no_checkpoint(tmp_path, monkeypatch):
    def take(self, place):
        raise mistake.Mistake("no row can be read")

    promise = plan.promise

    def promised(*args, **more):
        found = promise(*args, **more)
        monkeypatch.setattr(feed.Prepared, "take", take)
        return found

    monkeypatch.setattr(plan, "promise", promised)
    assert runs.run(tmp_path / "out", max_steps=4) == 2
    assert runs.steps(tmp_path / "out") == []


def diverging(monkeypatch, step, name):
    """Let a metric be NaN from a step on."""
    made = verbs.train_step

    def train_step(model, algorithm, optimizer, state, packs, **more):
        after, means = made(model, algorithm, optimizer, state, packs, **more)
        nan = torch.tensor(math.nan)
        odd = {"loss": metrics.whole(nan)} if name == "loss" else metrics.collect({name: nan})
        return after, {**means, **(odd if after.step >= step else {})}

    monkeypatch.setattr(verbs, "train_step", train_step)


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_the_first_step_that_is_not_finite_is_told_once_though_it_is_not_logged(
    tmp_path, capsys, monkeypatch, name
):
    diverging(monkeypatch, 3, name)
    runs.made(tmp_path / "out", max_steps=6, save_steps=1, logging_steps=5)
    notes = [line for line in capsys.readouterr().err.splitlines() if "from before it" in line]
    assert notes == [
        f"step 3 is the first whose {name} is not finite; checkpoint-2 is the newest from before it"
    ]
    assert runs.facts(tmp_path / "out")["first_nonfinite_step"] == 3


def test_the_newest_checkpoint_from_before_a_divergence_is_never_removed(tmp_path, capsys, monkeypatch):
    diverging(monkeypatch, 3, "loss")
    few = {"save_steps": 1, "save_total_limit": 1}
    runs.made(tmp_path / "out", max_steps=4, **few)
    assert runs.steps(tmp_path / "out") == [2, 4]
    capsys.readouterr()
    runs.made(tmp_path / "out", max_steps=6, **few)
    assert runs.steps(tmp_path / "out") == [2, 6]
    assert "from before it" not in capsys.readouterr().err
    assert runs.facts(tmp_path / "out")["first_nonfinite_step"] == 3


def test_a_run_that_diverges_at_once_says_that_nothing_is_from_before_it(tmp_path, capsys, monkeypatch):
    diverging(monkeypatch, 1, "loss")
    runs.made(tmp_path / "out", max_steps=2)
    assert "first whose loss is not finite; no checkpoint is from before it" in capsys.readouterr().err
    assert math.isnan(runs.metrics(tmp_path / "out")[-1]["loss"])


def test_a_run_whose_numbers_are_finite_says_so(tmp_path):
    runs.made(tmp_path / "out", max_steps=1)
    assert runs.facts(tmp_path / "out")["first_nonfinite_step"] is None


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Two steps and a checkpoint of each."""
    return runs.made(tmp_path_factory.mktemp("done") / "out", max_steps=2, save_steps=1)


@pytest.fixture
def folder(done, tmp_path):
    """A copy of that run with its last checkpoint written by somebody else."""
    shutil.copytree(done, tmp_path / "out")
    return tmp_path / "out"


def rewritten(folder, step, change):
    """Write a checkpoint anew with other values, whole by its manifest."""
    saved = checkpoint.load(folder / f"checkpoint-{step}")
    checkpoint.save(folder, step, saved.tensors, change(dict(saved.values)))


KEYS = ("num_tokens", "scores", "rows", "measured", "options", "algorithm", "place", "key")


@pytest.mark.parametrize("name", KEYS)
def test_a_checkpoint_without_a_value_is_told_by_its_folder(folder, capsys, name):
    rewritten(folder, 2, lambda values: {n: v for n, v in values.items() if n != name})
    assert runs.run(folder, max_steps=3, save_steps=1) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"error: {folder / 'checkpoint-2'}" in told
    assert name in told


@pytest.mark.parametrize("text", ["{a: [", "words", "- 1", "", 5], ids=repr)
def test_a_checkpoint_whose_options_are_none_is_told_by_its_folder(folder, capsys, text):
    rewritten(folder, 2, lambda values: values | {"options": text})
    assert runs.run(folder, max_steps=3, save_steps=1) == 2
    assert f"error: {folder / 'checkpoint-2'} cannot be resumed from" in capsys.readouterr().err


def manifest(folder, change):
    """Write another manifest."""
    file = folder / "manifest.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


@pytest.mark.parametrize(
    "files",
    [
        lambda files: {n: f for n, f in files.items() if n != "state.json"},
        list,
        lambda files: dict.fromkeys(files, 1),
    ],
    ids=["no state", "a list", "numbers"],
)
def test_a_checkpoint_whose_manifest_names_no_state_is_passed_over(folder, capsys, files):
    manifest(folder / "checkpoint-2", lambda found: found | {"files": files(found["files"])})
    runs.made(folder, max_steps=3, save_steps=1)
    told = capsys.readouterr().err
    assert f"{folder / 'checkpoint-2'} was passed over" in told
    assert "going on from" in told


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew_in_silence(folder, capsys):
    for step in (1, 2):
        (folder / f"checkpoint-{step}" / "state.json").write_text("")
    before = runs.content(folder)
    assert runs.run(folder, max_steps=3, save_steps=1) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert all(word in told[0] for word in (str(folder), "checkpoint-2", "state.json", "another output_dir"))
    assert runs.content(folder) == before


def test_ranks_that_meet_a_bad_row_late_keep_the_steps_before_it_together(tmp_path):
    words.write(tmp_path / "rows.jsonl", rows(1100, bad=1090))
    asked = {
        "dataset": str(tmp_path / "rows.jsonl"),
        "dataset_split": "train",
        "streaming": True,
        "shuffle_dataset": False,
        "batch_size": 16,
        "max_steps": 200,
        "logging_steps": 200,
    }
    (tmp_path / "plan.json").write_text(json.dumps({str(tmp_path / "out"): asked}))
    code, _, err = warm.program("tests.shell.ranked", str(tmp_path / "plan.json"), ranks=2)
    assert code != 0
    assert err.count("error: row 1090 ") == 2
    assert runs.steps(tmp_path / "out") == [64]  # whole blocks of rows are read ahead
