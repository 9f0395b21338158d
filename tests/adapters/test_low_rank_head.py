"""An adapter beside the output head: every way of running it reads the head that holds its product."""

import attrs
import numpy as np
import pytest
import torch

from adapters import loading, lora, sampling, static_cache
from core import pack, padded
from core.plan import sizes
from tests.adapters import drawing, test_lora, zoo

UNTIED = {"tie_word_embeddings": False}


@pytest.fixture(scope="module")
def both():
    """A model whose head has an adapter, and the model whose head holds it, each with its parameters."""
    model, params, _ = test_lora.adapted(targets=("lm_head",), changes=UNTIED)
    merged, _ = loading.bind(zoo.build("llama", **UNTIED))
    return (model, params), (merged, lora.merged(model, params)[0])


@pytest.mark.parametrize("static", [None, static_cache.Shapes(rows=8, length=40, chunk=4)])
def test_completions_are_drawn_from_what_the_adapter_says(both, static):
    rows = drawing.prompts(*drawing.LENGTHS)
    bare = (both[1][0], both[0][0].frozen)
    got, want, before = (
        drawing.generate((sampling.Sampler(model, static=static), params), rows, temperature=0.7)
        for model, params in (*both, bare)
    )
    got, want, before = ([c for group in found for c in group] for found in (got, want, before))
    ids = [[c.tokens.tolist() for c in found] for found in (got, want, before)]
    assert ids[0] == ids[1] != ids[2]
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-6)


def test_padding_is_nothing_to_the_adapter(both):
    (model, params), (merged, whole) = both
    samples = zoo.rows()
    each = padded.build(
        samples, pack.count(samples), planned=sizes.Sizes(nodes=(64,), edges=(64,)), budget=64,
        dtype=torch.float64,
    )  # fmt: skip
    value, _, grads = model.pull_back(params, each, 0, zoo.nll)
    want, _, by_weight = merged.pull_back(whole, zoo.packed(samples), 0, zoo.nll)
    assert abs(value - want) <= 1e-10 * want
    assert zoo.gap(grads, test_lora.chain_rule(model, params, by_weight)) <= 1e-10


def test_under_autocast_its_gradients_follow_float64_and_are_float32(both):
    (exact, wide), _ = both
    want, _, want_grads = exact.pull_back(wide, zoo.packed(zoo.rows()), 0, zoo.nll)
    model, params, _ = test_lora.adapted(targets=("lm_head",), changes={**UNTIED, "dtype": torch.float32})
    model = attrs.evolve(model, autocast=torch.bfloat16)
    value, _, grads = model.pull_back(params, zoo.packed(zoo.rows()), 0, zoo.nll)
    assert abs(value - want) <= 1e-2 * want
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        assert (grad - want_grads[name]).norm() <= 3e-2 * want_grads[name].norm()


@pytest.mark.parametrize(
    ("settings", "tied", "columns"),
    [
        ({"targets": ("q_proj",)}, True, 0),
        ({"targets": ("q_proj", "lm_head")}, True, 3),
        ({"targets": ("q_proj",), "whole": ("lm_head",)}, False, 16),
        ({"targets": ("q_proj",), "whole": ("embed_tokens",)}, True, 16),
        ({"targets": ("q_proj",), "whole": ("embed_tokens",)}, False, 0),
    ],
)
def test_what_trains_is_counted_and_how_much_of_the_head(settings, tied, columns):
    module = zoo.build("llama", tie_word_embeddings=tied)
    found = lora.trained(module, lora.Settings(rank=3, **settings))
    beside = 3 * (16 + zoo.VOCAB) if columns == 3 else 0
    whole = 16 * zoo.VOCAB if "whole" in settings else 0
    assert found == lora.Trained(num=2 * 3 * (16 + 32) + beside + whole, head_columns=columns)
