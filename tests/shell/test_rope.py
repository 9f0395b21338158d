"""Scaled rotary positions: what a config becomes, what it computes, and what is refused."""

import json

import pytest
import torch
import transformers

from adapters import loading
from shell import asked, config, evaluate, merge, mistake, rope, sample, train
from tests.adapters import zoo
from tests.shell import runs

BASE = ("sft", "--model", "tiny", "--dataset", "demo")


def described(**changes):
    return transformers.LlamaConfig(max_position_embeddings=64, **changes)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_factor_makes_the_model_hold_that_many_more_positions(kind):
    before = described()
    found = rope.scaled(before, {"rope_type": kind, "factor": 4})
    assert found.max_position_embeddings == 256
    assert found.rope_parameters["rope_type"] == kind
    assert found.rope_parameters["rope_theta"] == before.rope_parameters["rope_theta"]
    assert before.max_position_embeddings == 64


def test_linear_scaling_turns_a_position_as_the_model_turned_its_quarter():
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    plain, wide = (
        rotary(c) for c in (described(), rope.scaled(described(), {"type": "linear", "factor": 4}))
    )
    hidden = torch.zeros(1, 1, 8)
    at = torch.arange(16)[None]
    for mine, theirs in zip(wide(hidden, 4 * at), plain(hidden, at), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_dynamic_scaling_holds_what_the_model_held():
    found = rope.scaled(described(), {"rope_type": "dynamic", "factor": 4.0})
    assert found.max_position_embeddings == 64


# As Phi-3's long models have it: one set of frequencies up to a length, and another for all beyond.
LONG = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32,
    },
    "max_position_embeddings": 128,
}
TURNING = {
    "a longrope model": (LONG, ()),
    "a dynamic one": (
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            "max_position_embeddings": 32,
        },
        (),
    ),
    "a dynamic scaling": (
        {"max_position_embeddings": 32},
        ("--rope_scaling", "{rope_type: dynamic, factor: 4}"),
    ),
}
SHORT = ("--tokenizer", "tiny", "--device", "cpu", "--max_length", "64")


@pytest.mark.parametrize("name", TURNING)
def test_a_length_beyond_which_positions_turn_by_the_longest_is_refused_before_the_model_loads(
    tmp_path, capsys, monkeypatch, name
):
    monkeypatch.setattr("shell.choose.model", None)
    changes, words = TURNING[name]
    zoo.build("llama", vocab_size=320, dtype=torch.float32, **changes).save_pretrained(tmp_path / "model")
    model, out = str(tmp_path / "model"), ("--output_dir", str(tmp_path / "out"), "--max_steps", "1")
    ways = {
        "train": lambda: train.main(["sft", "--model", model, "--dataset", "demo", *SHORT, *out, *words]),
        "evaluate": lambda: evaluate.main([model, "--dataset", "demo", *SHORT, *words]),
        "sample": lambda: sample.main([model, "--prompt", "Say hi.", *SHORT, *words]),
    }
    for way in ways:
        assert ways[way]() == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert len(errors) == 1
        assert f"max_length 64 came; model {model} holds 32 (beyond it positions turn" in errors[0]


def test_where_nobody_named_a_length_samples_are_cut_to_what_such_a_model_holds(tmp_path):
    zoo.build("llama", vocab_size=320, dtype=torch.float32, **LONG).save_pretrained(tmp_path / "model")
    folder = tmp_path / "out"
    words = ["sft", "--model", str(tmp_path / "model"), "--tokenizer", "tiny", "--dataset", "demo"]
    words += ["--dataset_split", "train[:4]", "--batch_size", "4", "--max_steps", "1"]
    assert train.main([*words, "--output_dir", str(folder)]) == 0
    facts = runs.facts(folder)
    assert facts["rows"]["train"]["cut_rows"] > 0
    assert any("max_length is 32" in note for note in facts["notes"])


def test_what_an_adapter_was_trained_under_is_how_it_is_merged_evaluated_and_sampled(tmp_path, capsys):
    scaling = {"rope_type": "linear", "factor": 8.0}
    first = runs.made(tmp_path / "first", max_steps=1)
    run = runs.made(
        tmp_path / "out", model=first / "model", max_steps=1, learning_rate="1e-2", use_peft=True,
        rope_scaling=scaling,
    )  # fmt: skip
    assert merge.main([str(run / "model"), str(tmp_path / "merged")]) == 0
    assert "has it by its run" in capsys.readouterr().err
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["rope_parameters"]["factor"] == 8.0
    rows = ("--dataset", "demo", "--dataset_split", "test[:2]", "--max_length", "64")
    wholly, adapted, told, plain = (
        evaluated(capsys, model, *rows, *more)
        for model, more in (
            (tmp_path / "merged", ()),
            (run / "model", ()),
            (run / "model", ("--rope_scaling", str(scaling))),
            (run / "model", ("--rope_scaling", "null")),
        )
    )
    assert adapted == told == pytest.approx(wholly, rel=1e-5)
    assert abs(plain - adapted) > 1e-4
    wanted = asked.read([str(run / "model"), "--prompt", "x"], str(tmp_path))
    assert wanted.command.options.rope_scaling == scaling


def evaluated(capsys, model, *words):
    capsys.readouterr()
    assert evaluate.main([str(model), *words]) == 0
    return json.loads(capsys.readouterr().out)["eval_loss"]


def test_a_scaling_that_is_there_already_changes_nothing():
    once = rope.scaled(described(), {"rope_type": "linear", "factor": 4.0})
    assert rope.scaled(once, {"type": "linear", "factor": 4}).to_dict() == once.to_dict()


def test_scaling_a_scaled_model_counts_from_what_it_was_trained_with():
    once = rope.scaled(described(), {"rope_type": "yarn", "factor": 2.0})
    again = rope.scaled(once, {"rope_type": "yarn", "factor": 8.0})
    assert again.max_position_embeddings == 512


def test_where_layers_differ_those_that_look_all_the_way_back_are_scaled():
    before = transformers.Gemma3TextConfig(max_position_embeddings=64)
    found = rope.scaled(before, {"rope_type": "linear", "factor": 2.0})
    assert found.rope_parameters["full_attention"]["rope_type"] == "linear"
    assert found.rope_parameters["sliding_attention"] == before.rope_parameters["sliding_attention"]


def test_a_model_without_rotary_positions_is_refused_by_name():
    with pytest.raises(mistake.Mistake, match="gpt2 model has no rotary positions"):
        rope.scaled(transformers.GPT2Config(), {"rope_type": "linear", "factor": 2.0})


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("{rope_type: yarm, factor: 2}", "rope_type 'yarm' came.*Did you mean yarn"),
        ("{factor: 2}", "rope_type None came"),
        ("{rope_type: yarn}", "factor None came"),
        ("{rope_type: yarn, factor: 0.5}", "factor 0.5 came"),
        ("{rope_type: yarn, factor: true}", "factor True came"),
        ("{rope_type: yarn, factor: 4, beta_fst: 64}", "beta_fst came.*Did you mean beta_fast"),
        ("{rope_type: linear, factor: 4, beta_fast: 64}", "beta_fast came, and linear takes factor"),
        ("{rope_type: yarn, factor: 2, original_max_position_embeddings: big}", "'big' came; a whole"),
        ("{rope_type: yarn, factor: 2, original_max_position_embeddings: -5}", "a whole number above 0"),
        ("{rope_type: yarn, factor: 2, beta_fast: high}", "beta_fast 'high' came; a number of at"),
        ("{rope_type: yarn, factor: 2, beta_slow: 64}", "beta_slow 64 and beta_fast 32 came"),
        ("{rope_type: yarn, factor: 2, truncate: 1}", "truncate 1 came; true or false"),
        ("{rope_type: llama3, factor: 2}", "llama3 takes low_freq_factor and high_freq_factor"),
    ],
)
def test_a_wrong_scaling_is_told_before_anything_is_loaded(value, told):
    with pytest.raises(mistake.Mistake, match=told):
        config.parse([*BASE, "--rope_scaling", value])


@pytest.mark.parametrize(
    "value",
    [
        "{type: linear, factor: 2, rope_theta: 10000.0}",
        "{rope_type: yarn, factor: 2, beta_fast: 32, beta_slow: 1, attention_factor: 1.1, truncate: false}",
        "{rope_type: yarn, factor: 2, mscale: 1.0, mscale_all_dim: 0, original_max_position_embeddings: 8}",
        "{rope_type: llama3, factor: 8, low_freq_factor: 1.0, high_freq_factor: 4.0}",
        "{rope_type: yarn, factor: 2, attention_factor: null}",
    ],
)
def test_what_a_type_takes_is_taken(value):
    numbers = config.parse([*BASE, "--rope_scaling", value]).options.rope_scaling
    text = rope.scaled(described(), numbers).rope_parameters
    assert {name: text[name] for name in numbers if name != "type"} == {
        name: number for name, number in numbers.items() if name != "type"
    }


def test_a_folder_is_loaded_with_the_scaled_positions_and_saves_them(tmp_path):
    zoo.build("llama").save_pretrained(tmp_path / "model")
    found = rope.scaled(
        transformers.AutoConfig.from_pretrained(tmp_path / "model"), {"rope_type": "yarn", "factor": 4.0}
    )
    model, params = loading.load(str(tmp_path / "model"), dtype=torch.float64, config=found)
    plain, _ = loading.load(str(tmp_path / "model"), dtype=torch.float64)
    each = zoo.packed(zoo.rows())
    assert not torch.equal(model.predict(params, each, 0).logprobs, plain.predict(params, each, 0).logprobs)
    model.save(params, str(tmp_path / "out"))
    saved = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert saved.rope_parameters["rope_type"] == "yarn"
    assert saved.max_position_embeddings == 256
