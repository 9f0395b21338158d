"""Two runs of one job are laid side by side; what is no run is told in one line."""

import json
import shutil

import pytest

from shell import compare
from tests.shell import runs


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Make two runs of one job, the second priced at twice the first."""
    folder = tmp_path_factory.mktemp("pair")
    return [
        runs.made(folder / name, max_steps=2, price_per_hour=price)
        for name, price in (("a", 1.5), ("b", 3.0))
    ]


def printed(capsys, *words):
    assert compare.main([str(word) for word in words]) == 0
    return capsys.readouterr().out.splitlines()


def row(lines, name):
    (line,) = (line for line in lines if line.startswith(name))
    return line[len(name) :].split()


def test_one_job_run_twice_differs_in_time_and_money_alone(pair, capsys):
    lines = printed(capsys, *pair)
    assert lines[0].split() == [str(pair[0]), str(pair[1]), "second", "/", "first"]
    assert row(lines, "device") == ["cpu", "cpu"]
    assert row(lines, "steps") == ["2", "2", "1"]
    assert row(lines, "furthest apart in loss")[0] == "0"
    costs = [json.loads((run / "run.json").read_text())["reached"] for run in pair]
    wanted = [cost["cost_per_million_trained_tokens"] for cost in costs]
    told = [float(word) for word in row(lines, "cost per million trained tokens")]
    assert told == pytest.approx([*wanted, wanted[1] / wanted[0]], rel=1e-2)


def test_options_that_change_a_result_are_told_first(pair, tmp_path, capsys):
    other = runs.made(tmp_path / "other", max_steps=2, learning_rate=1e-2)
    lines = printed(capsys, pair[0], other)
    assert lines[:2] == ["not one job, since these differ:", "  learning_rate: 0.001 and 0.01"]
    assert row(lines, "cost per million trained tokens")[1] == "-"
    assert float(row(lines, "furthest apart in loss")[0]) > 0


def test_another_algorithm_is_no_one_job_and_a_devices_memory_is_not_the_hosts(pair, tmp_path, capsys):
    other = shutil.copytree(pair[0], tmp_path / "other")
    reached = {"how": "by the device's allocator", "peak_bytes": 2**31}
    facts = json.loads((other / "run.json").read_text())
    facts |= {"algorithm": "dpo", "memory": {"reached": reached}}
    (other / "run.json").write_text(json.dumps(facts))
    lines = printed(capsys, pair[0], other)
    assert lines[:2] == ["not one job, since these differ:", "  algorithm: sft and dpo"]
    assert row(lines, "peak memory of the device, GiB") == ["-", "2"]


@pytest.mark.parametrize("words", [[], ["one"], ["one", "two", "three"], ["no_such", "folders"]])
def test_what_is_no_pair_of_runs_is_told_in_one_line(words, capsys):
    assert compare.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_that_has_not_ended_is_told(pair, tmp_path, capsys):
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).write_bytes((pair[0] / name).read_bytes())
    assert compare.main([str(pair[0]), str(tmp_path)]) == 2
    assert "no run that has ended is there" in capsys.readouterr().err
