"""A caller's mistakes: one line that says where and what, status 2, and nothing that was there is lost."""

import json
import os
import shutil

import pytest
import transformers

from core import algorithms
from shell import api, evaluate, log, mistake
from tests import warm
from tests.shell import runs, words


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps."""
    return runs.made(tmp_path_factory.mktemp("run") / "out", max_steps=2, save_steps=1)


def refused(folder, capsys, *told, **options):
    """Assert that a run is refused in one line that holds some words."""
    assert runs.run(folder, **{"max_steps": 1, **options}) == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors == lines[-1:]
    assert all(word in errors[0] for word in told), errors


def test_a_mistake_in_an_option_is_told_before_torch_is_imported():
    program = (
        "import sys; from shell import train; code = train.main(sys.argv[1:]);"
        "print(code, [name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    for command in (["sft", "--learnign_rate", "1"], ["sft", *runs.SMALL], ["sft", "--learning_rate", "abc"]):
        code, out, err = runs.done(runs.start("-c", program, *command))
        assert (code, out) == (0, "2 []\n")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dataset": "missing.jsonl", "dataset_split": "train"}, ["missing.jsonl"]),
        ({"model": "/no/such/folder"}, ["/no/such/folder", "--model"]),
        ({"max_length": 4096}, ["max_length 4096", "2048"]),
        ({"dataset_split": "train[5:5]"}, ["no rows"]),
        ({"device": "neuron"}, ["neuron"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else "-".join(value),
)
def test_what_an_option_names_and_is_not_there_is_told(tmp_path, capsys, options, told):
    refused(tmp_path / "out", capsys, *told, **options)
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"text": "one"}\n{"text": \n', ["line 2", "JSON"]),
        ('{"words": "one"}\n', ["words"]),
        ('{"text": "one"}\n{"text": null}\n', ["row 1"]),
        ("", ["no rows"]),
    ],
    ids=["unreadable row", "missing column", "no text", "empty"],
)
def test_rows_that_cannot_be_trained_are_named(tmp_path, capsys, content, told):
    (tmp_path / "rows.jsonl").write_text(content)
    refused(tmp_path / "out", capsys, *told, dataset=tmp_path / "rows.jsonl", dataset_split="train")


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ("tokenizer.json tokenizer_config.json", ["tokenizer", "--tokenizer"]),
        ("config.json", ["config", "--model"]),
        ("model.safetensors", ["no weights", "safetensors"]),
        ("chat_template.jinja", ["chat template"]),
    ],
    ids=["tokenizer", "config", "weights", "template"],
)
def test_a_model_folder_that_lacks_something_is_told_before_it_is_loaded(
    run, tmp_path, capsys, monkeypatch, gone, told
):
    shutil.copytree(run / "model", tmp_path / "model")
    for name in gone.split():
        (tmp_path / "model" / name).unlink()
    monkeypatch.setattr("shell.choose.model", None)
    refused(tmp_path / "out", capsys, *told, model=tmp_path / "model")


def test_weights_that_a_config_asks_for_and_are_missing_are_not_drawn_at_random(run, tmp_path, capsys):
    shutil.copytree(run / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config.pop("layer_types", None)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    refused(tmp_path / "out", capsys, "lacks 9 of the weights", model=tmp_path / "model")


def test_a_tokenizer_with_more_ids_than_the_model_is_told(run, tmp_path, capsys):
    names = " ".join(f"w{number}" for number in range(400))
    words.word_tokenizer(names).save_pretrained(tmp_path / "words")
    rows = words.write(tmp_path / "rows.jsonl", [{"text": "w1 w399"}])
    told = ("id 402", "320", "--tokenizer")
    plan = {
        "model": run / "model",
        "tokenizer": tmp_path / "words",
        "dataset": rows,
        "dataset_split": "train",
    }
    refused(tmp_path / "out", capsys, *told, **plan)
    refused(tmp_path / "out", capsys, *told, streaming=True, **plan)


def test_a_model_that_is_no_decoder_is_told(tmp_path, capsys):
    transformers.T5Config().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    refused(tmp_path / "out", capsys, "t5", "no causal language model", model=tmp_path / "model")


@pytest.mark.parametrize(
    ("rates", "packing", "told"),
    [
        (
            {"attn_pdrop": 0.1, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
            "none",
            ["attn_pdrop 0.1", "--disable_dropout"],
        ),
        (
            {"attn_pdrop": 0.0, "resid_pdrop": 0.2, "embd_pdrop": 0.0},
            "tree",
            ["resid_pdrop 0.2", "--packing none"],
        ),
    ],
    ids=["attention", "tree"],
)
def test_dropout_that_cannot_be_drawn_is_told(tmp_path, capsys, rates, packing, told):
    sizes = {"vocab_size": 320, "n_positions": 128, "n_embd": 32, "n_layer": 1, "n_head": 2}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates)).save_pretrained(tmp_path / "gpt")
    refused(tmp_path / "out", capsys, *told, model=tmp_path / "gpt", tokenizer="tiny", packing=packing)


def test_a_model_too_large_for_the_memory_is_told(tmp_path, capsys, monkeypatch):
    import attrs

    from adapters import cpu, pick

    small = attrs.evolve(cpu.DEVICE, memory=lambda: 2**20)
    monkeypatch.setitem(pick.DEVICES, "cpu", small)
    refused(tmp_path / "out", capsys, "GiB", "--token_budget", device="cpu")


def test_an_output_folder_that_cannot_be_made_is_told(tmp_path, capsys):
    (tmp_path / "out").write_text("a file")
    refused(tmp_path / "out", capsys, "output_dir", "choose another")
    assert (tmp_path / "out").read_text() == "a file"


def test_a_run_without_an_output_folder_is_told(capsys):
    assert runs.train.main(["sft", *runs.SMALL]) == 2
    assert "--output_dir" in capsys.readouterr().err
    with pytest.raises(mistake.Mistake, match="output_dir"):
        api.train("sft", model="tiny", dataset="demo")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, ["ModuleNotFoundError"]),
        ("other = 1", ["AttributeError", "mine"]),
        ("mine = 1", ["int", "Algorithm was wanted"]),
        ("mine = 1 +", ["SyntaxError"]),
        ("1 / 0", ["ZeroDivisionError"]),
        ("from core import algorithms\nmine = algorithms.sft.evolve(rows='images')", ["rows is images"]),
        (
            "from core import algorithms\nmine = algorithms.sft.evolve(needs=('entropy',))",
            ["entropy", "entropies"],
        ),
    ],
    ids=["no module", "no name", "no algorithm", "no Python", "raises", "rows", "needs"],
)
def test_an_algorithm_that_cannot_be_had_is_told(tmp_path, monkeypatch, capsys, text, told):
    module = f"own_{abs(hash(text))}"
    if text is not None:
        (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert runs.train.main([f"{module}:mine", *runs.words(tmp_path / "out", max_steps=1)[1:]]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(word in last for word in told), last


def test_an_algorithm_given_in_python_is_looked_at_too(tmp_path):
    mine = algorithms.sft.evolve(columns=lambda rewards, groups: {})
    with pytest.raises(mistake.Mistake, match="columns is a function"):
        api.train(mine, model="tiny", dataset="demo", max_steps=1, output_dir=str(tmp_path / "out"))


LIMITED = """
import resource, sys
from shell import train
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(train.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("limit", "told"), [(5_000_000, "checkpoint 3"), (100, "could be written")])
def test_a_full_disk_is_told_and_earlier_checkpoints_are_whole(run, tmp_path, limit, told):
    folder = tmp_path / "out"
    shutil.copytree(run, folder)
    before = {name: runs.content(folder / name) for name in ("checkpoint-1", "checkpoint-2", "model")}
    command = runs.words(folder, max_steps=3, save_steps=1)
    code, _, err = warm.program("-c", LIMITED, str(limit), *command)
    assert code == 2, err
    assert told in err.splitlines()[-1]
    assert "Traceback" not in err
    assert {name: runs.content(folder / name) for name in before} == before
    runs.made(folder, max_steps=3, save_steps=1)
    assert [line["step"] for line in log.read(folder / "metrics.jsonl")] == [1, 2, 3]


def test_a_disk_that_is_full_when_the_model_is_written_loses_no_checkpoint(tmp_path, capsys, monkeypatch):
    from adapters import transformers_lm

    def full(self, params, folder):
        os.makedirs(folder, exist_ok=True)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(transformers_lm.TransformersLM, "save", full)
        refused(tmp_path / "out", capsys, "model cannot be written", "No space left", "make room")
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == [
        "checkpoint-1", "prepared",
    ]  # fmt: skip
    assert runs.run(tmp_path / "out", max_steps=1) == 0
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ([], "nothing came"),
        (["--model", "tiny"], "--dataset: nothing came"),
        (["tiny", "--dataset", "demo", "--streaming", "--max_steps", "1"], "streaming"),
        (["tiny", "--dataset", "missing.jsonl"], "missing.jsonl"),
    ],
    ids=["nothing", "no rows", "stream", "no dataset"],
)
def test_mistakes_in_an_evaluation_are_told(command, told, capsys):
    assert evaluate.main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err.splitlines()[-1]


def test_an_evaluation_can_take_the_weights_of_a_checkpoint(run, capsys):
    rows = ["--dataset", "demo", "--dataset_split", "test[:3]"]
    assert evaluate.main([str(run / "model"), *rows]) == 0
    wanted = json.loads(capsys.readouterr().out)
    assert evaluate.main(["tiny", *rows, "--init_from", str(run / "checkpoint-2")]) == 0
    assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-6)
