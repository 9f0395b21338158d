"""Scaled rotary positions: what a config becomes, what it computes, and what is refused."""

import pytest
import torch
import transformers

from adapters import loading
from shell import config, mistake, rope
from tests.adapters import zoo

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
    ],
)
def test_a_wrong_scaling_is_told_before_anything_is_loaded(value, told):
    with pytest.raises(mistake.Mistake, match=told):
        config.parse([*BASE, "--rope_scaling", value])


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
