"""The best checkpoint: its weights in `model/` where that is asked for, named where not."""

import types
from typing import Any, cast

import torch

from shell import checkpoint, loop, sample
from tests.shell import runs

PLAN = {
    "eval_dataset": "demo", "eval_split": "test[:5]", "eval_steps": 1, "save_total_limit": 1, "max_steps": 3,
}  # fmt: skip


def scored(monkeypatch, *losses):
    """Let evaluations find these losses, after the first look at what is measured."""
    left = iter([0.0, *losses])
    monkeypatch.setattr("shell.measure.measure", lambda *args, **more: {"eval_loss": next(left)})


def of_step(folder, step):
    """Return the parameters of a checkpoint."""
    saved = checkpoint.load(folder / f"checkpoint-{step}").tensors
    return {n.removeprefix("params/"): t for n, t in saved.items() if n.startswith("params/")}


def holds(folder, step):
    """Say whether `model/` has the weights of a checkpoint, to the bit."""
    wanted = sorted((t for t in of_step(folder, step).values()), key=lambda t: t.sum().item())
    got = sorted(runs.weights(folder).values(), key=lambda t: t.sum().item())
    assert len(got) == len(wanted)
    return all(torch.equal(a.float(), b.float()) for a, b in zip(got, wanted, strict=True))


def test_the_best_weights_become_the_model_where_that_is_asked_for(tmp_path, monkeypatch, capsys):
    size, begun = dict[str, int](), dict[str, str]()
    for name, more in (
        ("adapter", {"use_peft": True}), ("narrow", {"dtype": "bfloat16"}),
    ):  # fmt: skip
        out = tmp_path / name
        scored(monkeypatch, 3.0, 1.0, 2.0)
        runs.made(out, **PLAN, **more, load_best_model_at_end=True)
        assert (holds(out, 2), holds(out, 3)) == (True, False), name
        told = capsys.readouterr().err
        assert f"done: 3 steps; the model is in {out}/model, of the best eval_loss 1 at step 2" in told
        size[name] = sum(t.numel() for t in runs.weights(out).values())
        begun[name] = next(line for line in told.splitlines() if line.startswith("sft on cpu, "))
        facts = runs.facts(out)
        assert [facts[n] for n in ("step", "best_step", "best_metric", "model_step")] == [3, 2, 1.0, 2]
    plan, whole = "3 steps of batch_size 6", sum(size.values())
    assert (
        begun["narrow"]
        == f"sft on cpu, bfloat16, 1 process: {size['narrow']:,} parameters, all trained; {plan}"
    )
    part = f"{size['adapter']:,} of them ({100 * size['adapter'] / whole:.3g}%) trained"
    assert begun["adapter"] == f"sft on cpu, float32, 1 process: {whole:,} parameters, {part}; {plan}"


def test_without_it_the_last_weights_are_written_and_the_same_command_with_it_writes_the_best(
    tmp_path, monkeypatch, capsys
):
    out, plan = tmp_path / "out", {**PLAN, "metric_for_best_model": "loss"}
    scored(monkeypatch, 3.0, 1.0, 2.0)
    runs.made(out, **plan)
    assert holds(out, 3)
    assert "the model is in" in (told := capsys.readouterr().err)
    assert "/model, of step 3; the best is eval_loss 1 at step 2, and the same command with --load" in told
    assert runs.facts(out)["model_step"] == 3
    for wanted, step in ((True, 2), (False, 3)):
        scored(monkeypatch)
        runs.made(out, **plan, load_best_model_at_end=wanted)
        assert holds(out, step)
    runs.made(out, **plan)
    assert "is finished (3 steps)" in capsys.readouterr().err


def test_a_run_that_goes_on_finds_the_best_of_before_and_a_lost_one_is_told(tmp_path, monkeypatch, capsys):
    out, plan = tmp_path / "out", {**PLAN, "load_best_model_at_end": True, "lr_scheduler_type": "constant"}
    scored(monkeypatch, 3.0, 1.0)
    runs.made(out, **{**plan, "max_steps": 2})
    scored(monkeypatch, 2.0)
    runs.made(out, **plan)
    assert holds(out, 2)
    assert runs.facts(out)["best_step"] == 2
    (out / "checkpoint-2" / "state.json").unlink()
    (out / "run.json").unlink()
    scored(monkeypatch)
    assert runs.run(out, **plan) == 2
    told = capsys.readouterr().err
    assert f"{out}/checkpoint-2, the best checkpoint, cannot be loaded: state.json is missing" in told
    scored(monkeypatch)
    runs.made(out, **{**plan, "load_best_model_at_end": False})
    assert holds(out, 3)


def test_a_checkpoint_that_is_named_as_a_model_is_told_how_to_be_used(tmp_path, capsys):
    for name, more, told in (
        ("whole", {}, "it is a checkpoint: say --model tiny --init_from {}"),
        ("adapter", {"use_peft": True}, "it is a checkpoint of an adapter, and model/ is written"),
    ):
        folder = runs.made(tmp_path / name, max_steps=1, **more) / "checkpoint-1"
        assert sample.main([str(folder), "--prompt", "hi"]) == 2
        assert told.format(folder) in capsys.readouterr().err
    words = ["tiny", "--init_from", str(tmp_path / "whole" / "checkpoint-1"), "--max_completion_length", "2"]
    assert sample.main([*words, "--prompt", "hi"]) == 0


def test_the_best_needs_an_evaluation_and_is_by_loss_where_nobody_names_a_metric(tmp_path, capsys):
    assert runs.run(tmp_path / "out", load_best_model_at_end=True, max_steps=1) == 2
    assert "--load_best_model_at_end and eval_dataset: nothing is evaluated" in capsys.readouterr().err


def test_scores_are_of_the_metric_that_is_asked_for_and_none_are_without_one(tmp_path, monkeypatch, capsys):
    out, plan = tmp_path / "out", {**PLAN, "lr_scheduler_type": "constant"}
    scored(monkeypatch, 3.0, 1.0)
    runs.made(out, **{**plan, "max_steps": 2}, metric_for_best_model="loss")
    assert runs.facts(out)["best_step"] == 2
    left = iter([{"eval_loss": 0.0, "eval_reward": 0.0}, {"eval_loss": 2.0, "eval_reward": 0.5}])
    monkeypatch.setattr("shell.measure.measure", lambda *args, **more: next(left))
    capsys.readouterr()
    runs.made(out, **plan, metric_for_best_model="reward")
    assert "the best so far was by eval_loss, and metric_for_best_model is reward" in capsys.readouterr().err
    assert [runs.facts(out)[n] for n in ("best_step", "best_metric")] == [3, 0.5]
    monkeypatch.setattr("shell.measure.measure", lambda *args, **more: {"eval_loss": 1.0})
    runs.made(out, **{**plan, "max_steps": 4})
    assert runs.facts(out)["best_step"] is None


def test_scores_without_a_metric_have_no_best():
    unnamed = types.SimpleNamespace(metric_for_best_model=None, greater_is_better=None)
    job, run = types.SimpleNamespace(chosen=unnamed), types.SimpleNamespace(scores={1: 3.0, 2: 1.0})
    assert loop.best(cast("Any", job), cast("Any", run)) is None


def test_a_finished_run_that_scored_nothing_says_so_where_its_best_is_asked_for(tmp_path, capsys):
    plan = {**PLAN, "max_steps": 1}
    out = runs.made(tmp_path / "out", **plan)
    runs.made(out, **plan)
    assert "no evaluation was scored" not in capsys.readouterr().err
    runs.made(out, **plan, load_best_model_at_end=True)
    told = "only more than 1 would continue it; no evaluation was scored, model/ has the last weights"
    assert told in capsys.readouterr().err
