"""Estimators of the divergence from a reference, one number a sampled token.

With d = logp_ref - logp and the token drawn from the policy, all estimate KL(policy || reference) in value:
the mean of `k1`, of `k3` and, for policies that are close, of `k2`. Their gradients are another matter. Put
into a loss and differentiated, on policy:

* `k1`: 0. It trains nothing.
* `k2`: that of KL(policy || reference).
* `k3`: that of KL(reference || policy).
* `corrected` `k1` or `k3`: that of KL(policy || reference).
* `corrected` `k2`: that of neither, so it is refused.

Policy .5/.5, reference .9/.1, by the first logit: KL(policy || reference) and `k2` -.549306, `k3` -.4, `k1`
0, `corrected` `k1` and `k3` -.549306, and `k2` times the ratio -.829906.

Schulman 2020, http://joschu.net/blog/kl-approx.html; on gradients, Liu et al. 2025 (arXiv:2510.01555).

Axes: terms.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

# Where exp(d) is left for its tangent: e^20 d is finite in float32 for any log-probability.
TANGENT = 20.0


def k1(logprobs: Float[Tensor, " terms"], reference: Float[Tensor, " terms"]) -> Float[Tensor, " terms"]:
    """Return the log-ratio itself: unbiased in value, of mean gradient 0.

        k1 = -d = logp - logp_ref

    For rewards (`advantages.penalized`) and metrics; in a loss it trains nothing unless `corrected`.

    Args:
        logprobs: nats, under the policy.
        reference: nats, under the reference.
    """
    return logprobs - reference.detach()


def k2(logprobs: Float[Tensor, " terms"], reference: Float[Tensor, " terms"]) -> Float[Tensor, " terms"]:
    """Return half the squared log-ratio: on policy its mean gradient is that of KL(policy || reference).

        k2 = d^2 / 2

    Args:
        logprobs: nats, under the policy.
        reference: nats, under the reference.
    """
    return (reference.detach() - logprobs).square() / 2


def k3(logprobs: Float[Tensor, " terms"], reference: Float[Tensor, " terms"]) -> Float[Tensor, " terms"]:
    """Return the estimator that GRPO uses: unbiased in value, never negative, with another gradient.

        k3 = exp(d) - d - 1;  beyond d = 20, e^20 (d - 19) - d - 1

    On policy its mean gradient is that of KL(reference || policy). The tangent keeps value and gradient
    finite in float32 and still pushes the token up. Shao et al. 2024 (arXiv:2402.03300), eq. 4.

    >>> k3(torch.tensor([-1.0]), torch.tensor([-0.5]))
    tensor([0.1487])

    Args:
        logprobs: nats, under the policy.
        reference: nats, under the reference.
    """
    d = reference.detach() - logprobs
    held = d.clamp(max=TANGENT)
    # expm1 keeps the digits of a small d, where exp(d) - 1 has none left.
    return torch.expm1(held) + held.exp() * (d - held) - d


def corrected(
    logprobs: Float[Tensor, " terms"],
    reference: Float[Tensor, " terms"],
    ratio: Float[Tensor, " terms"],
    *,
    divergence: Callable[[Tensor, Tensor], Float[Tensor, " terms"]] = k3,
) -> Float[Tensor, " terms"]:
    """Multiply an estimator by the importance ratio, which makes value and gradient those of KL.

        r k,  the gradient through both

    Under tokens of the old policy, E[r k] is KL(policy || reference) for k1 and k3 as a function of the
    policy, so its gradient is KL's. DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv:2512.02556).

    Args:
        logprobs: nats, under the policy.
        reference: nats, under the reference.
        ratio: `ratios.token`, with its gradient.
        divergence: `k1` or `k3`.

    Raises:
        ValueError: `k2`, whose mean is not KL: the product has the gradient of neither.
    """
    if divergence is k2:
        raise ValueError(
            "divergence: k2 came; multiplied by the ratio its gradient is that of no divergence. "
            "Use k1 or k3, or k2 without the ratio."
        )
    return ratio * divergence(logprobs, reference)
