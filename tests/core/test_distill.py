"""Divergences from a teacher: right values, exact ends, never negative, in tiles as over all logits."""

import decimal
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core import algorithms, divergence, head, pack, reference, steps
from core.losses import distill
from tests import paths
from tests.core import pair_rows
from tests.properties import slow

BETAS = (0.0, 0.3, 0.5, 0.9, 1.0)


def of_probabilities(student, teacher, beta, dtype=torch.float64):
    """Measure the divergence of two distributions given as lists, through heads that say just them."""
    one = torch.ones(1, 1, dtype=dtype)
    p, t = (torch.tensor(x, dtype=dtype).log()[:, None] for x in (student, teacher))
    return divergence.divergences(one, p, one, t, beta=beta).item()


def by_definition(p, t, beta):
    """Sum the definition over a row of logits of either model, in float64."""
    p, t = p.double().softmax(-1), t.double().softmax(-1)
    if beta in (0.0, 1.0):
        a, b = (t, p) if beta == 0.0 else (p, t)
        return (a * (a.log() - b.log())).sum(-1)
    m = (1 - beta) * p + beta * t
    return (beta * t * (t.log() - m.log()) + (1 - beta) * p * (p.log() - m.log())).sum(-1)


def heads(edges, vocab=7, width=3, teacher_width=5, seed=0):
    """Draw hidden states, weights and biases of a student and a teacher."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (
        (edges, width),
        (vocab, width),
        (vocab,),
        (edges, teacher_width),
        (vocab, teacher_width),
        (vocab,),
    )
    return [torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize(("beta", "value"), [(0.0, 0.368064), (0.5, 0.101749), (1.0, 0.510826)])
def test_the_ends_are_the_two_kl_divergences_and_the_middle_is_jensen_shannon(beta, value):
    assert of_probabilities([0.5, 0.5], [0.9, 0.1], beta) == pytest.approx(value, abs=5e-7)


def test_near_an_end_the_divergence_shrinks_and_the_beta_is_cautioned_against():
    near = of_probabilities([0.5, 0.5], [0.9, 0.1], 0.001)
    assert near == pytest.approx(0.00037, abs=5e-6)
    for beta in (0.001, 0.0099, 0.9901, 0.999):
        assert "shrinks" in distill.fading(beta)
    for beta in (0.0, 0.01, 0.5, 0.99, 1.0):
        assert distill.fading(beta) == ""


def test_a_beta_outside_of_its_range_is_refused():
    for beta in (-0.1, 1.1):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            of_probabilities([0.5, 0.5], [0.9, 0.1], beta)
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            divergence.kept(torch.zeros(1, 1), torch.zeros(1, 1), beta=beta)


def test_models_of_different_vocabularies_are_refused_by_their_sizes():
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="7 tokens and the teacher 8"):
        divergence.divergences(one, torch.ones(7, 1), one, torch.ones(8, 1))


@given(st.integers(0, 5), st.integers(1, 9), st.sampled_from(BETAS), st.booleans(), st.integers(0, 999))
def test_tiles_give_the_divergence_over_all_logits_and_its_gradient(edges, rows, beta, with_bias, seed):
    h, w, b, th, tw, tb = heads(edges, seed=seed)
    shape, teacher_shape = head.Shape(scale=1.3, softcap=4.0), head.Shape(scale=0.8)
    got = divergence.divergences(
        h,
        w,
        th,
        tw,
        beta=beta,
        temperature=0.7,
        bias=b if with_bias else None,
        teacher_bias=tb if with_bias else None,
        shape=shape,
        teacher_shape=teacher_shape,
        tile_bytes=rows * divergence.LIVE_TILES * len(w) * 8,
    )
    z = 4.0 * torch.tanh(1.3 * (h @ w.T + (b if with_bias else 0.0)) / 4.0) / 0.7
    t = 0.8 * (th @ tw.T + (tb if with_bias else 0.0)) / 0.7
    want = by_definition(z, t.detach(), beta)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    leaves = (h, w, b) if with_bias else (h, w)
    factors = torch.linspace(0.5, 2.0, edges, dtype=torch.float64)
    found, wanted = (
        torch.autograd.grad((factors * x).sum(), leaves, allow_unused=True, materialize_grads=True)
        for x in (got, want)
    )
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("beta", BETAS)
def test_the_divergence_passes_gradcheck(beta):
    h, w, b, th, tw, tb = heads(3, vocab=4, width=2)

    def one(h, w, b):
        return divergence.divergences(
            h, w, th, tw, beta=beta, bias=b, teacher_bias=tb, shape=head.Shape(softcap=3.0), tile_bytes=1
        )

    assert torch.autograd.gradcheck(one, (h, w, b))


def test_no_gradient_reaches_the_teacher():
    h, w, _, th, tw, _ = heads(4)
    divergence.divergences(h, w, th, tw, beta=0.5).sum().backward()
    assert h.grad is not None
    assert w.grad is not None
    assert th.grad is None
    assert tw.grad is None


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.05, 1.0])
def test_a_bfloat16_teacher_and_a_float32_student_give_no_negative_and_no_wrong_divergence(beta, noise):
    vocab = 50_000
    draw = torch.Generator().manual_seed(1)
    student = torch.randn(vocab, generator=draw) * 4.0
    teacher = (student + noise * torch.randn(vocab, generator=draw)).bfloat16()
    one = torch.ones(1, 1)
    got = divergence.divergences(one, student[:, None], one.bfloat16(), teacher[:, None], beta=beta).item()
    want = by_definition(student, teacher, beta).item()
    assert want > 0.0
    assert got >= 0.0
    assert got == pytest.approx(want, rel=0.01)


@given(st.integers(0, 10_000), st.sampled_from(BETAS), st.sampled_from([0.0, 1e-6, 1e-4, 1e-2, 1.0, 30.0]))
def test_the_divergence_is_never_negative(seed, beta, noise):
    draw = torch.Generator().manual_seed(seed)
    student = torch.randn(50, generator=draw) * 5.0
    teacher = student + noise * torch.randn(50, generator=draw)
    one = torch.ones(1, 1)
    got = divergence.divergences(one, student[:, None], one, teacher[:, None], beta=beta).item()
    assert got >= 0.0
    assert math.isfinite(got)


@pytest.mark.parametrize("beta", BETAS)
def test_a_model_has_no_divergence_from_itself_and_no_gradient(beta):
    h, w, *_ = heads(5)
    got = divergence.divergences(h, w, h.detach(), w.detach(), beta=beta)
    assert (got == 0.0).all()
    for grad in torch.autograd.grad(got.sum(), (h, w)):
        assert grad.abs().max().item() < 1e-14


@pytest.mark.parametrize("beta", BETAS)
def test_tokens_that_one_model_rules_out_leave_the_divergence_finite(beta):
    one = torch.ones(1, 1)
    student = torch.tensor([0.0, 200.0, -torch.inf, -torch.inf])[:, None].requires_grad_()
    teacher = torch.tensor([200.0, 0.0, -torch.inf, 1.0])[:, None]
    got = divergence.divergences(one, student, one, teacher, beta=beta)
    (grad,) = torch.autograd.grad(got.sum(), student)
    assert got.isfinite().all()
    assert grad.isfinite().all()


@given(st.integers(0, 999), st.sampled_from(BETAS), st.integers(1, 6))
def test_known_tokens_and_the_rest_are_the_divergence_of_the_coarser_distributions(seed, beta, num_kept):
    draw = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(4, 7, generator=draw, dtype=torch.float64) * 2.0 for _ in range(2))
    student.requires_grad_()
    tokens = teacher.topk(num_kept).indices
    p, t = (x.log_softmax(-1).gather(-1, tokens) for x in (student, teacher))

    def coarse(x):
        probabilities = x.softmax(-1).gather(-1, tokens)
        return torch.cat([probabilities, 1.0 - probabilities.sum(-1, keepdim=True)], -1).log()

    got, want = divergence.kept(p, t, beta=beta), by_definition(coarse(student), coarse(teacher), beta)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    (found,) = torch.autograd.grad(got.sum(), student, retain_graph=True)
    (wanted,) = torch.autograd.grad(want.sum(), student)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    whole = by_definition(student, teacher, beta)
    assert (got <= whole + 1e-12).all()
    if num_kept == 6:
        torch.testing.assert_close(got, whole, rtol=1e-9, atol=1e-11)


def test_places_that_a_server_left_empty_count_for_nothing():
    student = torch.tensor([[0.5, 0.2, 0.1]]).log().requires_grad_()
    full = torch.tensor([[0.6, 0.3, 0.05]]).log()
    short = full.clone()
    short[0, 2] = -torch.inf
    got = divergence.kept(student, short, beta=0.5)
    want = divergence.kept(student[:, :2], full[:, :2], beta=0.5)
    torch.testing.assert_close(got, want)
    (grad,) = torch.autograd.grad(got.sum(), student)
    assert grad[0, 2] == 0.0
    assert grad.isfinite().all()


def test_known_tokens_that_hold_all_probability_leave_a_finite_rest():
    student = torch.tensor([[0.0, -200.0]]).requires_grad_()
    got = divergence.kept(student, torch.tensor([[-200.0, 0.0]]), beta=1.0)
    (grad,) = torch.autograd.grad(got.sum(), student)
    assert got.isfinite().all()
    assert grad.isfinite().all()


@given(st.integers(0, 5), st.integers(1, 9), st.booleans(), st.integers(0, 999))
def test_several_tokens_are_scored_as_log_softmax_scores_them(edges, rows, with_bias, seed):
    h, w, b, *_ = heads(edges, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.rand(edges, len(w), generator=draw).argsort(-1)[:, :3]
    bias = b if with_bias else None
    got = divergence.top_logprobs(
        h,
        w,
        tokens,
        bias=bias,
        shape=head.Shape(softcap=4.0, temperature=0.7),
        tile_bytes=rows * divergence.LIVE_TILES * len(w) * 8,
    )
    z = 4.0 * torch.tanh((h @ w.T + (b if with_bias else 0.0)) / 4.0) / 0.7
    want = z.log_softmax(-1).gather(-1, tokens)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    leaves = (h, w, b) if with_bias else (h, w)
    factors = torch.randn(edges, 3, generator=draw, dtype=torch.float64)
    found, wanted = (torch.autograd.grad((factors * x).sum(), leaves) for x in (got, want))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_gradients_of_a_bfloat16_student_add_up_over_tiles_in_float32():
    draw = torch.Generator().manual_seed(3)
    h, w, th, tw = (torch.randn(s, generator=draw).bfloat16() for s in ((64, 8), (16, 8), (64, 8), (16, 8)))
    h.requires_grad_()
    w.requires_grad_()
    got = divergence.divergences(h, w, th, tw, beta=0.5, tile_bytes=1)
    assert got.dtype == torch.float32
    found = torch.autograd.grad(got.sum(), (h, w))
    wide = [x.detach().double().requires_grad_() for x in (h, w)]
    wanted = torch.autograd.grad(
        by_definition(wide[0] @ wide[1].T, th.double() @ tw.double().T, 0.5).sum(), wide
    )
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == torch.bfloat16
        assert (x.double() - y).norm() / y.norm() < 2e-2


@given(pair_rows.seeds, st.sampled_from(BETAS))
def test_the_loss_of_a_step_is_the_mean_over_its_tokens_of_the_slow_loop(seed, beta):
    samples = pair_rows.drawn(seed)

    def loop(params):
        found = []
        for one in samples:
            teacher = reference.params(seed=reference.TEACHER)
            logits, told = (slow.chain(x, one.tokens) for x in (params, teacher))
            found += [by_definition(logits[j - 1], told[j - 1], beta) for j in pair_rows.places(one)]
        return pair_rows.total(found) / len(found)

    pair_rows.assert_step_equals(algorithms.distill, samples, loop, beta=beta)


def test_a_step_without_a_teacher_says_what_is_missing():
    samples = pair_rows.drawn(0)
    packed = pack.build(samples, pack.count(samples), dtype=torch.float64)
    with pytest.raises(ValueError, match="add 'divergences'"):
        steps.loss_and_grad(reference.Reference(), algorithms.distill, reference.params(), [packed], 0)


PEAK = """
import resource, torch
from core import divergence
torch.set_num_threads(1)
def run(edges):
    hidden, teacher = torch.zeros(edges, 8, requires_grad=True), torch.zeros(edges, 8)
    weight, other = torch.zeros(49_152, 8, requires_grad=True), torch.zeros(49_152, 8)
    found = divergence.divergences(hidden, weight, teacher, other, beta=0.5, tile_bytes=1 << 23)
    torch.autograd.grad(found.sum(), (hidden, weight))
run(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(256)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_a_divergence_holds_less_than_half_of_one_models_logits():
    done = subprocess.run(
        [sys.executable, "-c", PEAK], cwd=paths.ROOT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 0.5 * 256 * 49_152 * 4


def exactly(student, teacher, beta):
    """Return the divergence of two rows of logits to fifty digits."""
    with decimal.localcontext() as context:
        context.prec = 50
        rows = [[decimal.Decimal(x).exp() for x in row.tolist()] for row in (student, teacher)]
        p, t = ([x / sum(row) for x in row] for row in rows)
        share = decimal.Decimal(beta)
        if beta in (0.0, 1.0):
            a, b = (t, p) if beta == 0.0 else (p, t)
            return float(sum(x * (x / y).ln() for x, y in zip(a, b, strict=True)))
        m = [(1 - share) * x + share * y for x, y in zip(p, t, strict=True)]
        return float(
            sum(
                share * y * (y / z).ln() + (1 - share) * x * (x / z).ln()
                for x, y, z in zip(p, t, m, strict=True)
            )
        )


@pytest.mark.parametrize(
    ("dtype", "noise", "error"), [(torch.float32, 1e-2, 1e-4), (torch.float64, 1e-5, 1e-9)]
)
@pytest.mark.parametrize("beta", BETAS)
def test_a_divergence_of_models_that_are_close_keeps_its_digits(beta, dtype, noise, error):
    draw = torch.Generator().manual_seed(6)
    student = torch.randn(5, generator=draw, dtype=dtype)
    teacher = student + noise * torch.randn(5, generator=draw, dtype=dtype)
    one = torch.ones(1, 1, dtype=dtype)
    got = divergence.divergences(one, student[:, None], one, teacher[:, None], beta=beta).item()
    assert got == pytest.approx(exactly(student, teacher, beta), rel=error)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("lowest", [-2e4, -1e7, -1e30, -torch.inf])
def test_a_known_token_that_the_student_rules_out_is_measured_and_pulled_as_at_the_floor(beta, lowest):
    teacher = torch.tensor([[-0.1, -3.0]])

    def at(lowest):
        student = torch.tensor([[-0.1, lowest]], requires_grad=True)
        value = divergence.kept(student, teacher, beta=beta)
        return value.detach(), torch.autograd.grad(value.sum(), student)[0]

    (value, grad), (want, want_grad) = at(lowest), at(divergence.FLOOR)
    assert torch.equal(value, want)
    assert value.isfinite().all()
    assert want_grad[0, 1].item() == pytest.approx(-teacher[0, 1].exp().item() if beta == 0.0 else 0.0)
    if lowest == -torch.inf:
        want_grad[0, 1] = 0.0
    assert torch.equal(grad, want_grad)
