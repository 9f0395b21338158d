"""Model folders of other people that cannot be loaded: one line that names the model and what to do."""

import json
import shutil
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from shell import choose
from tests.shell import runs

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A small model folder."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refused(folder, capsys, *told, **options):
    """Assert that a run is refused in one line that names the folder and holds some words."""
    plan = {"model": folder, "tokenizer": "tiny", "max_steps": 1, **options}
    assert runs.run(folder.parent / "out", **plan) == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors == lines[-1:]
    assert all(word in errors[0] for word in (str(folder), *told)), errors


def change(folder, **values):
    """Write other values into a config."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def put(folder, name, tensor):
    """Write another tensor into the weights."""
    file = folder / "model.safetensors"
    safetensors.torch.save_file({**safetensors.torch.load_file(file), name: tensor}, file, {"format": "pt"})


def cut(folder):
    """Leave half of the weights."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_weights_that_were_cut_are_told_before_rows_are_read(folder, capsys, monkeypatch):
    monkeypatch.setattr("shell.choose.tokenizer", None)
    cut(folder)
    refused(folder, capsys, "model.safetensors", "cannot be read", "copy the folder again")


def test_weights_that_cannot_be_opened_are_told_with_the_reason(folder, capsys):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    refused(folder, capsys, "model.safetensors", "Is a directory")


def test_weights_of_another_shape_than_the_config_are_told_by_name(folder, capsys):
    put(folder, "model.norm.weight", torch.ones(3))
    refused(folder, capsys, "model.norm.weight is [3]", "[32] was wanted")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_told_by_name(folder, capsys, number):
    put(folder, "model.norm.weight", torch.full((32,), number))
    refused(folder, capsys, "not finite", "model.norm.weight")


def test_a_quantized_model_without_its_package_is_told(folder, capsys, monkeypatch):
    monkeypatch.setattr("transformers.quantizers.quantizer_gptq.is_optimum_available", lambda: False)
    change(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(folder, capsys, "cannot be loaded", "ImportError", "install")


def test_a_model_with_an_attention_of_its_own_is_told(tmp_path, capsys):
    config = transformers.FalconConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, alibi=True
    )
    transformers.FalconForCausalLM(config).save_pretrained(tmp_path / "model")
    refused(tmp_path / "model", capsys, "its attention is one of its own", packing="none")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"num_attention_heads": 0}, "model"),
        ({"vocab_size": -1}, "model"),
    ],
    ids=str,
)
def test_a_config_that_no_model_can_have_is_told(folder, capsys, values, told):
    change(folder, **values)
    refused(folder, capsys, told, "--model")


def test_an_init_from_whose_weights_are_broken_is_told(folder, capsys):
    other = folder.parent / "other"
    shutil.copytree(folder, other)
    cut(other)
    refused(other, capsys, "init_from", "cannot be read", init_from=other, model=folder)
    shutil.copytree(folder, other, dirs_exist_ok=True)
    put(other, "model.norm.weight", torch.ones(3))
    refused(other, capsys, "init_from", "model.norm.weight is [3]", init_from=other, model=folder)


def test_dropout_of_a_head_that_is_not_there_does_not_count():
    gpt = transformers.GPT2Config(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    assert gpt.summary_first_dropout > 0
    assert choose.dropouts(gpt) == {}
    assert choose.dropouts(transformers.GPTNeoXConfig(classifier_dropout=0.1)) == {}
    assert choose.dropouts(transformers.OPTConfig(dropout=0.1)) == {"dropout": 0.1}
    bert = transformers.BertConfig(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2)
    assert choose.dropouts(bert) == {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2}


@pytest.mark.parametrize(("text", "told"), [("{", "cannot be read"), ("[]", "holds no mapping")])
def test_a_broken_generation_config_is_told_before_rows_are_read(folder, capsys, monkeypatch, text, told):
    monkeypatch.setattr(choose, "model", None)
    (folder / "generation_config.json").write_text(text)
    refused(folder, capsys, "generation_config.json", told, "take it away")
