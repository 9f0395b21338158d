"""Supervised losses: imitate the trained tokens.

Axes: terms (trained tokens).
"""

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from core import pack

Metrics = Mapping[str, Tensor]


def nll(scores: pack.Scores, batch: pack.Batch) -> tuple[Float[Tensor, " terms"], Metrics]:
    """Negative log-likelihood of each trained token.

        loss = -logprobs

    Args:
        scores: `logprobs` (nats); `entropies` (nats) and `top1` for the metrics.
        batch: no columns.

    Returns:
        One loss a trained token, in nats; `entropy` and `mean_token_accuracy`.
    """
    return -scores.logprobs, _watched(scores)


def dft(scores: pack.Scores, batch: pack.Batch) -> tuple[Float[Tensor, " terms"], Metrics]:
    """Weigh each token's negative log-likelihood by its own probability.

        loss = -detach(exp(logprobs)) logprobs

    Dynamic fine-tuning, Wu et al. 2025 (arXiv:2508.05629), eq. 9: rare tokens no longer dominate the
    gradient.

    Args:
        scores: `logprobs` (nats); `entropies` (nats) and `top1` for the metrics.
        batch: no columns.

    Returns:
        One loss a trained token, in nats; `entropy` and `mean_token_accuracy`.
    """
    return -scores.logprobs.detach().exp() * scores.logprobs, _watched(scores)


def _watched(scores: pack.Scores) -> Metrics:
    """Collect the metrics that were asked for."""
    fields = {"entropy": scores.entropies, "mean_token_accuracy": scores.top1}
    return {name: values for name, values in fields.items() if values is not None}
