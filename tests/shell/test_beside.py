"""Adapters as references and teachers; an evaluated run is compared with the reference that it had."""

import json
import shutil

import pytest
import safetensors.torch
import torch

from shell import checkpoint, choose, config, evaluate, mistake, references
from tests.shell import runs, words
from tests.shell.test_low_rank import LORA, PAIRS

ADAPTER = {**LORA, "max_steps": 2, "learning_rate": 0.01}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Two steps of supervised training: an adapter that is not its base."""
    return runs.made(tmp_path_factory.mktemp("started") / "out", **ADAPTER)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return words.write(tmp_path_factory.mktemp("rows") / "pairs.jsonl", PAIRS)


def asked(pairs, **more):
    """Return the options of two steps of DPO that are evaluated after the last."""
    rows = {"dataset": pairs, "dataset_split": "train", "eval_dataset": pairs, "eval_steps": 2}
    return {"algorithm": "dpo", "batch_size": 4, "max_length": 96, "max_steps": 2, **rows, **more}


def logged(folder):
    return {n: v for line in runs.metrics(folder) for n, v in line.items() if n.startswith("eval_")}


def evaluated(capsys, *told, algorithm="dpo"):
    """Evaluate; return what was printed, and what was said."""
    capsys.readouterr()
    assert evaluate.main([*map(str, told), "--algorithm", algorithm]) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def near(numbers):
    return {name: pytest.approx(number, rel=1e-4, abs=1e-5) for name, number in numbers.items()}


@pytest.mark.parametrize("begun", ["adapter", "checkpoint", "base", "ref_model"])
def test_a_run_of_an_adapter_is_evaluated_against_the_reference_that_it_had(
    tmp_path, capsys, pairs, started, begun
):
    options = {
        "adapter": {"model": started / "model"},
        "checkpoint": {**ADAPTER, "init_from": started / "checkpoint-2"},
        "base": {**ADAPTER, "model": started / "base", "tokenizer": started / "model"},
        "ref_model": {**ADAPTER, "ref_model": started / "model"},
    }[begun]
    folder = runs.made(tmp_path / "out", **{**asked(pairs), **options, "max_steps": 2})
    wanted = logged(folder)
    plain, said = evaluated(capsys, folder / "model", "--dataset", pairs, "--max_length", 96)
    assert plain == near(wanted)
    assert f"which the run in {folder} began with" in said
    ours, _ = evaluated(capsys, folder / "model", "--dataset", pairs, "--config", folder / "config.yaml")
    assert ours == near(wanted)
    # That of no reference but the right one.
    other = started / "model" if begun == "base" else started / "base"
    told = ("--dataset", pairs, "--max_length", 96, "--ref_model", other)
    assert evaluated(capsys, folder / "model", *told)[0]["eval_loss"] != pytest.approx(wanted["eval_loss"])


def test_an_adapter_that_no_run_here_left_is_compared_with_its_base(tmp_path, capsys, pairs, started):
    shutil.copytree(started / "model", tmp_path / "theirs")
    told = ("--dataset", pairs, "--max_length", 96)
    found, said = evaluated(capsys, tmp_path / "theirs", *told)
    assert f"the reference is {started / 'base'}, the base of the adapter {tmp_path / 'theirs'}" in said
    assert found == evaluated(capsys, tmp_path / "theirs", *told, "--ref_model", started / "base")[0]
    assert found["eval_rewards/margins"] != 0


def test_a_file_of_a_run_that_began_elsewhere_does_not_put_its_beginning_in_the_place_of_its_end(
    tmp_path, capsys
):
    held = {"eval_dataset": "demo", "eval_split": "test[:5]", "eval_steps": 2, "max_steps": 2}
    source = runs.made(tmp_path / "source", max_steps=1)
    folder = runs.made(tmp_path / "out", **held, init_from=source / "model", learning_rate=0.01)
    told = ("--config", folder / "config.yaml", "--dataset", "demo", "--dataset_split", "test[:5]")
    assert evaluated(capsys, folder / "model", *told, algorithm="sft")[0] == near(logged(folder))
    begun, _ = evaluated(capsys, source / "model", *told, algorithm="sft")
    assert begun["eval_loss"] > logged(folder)["eval_loss"] + 0.1


def test_a_checkpoint_of_an_adapter_is_evaluated_with_the_file_of_its_run(tmp_path, capsys, started):
    told = ("--dataset", "demo", "--dataset_split", "test[:5]", "--config", started / "config.yaml")
    last, _ = evaluated(capsys, "tiny", "--init_from", started / "checkpoint-2", *told, algorithm="sft")
    model, _ = evaluated(capsys, started / "model", *told, algorithm="sft")
    assert last == near(model)


def test_a_policy_beside_its_own_adapter_has_no_margin_and_nothing_is_loaded_twice(
    tmp_path, pairs, started, monkeypatch
):
    loaded, load = [], choose.model
    monkeypatch.setattr(choose, "model", lambda *a, **m: loaded.append(a[0].model) or load(*a, **m))
    for number, reference in enumerate((started / "model", started / "base")):
        options = {"model": started / "model", "ref_model": reference}
        line = runs.metrics(runs.made(tmp_path / str(number), **asked(pairs, **options)))[0]
        assert (line["rewards/margins"] == 0.0) == (number == 0)
    assert loaded == [str(started / "base")] * 2


def test_an_adapter_is_the_reference_of_whole_weights_and_of_another_rank(tmp_path, pairs, started):
    lines = []
    for number, more in enumerate(({}, {**LORA, "lora_r": 2})):
        given = {"tokenizer": started / "model", "model": started / "base", **more, "max_steps": 2}
        plan = asked(pairs, ref_model=started / "model", **given)
        lines.append(runs.metrics(runs.made(tmp_path / str(number), **plan))[0])
    assert lines[0]["rewards/margins"] == pytest.approx(lines[1]["rewards/margins"], rel=1e-4)
    assert lines[0]["rewards/margins"] != 0
    # What the base is worth beside the adapter is the reverse of what the adapter is beside the base.
    back = runs.made(tmp_path / "back", **asked(pairs, model=started / "model", ref_model=started / "base"))
    assert runs.metrics(back)[0]["rewards/margins"] == pytest.approx(-lines[0]["rewards/margins"], rel=1e-3)


def test_an_adapter_of_a_tied_head_is_no_reference_of_whole_weights(tmp_path, pairs, capsys):
    more = {**ADAPTER, "max_steps": 1, "lora_target_modules": "[q_proj, lm_head]"}
    head = runs.made(tmp_path / "head", **more)
    plan = asked(pairs, ref_model=head / "model", max_steps=1)
    assert runs.run(tmp_path / "out", **plan) == 2
    assert "has an adapter beside lm_head.weight, which is tied" in capsys.readouterr().err


def test_a_reference_that_becomes_its_adapter_leaves_every_step_at_equality_and_goes_on(
    tmp_path, pairs, started
):
    synced = {"sync_ref_model": True, "ref_model_mixup_alpha": 1, "ref_model_sync_steps": 1}
    plan = {**asked(pairs, save_steps=1, **synced), **ADAPTER, "max_steps": 3}
    whole = runs.made(tmp_path / "whole", **plan)
    lines = [line for line in runs.metrics(whole) if "loss" in line]
    assert [line["rewards/margins"] for line in lines] == [0.0] * 3
    assert any(bool(t.any()) for n, t in runs.weights(whole).items() if "lora_B" in n)
    held = checkpoint.load(whole / "checkpoint-2").tensors
    for name, tensor in held.items():
        if name.startswith(references.PREFIX):
            assert torch.equal(tensor, held[f"params/{name.removeprefix(references.PREFIX)}"])
    for step in (2, 3):
        shutil.rmtree(shutil.copytree(whole, tmp_path / "out", dirs_exist_ok=True) / f"checkpoint-{step}")
    shutil.rmtree(tmp_path / "out" / "model")
    runs.made(tmp_path / "out", **plan)
    runs.same(whole, tmp_path / "out", 3)
    other = {**plan, "ref_model": started / "model", "lora_r": 2}
    assert runs.run(tmp_path / "other", **other) == 2


def test_between_two_adapters_there_is_none_to_follow():
    line = [
        "dpo",
        "--model",
        "tiny",
        "--dataset",
        "demo",
        "--output_dir",
        "x",
        "--use_peft",
        "--sync_ref_model",
    ]
    with pytest.raises(mistake.Mistake, match=r"0\.6 came, and with use_peft .* 1 was wanted"):
        config.parse(line)
    assert config.parse([*line, "--ref_model_mixup_alpha", "1"]).options.sync_ref_model


DISTILLED = {
    "algorithm": "distill",
    "lmbda": 0.0,
    "max_steps": 1,
    "dataset_split": "train[:6]",
    "token_budget": 999,
}


def test_a_teacher_that_is_the_students_base_is_the_student_with_its_adapter_off(
    tmp_path, started, monkeypatch, capsys
):
    plan = {**DISTILLED, "model": started / "model", "teacher_model": started / "base"}
    loaded, load = [], choose.model
    with monkeypatch.context() as patch:
        patch.setattr(choose, "model", lambda *a, **m: loaded.append(1) or load(*a, **m))
        shared = runs.made(tmp_path / "shared", **plan)
    assert loaded == [1]
    shutil.copytree(started / "base", tmp_path / "copy")
    copied = runs.made(tmp_path / "copied", **{**plan, "teacher_model": tmp_path / "copy",
                                               "tokenizer": started / "model"})  # fmt: skip
    assert runs.metrics(shared) == runs.metrics(copied)
    assert runs.metrics(shared)[0]["loss"] > 0
    assert all(torch.equal(a, b) for a, b in
               zip(runs.weights(shared).values(), runs.weights(copied).values(), strict=True))  # fmt: skip
    assert "nothing is learned" not in capsys.readouterr().err


def test_an_adapter_teaches_its_base_and_a_copy_of_itself_nothing(tmp_path, started, capsys):
    plan = {**DISTILLED, "teacher_model": started / "model", "tokenizer": started / "model"}
    taught = runs.metrics(runs.made(tmp_path / "taught", **plan, model=started / "base"))[0]
    equal = runs.metrics(runs.made(tmp_path / "equal", **plan, model=started / "model"))[0]
    assert taught["loss"] > 0.001
    assert abs(equal["loss"]) < 1e-6
    assert runs.run(tmp_path / "dry", **{**plan, "model": started / "base", "dry_run": True,
                                         "teacher_model": started / "base", **LORA}) == 0  # fmt: skip
    assert "their divergence is 0, and nothing is learned" in capsys.readouterr().err


def test_a_run_does_not_go_on_under_another_adapter_of_the_same_base(tmp_path, started, capsys):
    for path in ("model", "base"):
        shutil.copytree(started / path, tmp_path / path)
    plan = {**DISTILLED, "model": started / "base", "tokenizer": started / "model"}
    plan |= {"teacher_model": tmp_path / "model"}
    runs.made(tmp_path / "out", **plan)
    file = tmp_path / "model" / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({n: t * 2 for n, t in tensors.items()}, file)
    assert runs.run(tmp_path / "out", **{**plan, "max_steps": 2}) == 2
    assert "holds other weights than when the run" in capsys.readouterr().err


def test_a_student_without_a_teacher_is_told_what_its_own_base_is_called():
    line = ["distill", "--model", "BASE", "--dataset", "demo", "--output_dir", "x"]
    for more, told in (([], "--teacher_model BASE."), (["--use_peft"], "BASE is its adapter's own base")):
        with pytest.raises(mistake.Mistake) as caught:
            config.parse([*line, *more])
        assert str(caught.value).endswith(told + ("." if more else ""))


def test_adapters_that_are_cut_are_told_by_the_option_that_names_them(tmp_path, pairs, started, capsys):
    shutil.copytree(started / "model", tmp_path / "cut")
    file = tmp_path / "cut" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    plans = {
        "ref_model": asked(pairs, ref_model=tmp_path / "cut"),
        "teacher_model": {**DISTILLED, "teacher_model": tmp_path / "cut"},
    }
    for name, plan in plans.items():
        assert runs.run(tmp_path / "out", **plan) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"{name} adapter {tmp_path / 'cut'} cannot be read" in line


def test_options_of_a_file_give_way_to_the_adapter_that_a_command_names(started):
    told = ["sft", "--config", str(started / "config.yaml"), "--output_dir", "x"]
    chosen = config.parse([*told, "--model", str(started / "model")])
    assert (chosen.options.lora_r, chosen.options.init_from) == (4, str(started / "model"))
    assert not any("lora_" in note for note in chosen.notes)
    chosen = config.parse([*told, "--lora_dropout", "0.1"])
    assert chosen.options.packing == "none"


def test_a_file_that_asks_for_another_adapter_than_the_one_that_is_named_is_told(tmp_path, started):
    (tmp_path / "run.yaml").write_text("use_peft: true\nlora_r: 32\nlora_target_modules: [q_proj]\n")
    line = [
        "sft",
        "--config",
        str(tmp_path / "run.yaml"),
        "--model",
        str(started / "model"),
        "--dataset",
        "demo",
    ]
    (note,) = config.parse(line).notes
    assert (
        note == f"{tmp_path / 'run.yaml'}, line 2, lora_r is ignored: the adapter {started / 'model'} has 4."
    )
    with pytest.raises(mistake.Mistake, match="leave lora_r out"):
        config.parse([*line, "--lora_r", "32"])


def test_a_runs_own_file_gives_no_remarks(tmp_path):
    first = config.parse(
        ["sft", "--model", "tiny", "--dataset", "demo", "--max_steps", "3", "--output_dir", "x"]
    )
    (tmp_path / "config.yaml").write_text(config.to_yaml(first.options))
    assert config.parse(["sft", "--config", str(tmp_path / "config.yaml")]).notes == ()
    several = ["--lora_r", "8", "--lora_alpha", "4"]
    found = config.parse(["sft", "--config", str(tmp_path / "config.yaml"), *several])
    assert found.notes == ("lora_r, lora_alpha are ignored: without use_peft there is no adapter.",)


def test_adapters_that_cannot_be_what_they_are_named_as_are_told_by_what_is_wrong(
    tmp_path, pairs, started, capsys
):
    shutil.copytree(started / "model", tmp_path / "gone")
    shutil.copytree(started / "model", tmp_path / "reward")
    for name, change in (
        ("gone", {"base_model_name_or_path": "/nowhere"}),
        ("reward", {"task_type": "SEQ_CLS"}),
    ):
        file = tmp_path / name / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    teach = {**DISTILLED, "model": "tiny"}
    cases = (
        (
            asked(pairs, ref_model=tmp_path / "gone"),
            "ref_model adapter",
            "its base /nowhere is no folder here",
        ),
        ({**teach, "teacher_model": tmp_path / "gone"}, "teacher_model adapter", "its base /nowhere"),
        ({"model": tmp_path / "gone"}, "error: adapter", "its base /nowhere is no folder here"),
        (
            asked(pairs, ref_model=tmp_path / "reward"),
            "ref_model adapter",
            "is of a reward model; one of a language",
        ),
        ({**teach, "teacher_model": tmp_path / "reward"}, "teacher_model adapter", "is of a reward model"),
        ({"model": tmp_path / "reward"}, "error: adapter", "is of a reward model; one of a language model"),
        (asked(pairs, ref_model=started), "ref_model", f"did you mean {started / 'model'}?"),
    )
    for plan, *told in cases:
        assert runs.run(tmp_path / "out", **plan) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert all(words_ in line for words_ in told), line
