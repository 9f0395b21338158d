"""Rows packed together are what they are alone: small cases whose right values were worked out by hand."""

import numpy as np
import pytest
import torch

from adapters import loading
from core import algorithms, pack, steps
from core.plan import sample
from tests.adapters import zoo

P, A, B, C = (3, 4, 5), (6, 7), (8, 9), (10, 11)


def row(*tokens, start=1, **known):
    """A sample that trains what follows its first `start` tokens."""
    numbers = np.array(tokens)
    return sample.Sample(tokens=numbers, trained=np.arange(len(numbers)) >= start, **known)


def scores(model, params, samples, **options):
    """Log-probabilities of each sample's rows."""
    each = zoo.packed(samples, **options)
    found = model.predict(params, each, None).logprobs
    return [found[each.batch.terms.sample == i] for i in range(len(samples))]


def pulled(model, params, samples, **options):
    """Loss (the sum over rows) and gradients."""
    value, _, grads = model.pull_back(params, zoo.packed(samples, **options), 0, zoo.nll)
    return value, grads


def test_seventeen_tokens_of_three_rows_run_as_nine_and_are_what_the_rows_are_apart():
    model, params = loading.bind(zoo.build("llama"))
    rows = [row(*P, *A), row(*P, *B), row(*P, *A, *C)]
    assert sum(len(r.tokens) for r in rows) == 17
    assert len(zoo.packed(rows).tokens) == 9
    apart = [scores(model, params, [r])[0] for r in rows]
    for got, want in zip(scores(model, params, rows), apart, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    value, grads = pulled(model, params, rows)
    want, want_grads = pulled(model, params, rows, share=False)
    torch.testing.assert_close(value, want, rtol=1e-12, atol=0.0)
    assert zoo.gap(grads, want_grads) <= 1e-12
    edited = scores(model, params, [row(*P, 12, 7), rows[1], row(*P, 12, 7, *C)])
    assert torch.equal(edited[1], scores(model, params, rows)[1])


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_an_id_in_one_packed_row_moves_no_bit_of_the_others(kind):
    model, params = loading.bind(zoo.build(kind))
    rows = [row(*range(3, 12)), row(*range(20, 27)), row(*range(30, 41)), row(*range(20, 27), start=3)]
    before = scores(model, params, rows, share=False)
    rows[1] = row(20, 50, *range(22, 27))
    after = scores(model, params, rows, share=False)
    assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [True, False, True, True]


def test_a_repeated_row_counts_twice():
    model, params = loading.bind(zoo.build("llama"))
    rows = [row(*P, *A, start=3), row(*P, *A, start=3), row(*P, *B, start=3)]
    (twice, once), (other,) = scores(model, params, rows)[:2], scores(model, params, rows[2:])
    assert torch.equal(twice, once)
    value, grads = pulled(model, params, rows)
    torch.testing.assert_close(value, -(2 * once.sum() + other.sum()), rtol=1e-12, atol=0.0)
    assert zoo.gap(grads, pulled(model, params, rows, share=False)[1]) <= 1e-12


def test_a_log_probability_from_the_generator_stays_with_its_token():
    model, params = loading.bind(zoo.build("llama"))
    rows = [row(*P, *A, *C), row(*P, *B), row(*C, *A, *B, start=2)]
    drawn = [scores(model, params, [r])[0] for r in rows]
    given = []
    for each, found in zip(rows, drawn, strict=True):
        column = np.full(len(each.tokens), 7.0)  # where nothing is trained it is never read
        column[each.trained] = found.numpy()
        columns = {"sampled_logprobs": column}
        given.append(sample.Sample(tokens=each.tokens, trained=each.trained, columns=columns))
    together = zoo.packed(given)
    ratio = (model.predict(params, together, None).logprobs - together.batch.sampled_logprobs).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text"])  # whole and sliding windows
@pytest.mark.parametrize("options", [{}, {"budget": 8}, {"share": False}])
def test_an_evaluation_is_the_same_packed_and_not(kind, options):
    model, params = loading.bind(zoo.build(kind, dtype=torch.float32))
    rows = zoo.rows(stem=12)
    counts = pack.count(rows)
    apart = [pack.build([r], counts) for r in rows]
    (want, _), (value, _) = (
        steps.evaluate(model, algorithms.sft, params, packs, carry=None)
        for packs in (apart, [pack.build(rows, counts, **options)])
    )
    torch.testing.assert_close(value, want, rtol=0.0, atol=1e-4)


def test_an_end_token_between_turns_ends_no_row():
    end = 2
    each = zoo.packed([row(1, 9, end, 14, 8, end)])
    assert each.tokens.tolist() == [1, 9, end, 14, 8, end]
    assert each.depths.tolist() == [0, 1, 2, 3, 4, 5]
    assert each.edge_tokens.tolist() == [9, end, 14, 8, end]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("mode", [False, True, "selective"])
@pytest.mark.parametrize("samples", [[], [row(*P, *A, start=5)]])
def test_a_part_of_a_step_in_which_nobody_trains_pulls_back_zeros(kind, mode, samples):
    model, params = loading.bind(zoo.build(kind), gradient_checkpointing=mode)
    value, grads = pulled(model, params, samples)
    assert value == 0.0
    assert all((grad == 0.0).all() and grad.shape == params[name].shape for name, grad in grads.items())
