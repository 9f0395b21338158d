"""A model that can never be served is told from its config, by what it is and what was wanted."""

import pytest
import transformers

from adapters import kinds
from tests.adapters import zoo

TOLD = {
    "bert": "it is an encoder, with a head to fill gaps; a decoder",
    "bart": "it is an encoder with a decoder; a decoder",
    "t5": "it is an encoder with a decoder",
    "mamba": "it is recurrent, and carries a state from token to token",
    "rwkv": "it is recurrent",
    "mpt": "its attention is one of its own",
    "xlnet": "its attention is one of its own",
}


@pytest.mark.parametrize("kind", sorted(TOLD))
def test_what_can_never_be_served_is_told_by_what_it_is(kind):
    for scalar in (False, True):
        with pytest.raises(ValueError, match=f"a {kind} model cannot be trained on trees: {TOLD[kind]}"):
            kinds.check(transformers.AutoConfig.for_model(kind), scalar=scalar)


def test_what_is_served_passes():
    for kind in ("llama", "gpt2", "biogpt", "gpt_oss"):
        kinds.check(zoo.config(kind))


def test_a_scalar_head_is_refused_where_transformers_has_no_classifier():
    with pytest.raises(ValueError, match=r"a cohere model .* no classifier of its kind"):
        kinds.check(zoo.config("cohere"), scalar=True)
    kinds.check(zoo.config("llama"), scalar=True)


def test_code_that_comes_with_a_model_may_serve_what_bears_a_known_name():
    described = transformers.AutoConfig.for_model("bert")
    described.auto_map = {"AutoModelForCausalLM": "modeling.Mine"}
    kinds.check(described, scalar=True)
