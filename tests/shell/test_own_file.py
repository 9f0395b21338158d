"""The config.yaml that a run writes: what ran, to be run, gone on with, evaluated and sampled from again."""

import pytest
import yaml

from shell import choose, evaluate, mistake, sample, train
from tests.shell import runs

PLAN = {"max_steps": 1, "max_length": 1024, "eval_dataset": "demo", "eval_split": "test[:3]"}


def test_a_runs_own_file_says_what_ran_and_is_read_everywhere(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(choose, "_holds", lambda described: 40)
    out, again = tmp_path / "out", tmp_path / "again"
    runs.made(out, **PLAN)
    assert "max_length is 40, what model tiny holds" in capsys.readouterr().err
    file = str(out / "config.yaml")
    written = yaml.safe_load((out / "config.yaml").read_text())
    assert (written["algorithm"], written["max_length"]) == ("sft", 40)
    assert train.main(["sft", "--config", file, "--output_dir", str(again)]) == 0
    assert (again / "config.yaml").read_text().splitlines()[0] == "algorithm: sft"
    runs.same(out, again, 1)
    capsys.readouterr()
    own = ["sft", "--config", file]
    for words in (own, runs.words(out, **PLAN)):
        assert train.main(words) == 0
        assert "is finished (1 steps)" in capsys.readouterr().err
    assert train.main([*own, "--max_length", "39"]) == 2
    assert "holds a run with max_length 1024; 39 came" in capsys.readouterr().err
    assert evaluate.main([str(out / "model"), "--config", file]) == 0
    short = ("--max_completion_length", "4")
    assert sample.main([str(out / "model"), "--config", file, "--prompt", "hi", *short]) == 0
    assert train.main(["dpo", "--config", file]) == 2
    assert "line 1, algorithm: 'sft' came, and dpo is asked for; keep one." in capsys.readouterr().err
    (out / "checkpoint-1").rename(tmp_path / "away")
    for words in (own, runs.words(out, **PLAN)):
        assert train.main(words) == 0
        assert "is finished (1 steps)" in capsys.readouterr().err


def test_evaluation_takes_the_algorithm_of_the_file_and_the_command_lines_before_it(tmp_path):
    (tmp_path / "run.yaml").write_text("algorithm: dpo\nbeta: 0.3\ndataset: demo\n")
    words = ["tiny", "--config", str(tmp_path / "run.yaml")]
    found = evaluate._command(words)
    assert (found.algorithm, found.options.beta) == ("dpo", 0.3)
    assert evaluate._command([*words, "--algorithm", "kto"]).algorithm == "kto"
    with pytest.raises(mistake.Mistake, match="beta is not read by sft"):
        evaluate._command([*words, "--algorithm", "sft"])
