"""A forest over the budget, cut into pieces, gives what each sample alone gives, whatever the loss."""

import pytest
import torch

from adapters import loading
from core import pack
from tests.adapters import zoo


def coupled(scores):
    """Couple everything: a pair of samples, and the exponential of a mean."""
    half = len(scores.logprobs) // 2
    first, second = scores.logprobs[:half].sum(), scores.logprobs[half:].sum()
    return -torch.nn.functional.logsigmoid(0.3 * (first - second)) + scores.logprobs.mean().exp(), {}


def of_rows(kind, loss, **options):
    """Return loss and gradients of the rows, as one forest or in pieces of `budget` nodes."""
    chosen = {name: options.pop(name) for name in ("budget", "share") if name in options}
    model, params = loading.bind(zoo.build(kind), **options)
    return model, model.pull_back(params, zoo.packed(zoo.rows(stem=12), **chosen), 0, loss)


@pytest.mark.parametrize("kind", zoo.SERVED)
def test_pieces_equal_each_sample_alone_under_a_coupled_loss(kind):
    _, (want, _, want_grads) = of_rows(kind, coupled, share=False)
    _, (value, _, grads) = of_rows(kind, coupled, budget=16)
    assert abs(value - want) <= 1e-10 * abs(want)
    assert zoo.gap(grads, want_grads) <= 1e-10


def test_pieces_equal_each_sample_alone_under_a_token_loss():
    _, (want, _, want_grads) = of_rows("llama", zoo.nll, share=False)
    _, (value, _, grads) = of_rows("llama", zoo.nll, budget=16)
    assert abs(value - want) <= 1e-10 * abs(want)
    assert zoo.gap(grads, want_grads) <= 1e-10


@pytest.mark.parametrize("budget", [1, 2, 5, 16])
def test_the_size_of_the_pieces_changes_nothing(budget):
    _, (want, _, want_grads) = of_rows("mistral", coupled)
    _, (value, _, grads) = of_rows("mistral", coupled, budget=budget)
    assert abs(value - want) <= 1e-10 * abs(want)
    assert zoo.gap(grads, want_grads) <= 1e-10


def test_pieces_are_exact_under_the_dense_mask_and_with_layers_that_are_recomputed():
    _, (want, _, want_grads) = of_rows("gemma3_text", coupled)
    for options in ({"attention": "mask"}, {"gradient_checkpointing": True}):
        _, (value, _, grads) = of_rows("gemma3_text", coupled, budget=7, **options)
        assert abs(value - want) <= 1e-10 * abs(want)
        assert zoo.gap(grads, want_grads) <= 1e-10


def test_predicting_in_pieces_scores_every_row_as_the_whole_does():
    model, params = loading.bind(zoo.build("llama"))
    whole, cut = (zoo.packed(zoo.rows(), **options) for options in ({}, {"budget": 6}))
    assert len(cut.pieces) > 1
    gap = (model.predict(params, whole, 0).logprobs - model.predict(params, cut, 0).logprobs).abs().max()
    assert gap <= 1e-12


def test_a_pack_within_the_budget_is_one_piece():
    samples = zoo.rows()
    size = len(pack.build(samples, pack.count(samples)).tokens)
    assert len(pack.build(samples, pack.count(samples), budget=size).pieces) == 1
