"""Evaluation on its own: what it reads, what it does not, and in which order it says so."""

import json
from typing import Any

import pytest
import transformers

from shell import evaluate
from tests.shell import runs, words

WORDS = ("tiny", "--dataset", "demo", "--dataset_split", "test[:4]", "--max_length", "64")


def evaluated(capsys, *words, model="tiny"):
    """Evaluate; return what was printed, and what was said."""
    assert evaluate.main([model, *WORDS[1:], *words]) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def test_weights_in_half_precision_can_be_evaluated_though_not_trained(capsys):
    plain, _ = evaluated(capsys)
    half, _ = evaluated(capsys, "--dtype", "bfloat16")
    assert half["eval_loss"] != plain["eval_loss"]
    assert half["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-2)


def test_a_model_with_dropout_is_evaluated_without(tmp_path, capsys):
    sizes: dict[str, Any] = {"vocab_size": 320, "n_positions": 128, "n_embd": 32, "n_layer": 1, "n_head": 2}
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    gpt.save_pretrained(tmp_path / "gpt")
    words = ("--tokenizer", "tiny")
    first, _ = evaluated(capsys, *words, model=str(tmp_path / "gpt"))
    second, _ = evaluated(capsys, *words, "--disable_dropout", model=str(tmp_path / "gpt"))
    assert first == second


@pytest.mark.parametrize("name", ["dry_run", "streaming"])
@pytest.mark.parametrize("more", [(), ("--max_steps", "3")], ids=["alone", "with max_steps"])
def test_what_evaluation_cannot_do_is_refused_before_anything_else_is_asked_for(capsys, name, more):
    assert evaluate.main([*WORDS, f"--{name}", *more]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: --{name}: evaluation")
    assert said.err.count("\n") == 1


def test_what_evaluation_cannot_do_may_be_switched_off(capsys):
    evaluated(capsys, "--streaming", "false", "--no_dry_run")


def test_options_that_only_training_reads_are_named(tmp_path, capsys):
    words = (
        "--output_dir",
        str(tmp_path / "out"),
        "--learning_rate",
        "1e-3",
        "--max_steps",
        "3",
        "--seed",
        "1",
    )
    _, said = evaluated(capsys, *words)
    assert "evaluation does not read output_dir, max_steps, learning_rate" in said
    assert "seed" not in said
    assert not (tmp_path / "out").exists()


def test_an_evaluation_that_is_given_nothing_superfluous_says_nothing_of_it(capsys):
    _, said = evaluated(capsys)
    assert "does not read" not in said


def test_a_dry_run_over_a_run_with_other_options_is_told_as_the_run_itself_would_be(tmp_path, capsys):
    folder = runs.made(tmp_path / "out", max_steps=2, save_steps=1)
    before = runs.content(folder)
    lines = []
    for dry in (False, True):
        capsys.readouterr()
        assert runs.run(folder, max_steps=3, seed=5, dry_run=dry) == 2
        lines.append(capsys.readouterr().err.splitlines()[-1])
    assert lines[0] == lines[1]
    assert "holds a run with seed" in lines[0]
    assert runs.content(folder) == before


def test_a_dry_run_over_a_run_says_where_it_would_go_on(tmp_path, capsys):
    folder = runs.made(tmp_path / "out", max_steps=2, save_steps=1)
    before = runs.content(folder)
    capsys.readouterr()
    assert runs.run(folder, max_steps=4, dry_run=True) == 0
    said = capsys.readouterr()
    assert f"going on from {folder}/checkpoint-2" in said.err
    assert "peak memory" in said.out
    assert runs.run(folder, max_steps=2, dry_run=True) == 0
    assert "is finished (2 steps)" in capsys.readouterr().err
    assert runs.content(folder) == before


def test_a_shorter_length_than_a_finished_run_has_is_told_truly(tmp_path, capsys):
    folder = runs.made(tmp_path / "out", max_steps=4)
    before = runs.content(folder)
    capsys.readouterr()
    assert runs.run(folder, max_steps=2) == 0
    said = capsys.readouterr().err
    assert "is finished (4 steps); only more than 4 would continue it" in said
    assert "schedule" not in said
    assert runs.content(folder) == before


def test_a_run_that_goes_on_over_another_number_of_processes_says_so(tmp_path, capsys):
    from shell import checkpoint

    folder = runs.made(tmp_path / "out", max_steps=1)
    saved = checkpoint.load(folder / "checkpoint-1")
    checkpoint.save(folder, 1, saved.tensors, saved.values | {"ranks": 2})
    capsys.readouterr()
    runs.made(folder, max_steps=2)
    assert "1 process shares the steps, 2 did before" in capsys.readouterr().err


def test_a_rise_of_the_learning_rate_that_never_ends_is_told(tmp_path, capsys):
    words = {"max_steps": 2, "lr_scheduler_type": "constant_with_warmup", "dry_run": True}
    assert runs.run(tmp_path / "out", **words, warmup_steps=2) == 0
    said = capsys.readouterr().err
    assert "rises for 2 steps and the run has 2: it never reaches 0.001" in said
    assert runs.run(tmp_path / "out", **words, warmup_steps=1) == 0
    assert "rises" not in capsys.readouterr().err


@pytest.mark.parametrize("split", [None, "train[:4]"], ids=["a file", "an entry with a split"])
def test_a_config_that_a_run_wrote_serves_where_rows_are_files(tmp_path, capsys, split):
    rows = [{"prompt": f"q{n} ", "completion": f"a{n}"} for n in range(6)]
    file = words.write(tmp_path / "rows.jsonl", rows)
    held = file if split is None else json.dumps([{"path": file, "split": split}])
    plan = {"dataset": file, "dataset_split": "train", "eval_dataset": held, "max_steps": 1, "batch_size": 4}
    out = runs.made(
        tmp_path / "out", **plan, eval_strategy="epoch", eval_on_start=True, load_best_model_at_end=True
    )
    capsys.readouterr()
    assert evaluate.main([str(out / "model"), "--config", str(out / "config.yaml")]) == 0
    found = json.loads(capsys.readouterr().out)["eval_loss"]
    assert found == pytest.approx(runs.metrics(out)[-1]["eval_loss"], rel=1e-5)
