"""The head in tiles is log_softmax over all logits, for every field, in value and gradient."""

import subprocess
import sys

import pytest
import torch

from core import head
from tests import paths

ALL = head.FIELDS[1:]
SHAPES = {
    "plain": head.Shape(),
    "scale": head.Shape(scale=0.3),
    "softcap": head.Shape(softcap=2.0),
    "temperature": head.Shape(temperature=0.5),
    "all": head.Shape(scale=1.7, softcap=3.0, temperature=1.3),
}


def plain(hidden, weight, targets, bias=None, shape=head.Shape()):  # noqa: B008
    """Every field from the whole matrix of logits."""
    z = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    z = z * shape.scale
    if shape.softcap:
        z = shape.softcap * torch.tanh(z / shape.softcap)
    z = z / shape.temperature
    log_p = z.log_softmax(-1)
    return {
        "logprobs": log_p[torch.arange(len(targets)), targets],
        "entropies": -(log_p.exp() * log_p).sum(-1),
        "log_sum_squares": log_p.exp().square().sum(-1).log(),
        "mean_logits": z.mean(-1),
        "top1": (z.argmax(-1) == targets).double(),
    }


def inputs(edges=7, hidden=5, vocab=11, seed=0):
    """Draw hidden states, a head with a bias, and targets, in float64."""
    draw = torch.Generator().manual_seed(seed)
    shapes = ((edges, hidden), (vocab, hidden), (vocab,))
    h, w, b = (torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes)
    return h, w, b, torch.randint(0, vocab, (edges,), generator=draw)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 7, 100])
def test_every_field_and_gradient_equals_log_softmax_whatever_the_tiles(name, with_bias, rows):
    h, w, b, t = inputs()
    leaves = (h, w, b) if with_bias else (h, w)
    bias = b if with_bias else None
    got = head.score(h, w, t, bias=bias, shape=SHAPES[name], needs=ALL, tile_bytes=rows * 11 * 8)
    want = plain(h, w, t, bias, SHAPES[name])
    for field in head.FIELDS:
        torch.testing.assert_close(got[field], want[field], rtol=1e-12, atol=1e-12)
    coefficients = torch.randn(4, len(t), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = [
        sum((c * f[n]).sum() for c, n in zip(coefficients, head.FIELDS[:4], strict=True)) for f in (got, want)
    ]
    found, wanted = (torch.autograd.grad(v, leaves) for v in values)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("field", head.FIELDS[:4])
def test_each_field_alone_passes_gradcheck_with_scale_cap_temperature_and_bias(field):
    h, w, b, t = inputs(edges=3, hidden=2, vocab=4)

    def one(h, w, b):
        return head.score(h, w, t, bias=b, shape=SHAPES["all"], needs=(field,), tile_bytes=2 * 4 * 8)[field]

    assert torch.autograd.gradcheck(one, (h, w, b))


def test_what_is_not_asked_for_is_not_there():
    h, w, _, t = inputs()
    assert list(head.score(h, w, t)) == ["logprobs"]
    assert list(head.score(h, w, t, needs=("top1", "entropies"))) == ["logprobs", "entropies", "top1"]


def test_top1_carries_no_gradient_and_the_others_do():
    h, w, _, t = inputs()
    fields = head.score(h, w, t, needs=ALL)
    assert {n for n, v in fields.items() if v.requires_grad} == set(head.FIELDS) - {"top1"}


def test_no_edges_give_empty_fields_and_zero_gradients():
    h, w, b, _ = inputs(edges=0)
    fields = head.score(h, w, torch.zeros(0, dtype=torch.int64), bias=b, needs=ALL)
    assert all(v.shape == (0,) for v in fields.values())
    grads = torch.autograd.grad(sum(fields[n].sum() for n in head.FIELDS[:4]), (h, w, b))
    assert all((g == 0).all() for g in grads)


def test_only_the_leaves_that_ask_for_a_gradient_get_one():
    h, w, b, t = inputs()
    for leaf in (h, w, b):
        others = [x if x is leaf else x.detach() for x in (h, w, b)]
        value = head.score(others[0], others[1], t, bias=others[2], needs=ALL)["logprobs"].sum()
        (got,) = torch.autograd.grad(value, leaf)
        (want,) = torch.autograd.grad(plain(h, w, t, b)["logprobs"].sum(), leaf)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def given_logits(logits, target, dtype, **shape):
    """Score one edge whose logits are these: the head is the identity."""
    hidden = torch.tensor([logits], dtype=dtype, requires_grad=True)
    weight = torch.eye(len(logits), dtype=dtype)
    return hidden, head.score(hidden, weight, torch.tensor([target]), shape=head.Shape(**shape))["logprobs"]


def test_a_soft_cap_is_part_of_the_distribution():
    _, capped = given_logits([60.0, 40.0, 0.0], 1, torch.float64, softcap=30.0)
    _, free = given_logits([60.0, 40.0, 0.0], 1, torch.float64)
    assert -capped.item() == pytest.approx(2.876932, abs=5e-7)
    assert -free.item() == pytest.approx(20.0, abs=1e-6)


def test_log_probabilities_are_those_of_the_tempered_distribution():
    _, logprob = given_logits([2.0, 0.0], 0, torch.float64, temperature=0.5)
    assert logprob.item() == pytest.approx(-0.018150, abs=5e-7)


def test_a_loss_over_bfloat16_logits_is_not_rounded_to_bfloat16():
    # 40 - 3.875 is on bfloat16's grid of the logits, its log-sum-exp is not.
    _, logprob = given_logits([40.0, 3.875, 35.28125], 1, torch.bfloat16)
    logits = torch.tensor([40.0, 3.875, 35.28125]).bfloat16().double()
    true = (logits.logsumexp(0) - logits[1]).item()
    assert true == pytest.approx(36.13, abs=0.01)
    assert -logprob.item() == pytest.approx(true, abs=1e-4)
    assert -logprob.item() % 0.25 > 0.05


def test_the_gradient_of_a_confident_token_survives_bfloat16():
    logits = [6.90625, 0.0]
    hidden, logprob = given_logits(logits, 0, torch.bfloat16)
    (got,) = torch.autograd.grad(logprob.sum(), hidden)
    wide, true = given_logits(logits, 0, torch.float64)
    (want,) = torch.autograd.grad(true.sum(), wide)
    assert true.exp().item() == pytest.approx(0.999, abs=1e-4)
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=0.0)


def test_gradients_of_a_bfloat16_head_add_up_over_tiles_in_float32():
    draw = torch.Generator().manual_seed(3)
    h = torch.randn(64, 8, generator=draw).bfloat16().requires_grad_()
    w = torch.randn(16, 8, generator=draw).bfloat16().requires_grad_()
    t = torch.randint(0, 16, (64,), generator=draw)
    wide = [x.detach().double().requires_grad_() for x in (h, w)]
    fields = head.score(h, w, t, tile_bytes=16 * 4)
    assert fields["logprobs"].dtype == torch.float32
    got = torch.autograd.grad(fields["logprobs"].sum(), (h, w))
    want = torch.autograd.grad(plain(*wide, t)["logprobs"].sum(), wide)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == torch.bfloat16
        assert (x.double() - y).norm() / y.norm() < 1e-2


PEAK = """
import resource, torch
from core import head
torch.set_num_threads(1)
needs = {needs!r}
def run(edges):
    hidden = torch.zeros(edges, 32, requires_grad=True)
    weight = torch.zeros(49_152, 32, requires_grad=True)
    fields = head.score(hidden, weight, torch.zeros(edges, dtype=torch.int64), needs=needs)
    torch.autograd.grad(fields["logprobs"].sum(), (hidden, weight))
run(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(1_500)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_scoring_holds_about_two_tiles_however_many_they_are():
    # 1,500 edges are five tiles; so 8,192 edges need less than a tenth of their 1.6 GB of logits.
    script = PEAK.format(needs=("entropies", "top1"))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=paths.ROOT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 2.4 * head.TILE_BYTES < 0.1 * 8_192 * 49_152 * 4


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("given", ["as foretold", "another", "another field too"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slopes_that_are_known_before_change_no_gradient_and_another_one_is_served_too(name, given, dtype):
    h, w, b, t = inputs()
    slopes = torch.linspace(-2.0, 1.0, len(t), dtype=dtype)
    came = slopes.double() * (3.0 if given == "another" else 1.0)
    found = head.score(
        h, w, t, bias=b, shape=SHAPES[name], needs=("entropies",), slopes=slopes, tile_bytes=3 * 11 * 8
    )
    want = plain(h, w, t, b, SHAPES[name])
    values = [
        (came * f["logprobs"]).sum() + (f["entropies"].sum() if given == "another field too" else 0.0)
        for f in (found, want)
    ]
    grads = [torch.autograd.grad(value, (h, w, b), retain_graph=True) for value in values]
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)
    again = torch.autograd.grad(values[0], (h, w, b))
    for got, wanted in zip(again, grads[1], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)
