"""What preference losses are made of: log-ratios of samples, sides of pairs, f-divergences, what is watched.

Axes: terms (trained tokens), samples, pairs.
"""

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from core import metrics, pack, segments

Metrics: TypeAlias = Mapping[str, Tensor | metrics.Metric]

MAX_EXPONENT = 40.0
"""The square of e^40 (squared losses take it) is still finite in float32."""


def log_ratios(scores: pack.Scores, batch: pack.Batch) -> Float[Tensor, " samples"]:
    """Sum each sample's log-probability under the policy minus that under the reference.

        x = sum_t (logprobs_t - reference_logprobs_t)

    Subtracted a token at a time, so that equal models give exactly 0.

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats).

    Returns:
        Log-ratios in nats; 0 for a sample without a row.
    """
    return segments.sample_sums(scores.logprobs - batch.reference_logprobs, batch)


def per_token(values: Float[Tensor, " samples"], batch: pack.Batch) -> Float[Tensor, " samples"]:
    """Divide each sample's value by its trained tokens; 0 stays 0 for a sample without any."""
    return values / batch.samples.num_terms.clamp(min=1.0)


def sides(
    values: Float[Tensor, " samples"], batch: pack.Batch
) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
    """Return the values of the chosen and of the rejected side of each pair."""
    return values.index_select(0, batch.pairs.chosen), values.index_select(0, batch.pairs.rejected)


def reverse_kl(x: Float[Tensor, " samples"]) -> Float[Tensor, " samples"]:
    """Leave a log-ratio as it is: KL(policy || reference), what plain DPO regularizes with.

        g(x) = x

    Args:
        x: log-ratios (nats).
    """
    return x


def forward_kl(x: Float[Tensor, " samples"]) -> Float[Tensor, " samples"]:
    """Regularize with KL(reference || policy).

        g(x) = 1 - exp(-x)

    Wang et al. 2023 (arXiv:2309.16240), table 1. Below -40 it stays at its value there, and its gradient
    is 0.

    Args:
        x: log-ratios (nats).
    """
    return -torch.expm1((-x).clamp(max=MAX_EXPONENT))


def js_divergence(x: Float[Tensor, " samples"]) -> Float[Tensor, " samples"]:
    """Regularize with the Jensen-Shannon divergence.

        g(x) = log 2 + logsigmoid(x)

    Wang et al. 2023 (arXiv:2309.16240), table 1.

    Args:
        x: log-ratios (nats).
    """
    return math.log(2.0) + logsigmoid(x)


def alpha_divergence(
    x: Float[Tensor, " samples"], *, f_alpha_divergence_coef: float = 0.5
) -> Float[Tensor, " samples"]:
    """Regularize with an alpha-divergence.

        g(x) = (exp((a - 1) x) - 1) / (a - 1);    a = 1: x

    Wang et al. 2023 (arXiv:2309.16240), table 1. Where (a - 1) x is above 40 it stays at its value there,
    and its gradient is 0.

    Args:
        x: log-ratios (nats).
        f_alpha_divergence_coef: a; within 1e-6 of 1 it counts as 1.
    """
    slope = f_alpha_divergence_coef - 1.0
    if abs(slope) < 1e-6:
        return x
    return torch.expm1((slope * x).clamp(max=MAX_EXPONENT)) / slope


def logistic(x: Float[Tensor, " pairs"], label_smoothing: float) -> Float[Tensor, " pairs"]:
    """Return the logistic loss of a margin whose label is wrong with a probability e.

        loss = -(1 - e) logsig(x) - e logsig(-x)

    Args:
        x: margins (rewards).
        label_smoothing: e, in [0, 0.5].
    """
    return -(1.0 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)


def chosen_nll(scores: pack.Scores, batch: pack.Batch) -> Float[Tensor, " pairs"]:
    """Sum the negative log-likelihood of each chosen side, in units of the step's mean chosen length.

        v_k = sum_t -logprobs_kt / (chosen_terms / pairs)

    The mean of v over pairs is the mean over the chosen tokens of the whole step: a token counts alike in
    short and long answers and in any split of the step.

    Args:
        scores: `logprobs` (nats).
        batch: no columns.
    """
    chosen, _ = sides(segments.sample_sums(-scores.logprobs, batch), batch)
    return chosen * (batch.totals.pairs / batch.totals.chosen_terms.clamp(min=1.0))


def watched(scores: pack.Scores, batch: pack.Batch, rewards: Float[Tensor, " samples"] | None) -> Metrics:
    """Collect what is watched of pairs.

    Args:
        scores: `logprobs` (nats) and, when asked for, `entropies`.
        batch: no columns.
        rewards: of the samples, in the loss' own unit; None: the loss has none.

    Returns:
        Log-probabilities, rewards and margins by name; `rewards/accuracies` counts a pair whose sides are
        equal as a miss.
    """
    chosen, rejected = sides(segments.sample_sums(scores.logprobs.detach(), batch), batch)
    found: dict[str, Tensor] = {"logps/chosen": chosen, "logps/rejected": rejected}
    if scores.entropies is not None:
        found["entropy"] = scores.entropies
    if rewards is None:
        return found
    better, worse = sides(rewards.detach(), batch)
    return found | {
        "rewards/chosen": better,
        "rewards/rejected": worse,
        "rewards/margins": better - worse,
        "rewards/accuracies": (better > worse).to(better.dtype),
    }
