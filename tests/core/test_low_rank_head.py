"""An adapter beside the head is a head that holds its product, to the gradient, at the memory of the two."""

import pytest
import torch

from adapters import live
from core import divergence, head
from tests.core import test_distill, test_head


def adapter(edges=7, hidden=5, vocab=11, rank=2, scale=0.7):
    """Draw the inputs of a head and, beside it, A and B of an adapter, with what these are to both sides."""
    h, w, b, t = test_head.inputs(edges, hidden, vocab)
    draw = torch.Generator().manual_seed(4)
    shapes = ((rank, hidden), (vocab, rank))
    down, up = (torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes)
    return (h, w, b, down, up), t, (scale * h @ down.T, up), w + scale * up @ down


def assert_alike(got, want, leaves):
    """Compare values, and the gradients of their sum in which no two weigh alike."""
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    factors = torch.linspace(-1.0, 2.0, got.numel(), dtype=got.dtype).view_as(got)
    grads = (torch.autograd.grad((factors * values).sum(), leaves) for values in (got, want))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", test_head.SHAPES)
@pytest.mark.parametrize("asked", [*((field,) for field in head.FIELDS[:4]), head.FIELDS[:4]], ids="+".join)
@pytest.mark.parametrize("tile", [1, 3, 100])
def test_a_low_rank_pair_beside_the_head_is_a_head_that_holds_their_product(name, asked, tile):
    leaves, t, low_rank, merged = adapter()
    h, w, b, *_ = leaves
    more = {"bias": b, "shape": test_head.SHAPES[name], "needs": asked, "tile_bytes": tile * 11 * 8}
    got = head.score(h, w, t, low_rank=low_rank, **more)
    want = test_head.plain(h, merged, t, b, test_head.SHAPES[name])
    assert_alike(*(torch.stack([fields[n] for n in asked]) for fields in (got, want)), leaves)


@pytest.mark.parametrize("given", [1.0, 3.0])
def test_slopes_that_are_known_before_serve_a_low_rank_pair_too(given):
    leaves, t, low_rank, merged = adapter()
    h, w, b, *_ = leaves
    slopes = torch.linspace(-2.0, 1.0, len(t), dtype=torch.float64)
    found = head.score(h, w, t, bias=b, low_rank=low_rank, slopes=slopes, tile_bytes=3 * 11 * 8)
    values = [(given * slopes * f["logprobs"]).sum() for f in (found, test_head.plain(h, merged, t, b))]
    for x, y in zip(*(torch.autograd.grad(v, leaves) for v in values), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_of_a_head_and_the_pair_beside_it_only_what_asks_gets_a_gradient():
    (h, w, b, *_), t, (low, up), _ = adapter()
    tensors = [x.detach() for x in (h, w, b, low, up)]
    every = [x.clone().requires_grad_() for x in tensors]

    def value(h, w, b, low, up):
        return head.score(h, w, t, bias=b, low_rank=(low, up), needs=("entropies",))["entropies"].sum()

    wanted = torch.autograd.grad(value(*every), every)
    for place, (tensor, want) in enumerate(zip(tensors, wanted, strict=True)):
        leaf = tensor.clone().requires_grad_()
        found = value(*tensors[:place], leaf, *tensors[place + 1 :])
        (got,) = torch.autograd.grad(found, leaf)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("slopes", [None, 1.0])
def test_beside_a_frozen_weight_nothing_of_its_size_is_made(slopes):
    draw = torch.Generator().manual_seed(0)
    shapes = ((12, 64), (2048, 64), (12, 2), (2048, 2))
    h, w, low, up = (torch.randn(s, generator=draw) for s in shapes)
    known = None if slopes is None else torch.full((12,), slopes)
    targets = torch.arange(12)

    def step():
        leaves = [x.requires_grad_() for x in (h, low, up)]
        found = head.score(h, w, targets, low_rank=(low, up), slopes=known, tile_bytes=2048 * 4 * 4)
        return torch.autograd.grad(found["logprobs"].sum(), leaves)

    # Two tiles of four edges, the sum for B and what it becomes: all together are less than the weight.
    assert live.peak_bytes(step, (h, w, low, up)) < 0.3 * w.nbytes
    assert all(grad.norm() > 0 for grad in step())


def test_a_low_rank_pair_in_bfloat16_has_gradients_that_add_up_in_float32():
    (h, w, _, down, up), t, _, _ = adapter(edges=512, hidden=8, vocab=16)
    h, w, down, up = (x.detach().bfloat16().requires_grad_() for x in (h, w, down, up))
    found = head.score(h, w, t, low_rank=(h @ down.T, up), tile_bytes=16 * 4)["logprobs"]
    wide = [x.detach().double().requires_grad_() for x in (h, w, down, up)]
    want = test_head.plain(wide[0], wide[1] + wide[3] @ wide[2], t)["logprobs"]
    assert found.dtype == torch.float32
    grads = torch.autograd.grad(found.sum(), (h, w, down, up)), torch.autograd.grad(want.sum(), wide)
    for x, y in zip(*grads, strict=True):
        assert x.dtype == torch.bfloat16
        assert (x.double() - y).norm() / y.norm() < 5e-3


def adapters(h, w, th, tw):
    """Draw adapters beside a student's and a teacher's head: pairs, merged weights, and what is trained."""
    draw = torch.Generator().manual_seed(2)
    shapes = ((2, h.shape[1]), (len(w), 2), (3, th.shape[1]), (len(tw), 3))
    a, b, ta, tb = (torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes)
    pairs = {"low_rank": (0.5 * h @ a.T, b), "teacher_low_rank": (0.5 * th @ ta.T, tb)}
    return pairs, (w + 0.5 * b @ a, tw + 0.5 * tb @ ta), (a, b)


@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("beta", test_distill.BETAS)
def test_adapters_beside_both_heads_are_heads_that_hold_their_products(beta, rows):
    h, w, b, th, tw, tb = test_distill.heads(5)
    pairs, merged, low = adapters(h, w, th, tw)
    more = {
        "beta": beta, "temperature": 0.7, "bias": b, "teacher_bias": tb, "shape": head.Shape(softcap=4.0),
        "tile_bytes": rows * divergence.LIVE_TILES * len(w) * 8,
    }  # fmt: skip
    got = divergence.divergences(h, w, th, tw, **pairs, **more)
    want = divergence.divergences(h, merged[0], th, merged[1], **more)
    assert_alike(got, want, (h, w, b, *low))


def test_an_adapter_beside_the_head_moves_the_scores_of_tokens_and_which_are_likeliest():
    h, w, b, th, tw, _ = test_distill.heads(5)
    pairs, (merged, _), low = adapters(h, w, th, tw)
    more = {"bias": b, "shape": head.Shape(scale=0.6), "tile_bytes": 2 * divergence.LIVE_TILES * len(w) * 8}
    pair = {"low_rank": pairs["low_rank"]}
    tokens = divergence.likeliest(h, w, 3, **pair, **more)
    assert torch.equal(tokens, divergence.likeliest(h, merged, 3, **more))
    assert not torch.equal(tokens, divergence.likeliest(h, w, 3, **more))
    got = divergence.top_logprobs(h, w, tokens, **pair, **more)
    want = divergence.top_logprobs(h, merged, tokens, **more)
    assert_alike(got, want, (h, w, b, *low))


def test_beside_frozen_weights_a_divergence_makes_nothing_of_their_size():
    h, w, _, th, tw, _ = (x.detach() for x in test_distill.heads(12, vocab=2048, width=64, teacher_width=64))
    pairs, _, _ = adapters(h, w, th, tw)
    leaves = [x.detach().requires_grad_() for x in (h, *pairs["low_rank"])]
    pairs = {"low_rank": tuple(leaves[1:]), "teacher_low_rank": pairs["teacher_low_rank"]}
    tile = divergence.LIVE_TILES * 2048 * 8

    def whole():
        found = divergence.divergences(leaves[0], w, th, tw, **pairs, beta=0.5, tile_bytes=tile)
        torch.autograd.grad(found.sum(), leaves)

    def some():
        told = {"low_rank": pairs["low_rank"], "tile_bytes": tile}
        tokens = divergence.likeliest(leaves[0], w, 4, **told)
        found = divergence.top_logprobs(leaves[0], w, tokens, **told)
        torch.autograd.grad(found.sum(), leaves)

    held = (*leaves, w, th, tw, *pairs["teacher_low_rank"])
    # One edge a tile, about a dozen rows of the vocabulary in all, and the sum for B: two columns.
    assert all(live.peak_bytes(work, held) < 0.4 * w.nbytes for work in (whole, some))
