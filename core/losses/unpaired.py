"""Losses on answers that are good or bad on their own, without a partner.

x is the policy minus the reference log-probability (nats) of a sample, summed over its trained tokens, b =
beta, sig the logistic function. The per-sample column `label` is 1 for a desirable answer, 0 for an
undesirable one.

Axes: terms (trained tokens), samples.
"""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from core import metrics, pack, segments
from core.losses import margins

Metrics: TypeAlias = Mapping[str, Tensor | metrics.Metric]


def kto(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Float[Tensor, " samples"], Metrics]:
    """Raise desirable answers above a common zero, and lower undesirable ones below it.

        z = detach(max(0, mean of x over the mismatched samples of the step))
        desirable: w_d (1 - sig(b (x - z)))        undesirable: w_u (1 - sig(b (z - x)))

    KTO, Ethayarajh et al. 2024 (arXiv:2402.01306), eqs. 7 and 8. z couples the whole step: all its samples
    must be in one batch. `1 - sig(y)` is taken as `sig(-y)`, which keeps its digits.

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats); per sample `label`, and `mismatched`, 1 for those that
            only z reads (`core.plan.mismatch.rotated` makes them).
        beta: reward a nat of log-ratio, above 0.
        desirable_weight, undesirable_weight: of the two kinds, at least 0.

    Returns:
        One loss a sample, 0 for the mismatched ones; `kl` is z, in nats.
    """
    ratios = margins.log_ratios(scores, batch)
    seen, label = 1.0 - batch.samples.mismatched, batch.samples.label
    drift = (ratios * batch.samples.mismatched).sum() / batch.totals.mismatched.clamp(min=1.0)
    z = drift.clamp(min=0.0).detach()
    good = desirable_weight * torch.sigmoid(beta * (z - ratios))
    bad = undesirable_weight * torch.sigmoid(beta * (ratios - z))
    # An empty pack of another rank has a z of 0, which must not count.
    drifted = metrics.mean(z, batch.samples.mismatched.sum())
    found = {**_watched(scores, batch, beta * ratios, seen), "kl": drifted}
    return seen * (label * good + (1.0 - label) * bad), found


def apo_zero_unpaired(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Float[Tensor, " samples"], Metrics]:
    """Raise desirable answers and lower undesirable ones, with the reference as the zero.

        desirable: w_d (1 - sig(b x))        undesirable: w_u sig(b x)

    APO-zero without pairs, D'Oosterlinck et al. 2024 (arXiv:2408.06266), eq. 7.

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats); per sample `label`.
        beta: reward a nat of log-ratio, above 0.
        desirable_weight, undesirable_weight: of the two kinds, at least 0.

    Returns:
        One loss a sample; rewards and log-probabilities of both kinds.
    """
    rewards = beta * margins.log_ratios(scores, batch)
    label = batch.samples.label
    good = desirable_weight * torch.sigmoid(-rewards)
    bad = undesirable_weight * torch.sigmoid(rewards)
    return label * good + (1.0 - label) * bad, _watched(scores, batch, rewards, torch.ones_like(label))


def _watched(
    scores: pack.Scores,
    batch: pack.Batch,
    rewards: Float[Tensor, " samples"],
    seen: Float[Tensor, " samples"],
) -> dict[str, Tensor | metrics.Metric]:
    """Collect rewards and log-probabilities of the samples of either kind that are trained."""
    logprobs = segments.sample_sums(scores.logprobs, batch)
    found: dict[str, Tensor | metrics.Metric] = {}
    for kind, weights in (("chosen", batch.samples.label), ("rejected", 1.0 - batch.samples.label)):
        found |= {
            f"rewards/{kind}": metrics.mean(rewards, weights * seen),
            f"logps/{kind}": metrics.mean(logprobs, weights * seen),
        }
    if scores.entropies is not None:
        rows = seen.index_select(0, batch.terms.sample)
        found["entropy"] = metrics.mean(scores.entropies, rows)
    return found
