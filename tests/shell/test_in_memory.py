"""Rows that a caller in Python holds are a dataset like any other."""

import datetime
import json
import pathlib

import datasets
import pytest

from shell import api, in_memory, mistake, written

ROWS = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(8)]
FEW = {"model": "tiny", "max_steps": 2, "batch_size": 2, "save_strategy": "no", "report_to": []}


def rows_read(folder):
    """What a run's own file says that it read."""
    given = json.loads((folder / "run.json").read_text())["options"]["dataset"]
    return [json.loads(line) for line in pathlib.Path(given).read_text().splitlines()]


@pytest.mark.parametrize("held", [list, tuple, datasets.Dataset.from_list, iter], ids=lambda f: f.__name__)
def test_rows_of_any_kind_are_written_once_by_what_is_in_them(tmp_path, held):
    with in_memory.named({"dataset": held(ROWS), "output_dir": tmp_path, "beta": 0.1}) as given:
        assert given["beta"] == 0.1
        written = pathlib.Path(given["dataset"])
        assert [json.loads(line) for line in written.read_text().splitlines()] == ROWS
    before = written.stat().st_mtime_ns
    with in_memory.named({"dataset": ROWS, "output_dir": tmp_path}) as given:
        assert given["dataset"] == str(written)
        assert written.stat().st_mtime_ns == before
    with in_memory.named({"dataset": ROWS[1:], "eval_dataset": ROWS, "output_dir": tmp_path}) as given:
        assert len({given["dataset"], given["eval_dataset"], str(written)}) == 3


@pytest.mark.parametrize(
    "names", ["demo", ["demo"], [{"path": "demo", "weight": 1.0}], [], None, {"train": ROWS}], ids=str
)
def test_names_of_datasets_stay_names(tmp_path, names):
    with in_memory.named({"dataset": names, "output_dir": tmp_path}) as given:
        assert given["dataset"] is names
    assert not (tmp_path / written.ROWS).exists()


def test_a_run_on_rows_is_that_on_their_file_and_goes_on(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    losses = []
    for name, dataset in (("file", str(file)), ("rows", datasets.Dataset.from_list(ROWS))):
        out = api.train("sft", dataset=dataset, output_dir=str(tmp_path / name), **FEW)
        lines = (out / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == losses[1]
    more = {**FEW, "save_strategy": "steps", "save_steps": 1}
    whole = api.train("sft", dataset=ROWS, output_dir=str(tmp_path / "more"), **more)
    api.train("sft", dataset=ROWS, output_dir=str(whole), **{**more, "max_steps": 3})
    assert json.loads((whole / "run.json").read_text())["step"] == 3
    with pytest.raises(mistake.Mistake, match="dataset"):
        api.train("sft", dataset=ROWS[1:], output_dir=str(whole), **{**more, "max_steps": 4})


def test_a_dry_run_on_rows_leaves_nothing_behind(tmp_path, capsys):
    api.train("sft", dataset=ROWS, output_dir=str(tmp_path / "out"), dry_run=True, **FEW)
    assert "8" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (datasets.Dataset.from_list([]), "dataset: no row came"),
        ([{"prompt": "1", "when": datetime.date(2020, 1, 1)}], "dataset: row 0 cannot be written as JSON"),
        ([*ROWS, {"prompt": "1", "score": float("nan")}], "dataset: row 8 cannot be written as JSON"),
        ([*ROWS, 7], "dataset: row 8 is a int; a mapping was wanted"),
    ],
    ids=["none", "a date", "not a number", "no mapping"],
)
def test_what_are_no_rows_is_told_by_its_number(tmp_path, rows, told):
    given = {"dataset": rows, "output_dir": tmp_path}
    with pytest.raises(mistake.Mistake, match=told), in_memory.named(given):
        pass
