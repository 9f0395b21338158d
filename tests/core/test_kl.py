import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from core import kl

POLICY, REFERENCE = torch.tensor([0.5, 0.5]).double(), torch.tensor([0.9, 0.1]).double()
EXACT = 0.510826


def gap(d, dtype=torch.float64):
    """Return (logprobs, reference) whose difference is d, the first one differentiable."""
    return torch.full((1,), -d, dtype=dtype).requires_grad_(), torch.zeros(1, dtype=dtype)


def mean_gradient(estimate):
    """Differentiate the mean of an estimator over both symbols, drawn from the policy, by the first logit."""
    logits = POLICY.log().requires_grad_()
    logprobs = logits.log_softmax(0)
    (POLICY * estimate(logprobs, REFERENCE.log())).sum().backward()
    return logits.grad[0].item()


def corrected(divergence):
    return lambda logprobs, reference: kl.corrected(
        logprobs, reference, (logprobs - logprobs.detach()).exp(), divergence=divergence
    )


def exact(logprobs, reference):
    # The policy's own probabilities are differentiated too: what an estimator stands for.
    return logprobs.exp() / POLICY * (logprobs - reference)


@pytest.mark.parametrize(
    ("estimate", "gradient", "told"),
    [
        (exact, -0.549306, "KL(policy || reference) and `k2` -.549306"),
        (kl.k1, 0.0, "`k1` 0"),
        (kl.k2, -0.549306, "`k2` -.549306"),
        (kl.k3, -0.4, "`k3` -.4"),
        (corrected(kl.k1), -0.549306, "`corrected` `k1` and `k3` -.549306"),
        (corrected(kl.k3), -0.549306, "`corrected` `k1` and `k3` -.549306"),
    ],
    ids=["exact", "k1", "k2", "k3", "corrected k1", "corrected k3"],
)
def test_the_documentation_says_whose_gradient_each_estimator_has(estimate, gradient, told):
    assert mean_gradient(estimate) == pytest.approx(gradient, abs=1e-6)
    assert told in " ".join(kl.__doc__.split())


def test_k3_has_the_gradient_of_the_divergence_the_other_way_round():
    logits = POLICY.log().requires_grad_()
    logprobs = logits.log_softmax(0)
    (REFERENCE * (REFERENCE.log() - logprobs)).sum().backward()
    assert logits.grad[0].item() == pytest.approx(mean_gradient(kl.k3), abs=1e-12)


def test_k2_times_the_ratio_is_refused_for_it_has_the_gradient_of_neither():
    product = mean_gradient(lambda p, q: (p - p.detach()).exp() * kl.k2(p, q))
    assert product == pytest.approx(-0.829906, abs=1e-6)
    with pytest.raises(ValueError, match="k2 came"):
        mean_gradient(corrected(kl.k2))


@pytest.mark.parametrize("estimate", [kl.k1, kl.k3])
def test_the_mean_is_the_divergence(estimate):
    mean = (POLICY * estimate(POLICY.log(), REFERENCE.log())).sum().item()
    assert mean == pytest.approx(EXACT, abs=1e-6)


@pytest.mark.parametrize(("estimate", "value"), [(kl.k1, -0.5), (kl.k2, 0.125), (kl.k3, 0.148721)])
def test_a_reference_that_is_half_a_nat_likelier(estimate, value):
    assert estimate(*gap(0.5)).item() == pytest.approx(value, abs=1e-6)


def test_far_from_the_reference_value_and_gradient_are_finite_and_push_the_token_up():
    logprobs, reference = gap(100.0, torch.float32)
    value = kl.k3(logprobs, reference)
    value.backward()
    assert value.isfinite()
    assert logprobs.grad.isfinite()
    assert logprobs.grad.item() < -1e8
    assert value.item() == pytest.approx(math.exp(20) * 81 - 101, rel=1e-6)


def test_the_tangent_continues_value_and_gradient():
    sides = []
    for d in (20 - 1e-9, 20 + 1e-9):
        logprobs, reference = gap(d)
        value = kl.k3(logprobs, reference)
        value.backward()
        sides.append((value.item(), logprobs.grad.item()))
    assert sides[0] == pytest.approx(sides[1], rel=1e-8)


@hypothesis.given(st.floats(-100, 100, width=32))
def test_k3_is_never_negative_even_in_float32(d):
    assert kl.k3(*gap(d, torch.float32)).item() >= 0


def test_a_small_difference_keeps_its_digits_in_float32():
    assert kl.k3(*gap(0.01, torch.float32)).item() == pytest.approx(0.5 * 0.01**2, rel=0.01)


@pytest.mark.parametrize("estimate", [kl.k1, kl.k2, kl.k3])
def test_no_gradient_flows_into_the_reference(estimate):
    logprobs, reference = gap(0.5)
    reference.requires_grad_()
    estimate(logprobs, reference).sum().backward()
    assert reference.grad is None
