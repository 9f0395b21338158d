import errno
import io
import json
import math
import subprocess
import sys

import hypothesis
import numpy as np
import pandas
import pyarrow.json
import pytest
from hypothesis import strategies as st

from shell import log, mistake, progress
from tests import paths


def journal(folder, **more):
    return log.Journal(folder, progress.Display(stream=io.StringIO()), **more)


def test_a_step_is_a_json_object_on_a_line(tmp_path):
    made = journal(tmp_path)
    made.log(1, {"loss": 2.5, "perf/trained_tok_s": np.float32(10.0)})
    made.log(2, {"loss": 1.5})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "loss": 2.5, "perf/trained_tok_s": 10.0}\n{"step": 2, "loss": 1.5}\n'
    )
    made.close()


def test_a_loss_of_nan_stays_one_for_every_common_reader(tmp_path):
    made = journal(tmp_path)
    made.log(1, {"loss": math.nan})
    made.log(2, {"loss": 1.5})
    path = tmp_path / "metrics.jsonl"
    for losses in (
        [json.loads(line)["loss"] for line in path.read_text().splitlines()],
        pandas.read_json(path, lines=True)["loss"].tolist(),
        pyarrow.json.read_json(path)["loss"].to_pylist(),
    ):
        assert math.isnan(losses[0])
        assert losses[1] == 1.5


def test_functions_that_all_abstain_for_a_whole_step_are_named_once(tmp_path):
    made = journal(tmp_path)
    row = {
        "prompt": "p",
        "completion": "c",
        "ended": True,
        "reward": None,
        "rewards/a": None,
        "rewards/b": None,
    }
    made.completions(1, [row, {**row, "reward": 1.0}], shown=False)
    assert made.display.notes == []
    for step in (2, 3):
        made.completions(step, [row, row], shown=False)
    (told,) = made.display.notes
    assert told.startswith("every reward function (a, b) returned None for all completions of a step")
    made.completions(4, [{"prompt": "p", "completion": "c", "ended": True}], shown=False)
    assert len(made.display.notes) == 1
    made.close()


def test_training_and_evaluation_of_one_step_share_a_line(tmp_path):
    made = journal(tmp_path)
    made.log(1, {"loss": 2.0})
    made.log(2, {"loss": 1.0})
    made.log(2, {"eval_loss": 3.0})
    made.log(3, {"loss": 0.5})
    made.log(3, {"loss": 1})
    assert log.read(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 1.0, "eval_loss": 3.0},
        {"step": 3, "loss": 1},
    ]


@hypothesis.given(steps=st.integers(0, 6), resumed=st.integers(0, 6), cut=st.integers(0, 60))
@hypothesis.settings(max_examples=60)
def test_killed_anywhere_and_resumed_no_step_stands_twice_and_none_is_missing(
    tmp_path_factory, steps, resumed, cut
):
    folder = tmp_path_factory.mktemp("run")
    resumed = min(resumed, steps)
    made = journal(folder)
    for step in range(1, steps + 1):
        made.log(step, {"loss": float(step)})
    path = folder / "metrics.jsonl"
    whole = path.read_bytes()
    kept = b"".join(whole.splitlines(keepends=True)[:resumed])
    path.write_bytes(
        whole[: max(len(kept), len(whole) - cut)]
    )  # a kill cuts only what came after the checkpoint
    again = journal(folder, resumed=resumed)
    for step in range(resumed + 1, 8):
        again.log(step, {"loss": float(step)})
    assert log.read(path) == [{"step": step, "loss": float(step)} for step in range(1, 8)]


def test_a_line_cut_in_half_is_dropped_and_said(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    made = journal(tmp_path, resumed=2)
    assert log.read(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]
    assert made.display.notes == [f"line 2 of {tmp_path}/metrics.jsonl is not a logged step and was dropped"]


def test_more_of_the_step_that_was_resumed_from_joins_its_line(tmp_path):
    first = journal(tmp_path)
    first.log(1, {"loss": 2.0})
    first.log(2, {"loss": 1.0})
    journal(tmp_path, resumed=1).log(1, {"eval_loss": 3.0})
    assert log.read(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0, "eval_loss": 3.0}]


def test_a_new_run_starts_the_file_anew(tmp_path):
    journal(tmp_path).log(1, {"loss": 2.0})
    journal(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_logged_line_survives_the_death_of_the_process(tmp_path):
    program = (
        "import os, sys\nfrom shell import log, progress\n"
        "made = log.Journal(sys.argv[1], progress.Display(shown=False))\n"
        "made.log(1, {'loss': 1.0})\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=paths.ROOT, check=False)
    assert done.returncode == -9
    assert log.read(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]


def test_only_the_first_rank_writes(tmp_path):
    made = journal(tmp_path / "run", writes=False)
    made.log(1, {"loss": 1.0})
    made.run({"device": "cpu"})
    made.close()
    assert not list(tmp_path.iterdir())


def test_run_json_is_replaced_whole(tmp_path, monkeypatch):
    made = journal(tmp_path)
    made.run({"device": "cpu", "steps": 1})
    assert json.loads((tmp_path / "run.json").read_text()) == {"device": "cpu", "steps": 1}

    def interrupted(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(log.files.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.run({"device": "cpu", "steps": 2})
    with pytest.raises(KeyboardInterrupt):
        log.files.replace(tmp_path / "run.json", "{")
    assert json.loads((tmp_path / "run.json").read_text())["steps"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "run.json"]


def test_a_full_disk_is_told_in_one_line(tmp_path):
    made = journal(tmp_path)

    class Full(io.RawIOBase):
        def seek(self, *place):
            return 0

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    made._file = Full()
    with pytest.raises(
        mistake.Mistake, match=r"metrics\.jsonl could not be written: No space left on device"
    ):
        made.log(1, {"loss": 1.0})
