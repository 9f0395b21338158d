"""The same command on the same folder: it goes on, says that it is done, or says why not."""

import json
import pathlib
import shutil
import signal

import pytest
import transformers
import yaml

from core import steps as verbs
from shell import checkpoint, config, feed, log, options
from tests import warm
from tests.shell import runs, words


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six steps without a stop."""
    return runs.made(tmp_path_factory.mktemp("whole") / "out", max_steps=6, save_steps=2)


@pytest.fixture
def stopped(tmp_path, whole):
    """A copy of that run as it stood after step 4."""
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    for name in ("checkpoint-6", "model"):
        shutil.rmtree(folder / name)
    (folder / "run.json").unlink()
    return folder


def signalled(monkeypatch, number, step):
    """Let a signal come during a step."""
    made = verbs.train_step

    def train_step(model, algorithm, optimizer, state, packs, **more):
        if state.step + 1 == step:
            signal.raise_signal(number)
        return made(model, algorithm, optimizer, state, packs, **more)

    monkeypatch.setattr(verbs, "train_step", train_step)


def test_a_run_that_is_killed_again_and_again_ends_like_one_that_is_not(tmp_path):
    deaths = ("moments=2", "lines=4", "saves=4")
    code, out, err = warm.program("tests.shell.killed", str(tmp_path), "1", *deaths)
    assert code == 0, err
    assert out.split() == ["moments", "2", "lines", "4", "saves", "4"]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_saves_at_a_step_and_the_run_goes_on_from_there(
    tmp_path, whole, monkeypatch, capsys, number, status
):
    folder, before = tmp_path / "out", signal.getsignal(number)
    with monkeypatch.context() as patched:
        signalled(patched, number, 3)
        assert runs.run(folder, max_steps=6, save_steps=2) == status
    assert signal.getsignal(number) is before
    assert runs.steps(folder) == [2, 3]
    assert not (folder / "model").exists()
    assert runs.facts(folder)["finished"] is False
    assert "stopped after step 3" in capsys.readouterr().err
    runs.made(folder, max_steps=6, save_steps=2)
    runs.same(whole, folder, 6)
    assert "going on from" in capsys.readouterr().err


def test_a_signal_from_outside_ends_a_process_with_its_status(tmp_path):
    process = runs.start("-m", "shell.train", *runs.words(tmp_path / "out", max_steps=100_000))
    assert process.stderr is not None
    line = ""
    while not line.startswith("step 2/"):
        line = process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    code, _, err = runs.done(process)
    assert code == 143, err
    assert runs.steps(tmp_path / "out") == [log.read(tmp_path / "out" / "metrics.jsonl")[-1]["step"]]


def test_the_same_command_on_a_finished_run_says_so_and_changes_nothing(whole, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    monkeypatch.setattr("shell.choose.model", None)  # no model is loaded
    before = runs.content(folder)
    assert runs.run(folder, max_steps=6, save_steps=2) == 0
    assert f"the run in {folder} is finished (6 steps)" in capsys.readouterr().err
    assert runs.content(folder) == before


def test_a_run_that_stopped_before_its_model_was_written_writes_it(stopped, whole):
    shutil.copytree(whole / "checkpoint-6", stopped / "checkpoint-6")
    runs.made(stopped, max_steps=6, save_steps=2)
    runs.same(whole, stopped, 6)


def test_more_steps_continue_a_finished_run_under_the_new_schedule(whole, tmp_path, capsys):
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    runs.made(folder, max_steps=8, save_steps=2)
    assert "the learning rate follows the new schedule from here on" in capsys.readouterr().err
    rates = [line["learning_rate"] for line in runs.metrics(folder)]
    assert rates[:6] == [line["learning_rate"] for line in runs.metrics(whole)]
    assert rates[6:] == pytest.approx([1e-3 * 2 / 8, 1e-3 / 8])
    assert runs.facts(folder)["step"] == 8


def test_a_length_that_another_option_overrules_is_no_change(stopped, capsys):
    assert runs.run(stopped, max_steps=6, save_steps=2, num_train_epochs=7) == 0
    assert "schedule" not in capsys.readouterr().err


CHANGED = {
    "learning_rate": 2e-3, "lr_scheduler_type": "cosine", "weight_decay": 0.1, "adam_beta1": 0.8,
    "adam_beta2": 0.9, "adam_epsilon": 1e-6, "max_grad_norm": 0.5, "warmup_steps": 2, "batch_size": 4,
    "seed": 1, "data_seed": 1, "shuffle_dataset": False, "dataset_split": "train[:20]", "max_length": 32,
    "truncation": "drop", "packing": "none", "dtype": "float64", "loss_type": "dft", "token_budget": 100,
    "assistant_only_loss": True, "disable_dropout": True, "attn_implementation": "eager",
    "chat_template_kwargs": "{a: 1}", "gradient_checkpointing": True, "model": "other", "tokenizer": "other",
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_option_is_refused_by_name_and_nothing_is_touched(stopped, name, capsys):
    before = runs.content(stopped)
    assert runs.run(stopped, max_steps=6, save_steps=2, **{name: CHANGED[name]}) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"holds a run with {name} " in told
    assert all(word in told for word in ("output_dir", "init_from", "--resume force"))
    assert runs.content(stopped) == before


def test_every_option_either_changes_the_result_or_does_not():
    old = yaml.safe_load(config.to_yaml(options.Options(model="a", dataset="b", output_dir="c")))
    free = {name for name in options.FIELDS if not options.known(name).result}
    assert {"output_dir", "max_steps", "num_train_epochs", "resume", "save_steps", "logging_steps"} <= free
    assert not free & CHANGED.keys()
    assert config.changes(old, options.Options(model="a", dataset="b", output_dir="d")) == []


@pytest.mark.parametrize(
    "changed",
    [{"save_steps": 3}, {"logging_steps": 2}, {"save_total_limit": 1}, {"price_per_hour": 3}],
    ids=str,
)
def test_an_option_that_changes_no_weight_may_change(stopped, whole, changed):
    runs.made(stopped, **{"max_steps": 6, "save_steps": 2, **changed})
    assert runs.apart(runs.weights(stopped), runs.weights(whole)) == 0.0


def test_another_algorithm_is_refused_by_name(stopped, capsys, monkeypatch, tmp_path):
    (tmp_path / "my_loss.py").write_text("from core import algorithms\n\nmine = algorithms.sft\n")
    monkeypatch.chdir(tmp_path)
    assert runs.train.main(["my_loss:mine", *runs.words(stopped, max_steps=6)[1:]]) == 2
    assert "holds a run with algorithm sft; my_loss:mine came" in capsys.readouterr().err


def test_rows_that_changed_under_their_name_are_refused(tmp_path, capsys):
    rows = [{"text": f"row {number}"} for number in range(8)]
    plan = {"dataset_split": "train", "batch_size": 4, "save_steps": 1}
    file = words.write(tmp_path / "rows.jsonl", rows)
    runs.made(tmp_path / "out", dataset=file, max_steps=1, **plan)
    words.write(tmp_path / "rows.jsonl", [*rows[:-1], {"text": "row 9"}])
    assert runs.run(tmp_path / "out", dataset=file, max_steps=2, **plan) == 2
    assert "gives other samples" in capsys.readouterr().err
    assert runs.run(tmp_path / "out", dataset=file, max_steps=2, resume="force", **plan) == 0


def test_resume_never_refuses_a_folder_in_use(stopped, tmp_path, capsys):
    before = runs.content(stopped)
    assert runs.run(stopped, max_steps=6, save_steps=2, resume="never") == 2
    assert "resume is never" in capsys.readouterr().err
    assert runs.content(stopped) == before
    assert runs.run(tmp_path / "new", max_steps=1, resume="never") == 0


def test_resume_force_takes_the_new_options_and_says_so(stopped, capsys):
    assert runs.run(stopped, max_steps=6, save_steps=2, resume="force", learning_rate=2e-3) == 0
    assert "going on under new learning_rate" in capsys.readouterr().err
    rates = [line["learning_rate"] for line in runs.metrics(stopped)]
    assert rates[4:] == pytest.approx([2e-3 * 2 / 6, 2e-3 / 6])


@pytest.mark.parametrize("changed", [{"dtype": "float64"}, {"streaming": True}], ids=str)
def test_what_not_even_force_can_carry_over_is_told(stopped, capsys, changed):
    assert runs.run(stopped, max_steps=6, save_steps=2, resume="force", **changed) == 2
    told = capsys.readouterr().err
    assert "init_from takes the weights along" in told.splitlines()[-1]
    assert runs.steps(stopped) == [2, 4]


@pytest.mark.parametrize("source", ["checkpoint-6", "model"])
def test_init_from_starts_anew_from_weights_and_leaves_its_source_alone(whole, tmp_path, source):
    before = runs.content(whole)
    folder = runs.made(
        tmp_path / "out", max_steps=1, learning_rate=0, init_from=whole / source, save_total_limit=1
    )
    assert runs.apart(runs.weights(folder), runs.weights(whole)) == 0.0
    assert runs.steps(folder) == [1]
    assert runs.content(whole) == before


def test_a_run_that_began_from_weights_goes_on_when_they_are_gone(whole, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(whole / "model", source)
    plan = {"init_from": source, "save_steps": 1}
    runs.made(tmp_path / "straight", max_steps=3, **plan)
    runs.made(tmp_path / "out", max_steps=3, **plan)
    shutil.rmtree(tmp_path / "out" / "checkpoint-3")
    shutil.rmtree(source)
    runs.made(tmp_path / "out", max_steps=3, **plan)
    runs.same(tmp_path / "straight", tmp_path / "out", 3)


@pytest.mark.parametrize(
    ("source", "told"), [("", "Did you mean"), ("nowhere", "there is no such folder")], ids=["run", "missing"]
)
def test_an_init_from_that_is_no_source_is_told_before_the_model_is_loaded(
    whole, tmp_path, capsys, monkeypatch, source, told
):
    monkeypatch.setattr("shell.choose.model", None)
    assert runs.run(tmp_path / "out", max_steps=1, init_from=whole / source) == 2
    assert told in capsys.readouterr().err


def test_the_weights_of_another_model_are_refused(tmp_path, capsys):
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    ).save_pretrained(tmp_path / "other")
    assert runs.run(tmp_path / "out", max_steps=1, init_from=tmp_path / "other") == 2
    assert "holds the weights of another model" in capsys.readouterr().err


def test_a_run_killed_before_its_first_checkpoint_begins_anew(whole, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-6", "model"):
        shutil.rmtree(folder / name)
    (folder / "run.json").unlink()
    runs.made(folder, max_steps=6, save_steps=2, resume="never")
    runs.same(whole, folder, 6)


@pytest.mark.parametrize("streaming", [False, True], ids=["list", "stream"])
def test_sixty_four_shuffled_rows_stopped_after_twenty_are_each_seen_once(tmp_path, monkeypatch, streaming):
    seen = []
    take = feed.Streamed.take if streaming else feed.Prepared.take

    def counted(self, place):
        samples, after = take(self, place)
        seen.extend(tuple(one.tokens.tolist()) for one in samples)
        return samples, after

    plan = {"dataset_split": "train[:64]", "batch_size": 4, "streaming": streaming, "max_steps": 16}
    monkeypatch.setattr("shell.plan.promise", lambda *args, **more: _no_plan())
    with monkeypatch.context() as patched:
        patched.setattr(feed.Streamed if streaming else feed.Prepared, "take", counted)
        with monkeypatch.context() as signals:
            signalled(signals, signal.SIGTERM, 5)
            assert runs.run(tmp_path / "out", **plan) == 143
        assert len(seen) == 20
        runs.made(tmp_path / "out", **plan)
    assert len(seen) == 64
    assert len(set(seen)) == 64
    rows = runs.facts(tmp_path / "out")["rows"]["train"]
    assert (rows["read"], rows["used"]) == (64, 64)


def _no_plan():
    from shell import plan

    numbers = {name: 0 for name in plan.Promise.__annotations__}
    return plan.Promise(**numbers)


def test_a_stream_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    plan = {"streaming": True, "max_steps": 6, "save_steps": 2}
    whole = runs.made(tmp_path / "whole", **plan)
    with monkeypatch.context() as patched:
        signalled(patched, signal.SIGTERM, 3)
        assert runs.run(tmp_path / "out", **plan) == 143
    runs.made(tmp_path / "out", **plan)
    runs.same(whole, tmp_path / "out", 6)


@pytest.mark.parametrize("damage", ["cut", "flipped", "manifest"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_said(stopped, whole, capsys, damage):
    newest = stopped / "checkpoint-4"
    file = newest / "tensors-00001.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "flipped":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    else:
        (newest / "manifest.json").unlink()
    runs.made(stopped, max_steps=6, save_steps=2)
    told = capsys.readouterr().err
    assert f"{newest} was passed over" in told
    assert f"going on from {stopped}/checkpoint-2" in told
    runs.same(whole, stopped, 6)


def test_the_best_and_the_newest_checkpoint_stay(tmp_path, monkeypatch, capsys):
    losses = iter([0.0, 3.0, 1.0, 2.0])
    monkeypatch.setattr("shell.measure.measure", lambda *args, **more: {"eval_loss": next(losses)})
    plan = {
        "eval_dataset": "demo", "eval_split": "test[:5]", "eval_steps": 1, "save_steps": 1,
        "metric_for_best_model": "eval_loss", "save_total_limit": 1, "max_steps": 3,
    }  # fmt: skip
    runs.made(tmp_path / "out", **plan)
    assert runs.steps(tmp_path / "out") == [2, 3]
    losses = iter([0.0, 5.0])
    runs.made(tmp_path / "out", **{**plan, "max_steps": 4})
    told = capsys.readouterr().err
    assert f"going on from {tmp_path}/out/checkpoint-3" in told
    assert "of step 4; the best is eval_loss 1 at step 2" in told
    assert runs.steps(tmp_path / "out") == [2, 4]
    best = checkpoint.load(tmp_path / "out" / "checkpoint-4").values["scores"]
    assert min(best, key=lambda step: best[step]) == "2"
    assert runs.facts(tmp_path / "out")["best_step"] == 2


def test_a_metric_that_is_not_measured_is_refused_before_the_first_step(tmp_path, capsys):
    plan = {"eval_dataset": "demo", "eval_split": "test[:5]", "metric_for_best_model": "eval_los"}
    assert runs.run(tmp_path / "out", max_steps=2, **plan) == 2
    assert "Did you mean eval_loss?" in capsys.readouterr().err
    assert runs.metrics(tmp_path / "out") == []


def test_eval_on_start_measures_before_the_first_step_and_only_then(tmp_path, whole):
    plan = {"eval_dataset": "demo", "eval_split": "test[:5]", "eval_on_start": True, "eval_strategy": "no"}
    runs.made(tmp_path / "out", max_steps=2, save_steps=1, **plan)
    lines = runs.metrics(tmp_path / "out")
    assert [line["step"] for line in lines if "eval_loss" in line] == [0]
    runs.made(tmp_path / "out", max_steps=3, save_steps=1, **plan)
    assert [line["step"] for line in runs.metrics(tmp_path / "out")] == [0, 1, 2, 3]


def test_a_folder_in_use_is_refused(tmp_path, capsys):
    process = runs.start("-m", "shell.train", *runs.words(tmp_path / "out", max_steps=100_000))
    assert process.stderr is not None
    line = ""
    while not line.startswith("step 1/"):
        line = process.stderr.readline()
    code = runs.run(tmp_path / "out", max_steps=100_000)
    process.kill()
    runs.done(process)
    assert code == 2
    assert f"is in use by another run (process {process.pid})" in capsys.readouterr().err


def test_dropout_draws_the_same_after_a_stop_and_none_in_evaluation(tmp_path, monkeypatch):
    sizes = {"vocab_size": 320, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_pdrop=0.0))
    gpt.save_pretrained(tmp_path / "gpt")
    plan = {
        "model": tmp_path / "gpt", "tokenizer": "tiny", "packing": "none", "max_steps": 4, "save_steps": 1,
        "token_budget": 128, "eval_dataset": "demo", "eval_split": "test[:5]", "eval_steps": 2,
    }  # fmt: skip
    whole = runs.made(tmp_path / "whole", **plan)
    with monkeypatch.context() as patched:
        signalled(patched, signal.SIGTERM, 2)
        assert runs.run(tmp_path / "out", **plan) == 143
    runs.made(tmp_path / "out", **plan)
    runs.same(whole, tmp_path / "out", 4)
    still = runs.made(tmp_path / "still", **{**plan, "disable_dropout": True, "learning_rate": 0})
    drawn = runs.made(tmp_path / "drawn", **{**plan, "learning_rate": 0})
    assert runs.metrics(drawn)[-1]["eval_loss"] == runs.metrics(still)[-1]["eval_loss"]
    assert runs.metrics(drawn)[-1]["loss"] != runs.metrics(still)[-1]["loss"]


def test_a_checkpoint_holds_no_pickle(whole: pathlib.Path):
    names = {path.name for path in (whole / "checkpoint-6").iterdir()}
    assert names == {"manifest.json", "state.json", "tensors-00001.safetensors"}
    assert json.loads((whole / "checkpoint-6" / "state.json").read_text())["values"]["step"] == 6
