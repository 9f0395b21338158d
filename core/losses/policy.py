"""Policy losses: make answers likelier that did better than their group, without leaving the old policy far.

One value a trained token. The losses over whole sequences give each row its sequence's value, so that
everything of `composition` applies to them alike; `reduce.sequence_mean` makes of them the mean over
sequences.

With r the importance ratio (`core.ratios`) and A the advantage (`core.advantages`).

Axes: terms (trained tokens), samples.
"""

import math
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from core import metrics, pack, ratios, segments

Metrics = Mapping[str, Tensor | metrics.Metric]
Values = tuple[Float[Tensor, " terms"], Metrics]
Ratio = Callable[[pack.Scores, pack.Batch], Float[Tensor, " terms"]]

LEAST_WEIGHT = 1e-8


def clipped(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    low: float = 0.2,
    high: float = 0.2,
    delta: float = math.inf,
) -> Values:
    """Clip each token's ratio where the advantage would push it further.

        r = exp(logp - logp_old)
        loss = -min(min(r, delta) A, clip(r, 1 - low, 1 + high) A)

    Schulman et al. 2017 (arXiv:1707.06347), eq. 7. `high` above `low` is DAPO's clip-higher
    (arXiv:2503.14476), eq. 10. `delta` bounds what a bad answer that became likelier may cost: two-sided
    clipping, INTELLECT-2 (arXiv:2505.07291).

    Args:
        scores: `logprobs` (nats); `entropies` (nats) for the metrics.
        batch: columns `advantage` (per sample) and, but for the first update, `old_logprobs` (nats).
        low, high: how far the ratio may leave 1 on either side.
        delta: most that the ratio counts for, above 1 + high.

    Returns:
        One loss a row; `clip_ratio/low_mean`, `high_mean`, `region_mean` over tokens, and `entropy`.
    """
    ratio, advantage = ratios.token(scores, batch), batch.advantage
    values = _surrogate(ratio, advantage, low, high, delta)
    return values, {**_clips(ratio, advantage, low, high), **_watched(scores)}


def sequence_clipped(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    ratio: Ratio = ratios.sequence,
    low: float = 3e-4,
    high: float = 4e-4,
    delta: float = math.inf,
) -> Values:
    """Clip each sequence's ratio where the advantage would push it further.

        s = exp(mean_t(logp_t - logp_old_t))
        loss = -min(min(s, delta) A, clip(s, 1 - low, 1 + high) A)

    Zheng et al. 2025, GSPO (arXiv:2507.18071), eq. 5, the bounds those of sec. 5.1; with
    `ratios.sequence_sum` and .2, RLOO's.

    Args:
        scores: `logprobs` (nats); `entropies` (nats) for the metrics.
        batch: columns `advantage` (per sample) and, but for the first update, `old_logprobs` (nats).
        ratio: `ratios.sequence` or `ratios.sequence_sum`.
        low, high: how far the ratio may leave 1 on either side.
        delta: most that the ratio counts for, above 1 + high.

    Returns:
        At each row its sequence's loss; `clip_ratio/...` over sequences, and `entropy`.
    """
    ratios_, advantage = ratio(scores, batch), batch.advantage
    values = _surrogate(ratios_, advantage, low, high, delta)
    watched = _clips(ratios_, advantage, low, high)
    return values, {**_over_samples(watched, batch), **_watched(scores)}


def cispo(scores: pack.Scores, batch: pack.Batch, *, cap: float) -> Values:
    """Bound the weight of each token's gradient instead of clipping tokens away.

        loss = -detach(min(r, cap)) A logp

    MiniMax 2025, CISPO (arXiv:2506.13585), eq. 4 and 5, without a lower bound.

    Args:
        scores: `logprobs` (nats); `entropies` (nats) for the metrics.
        batch: columns `advantage` (per sample) and, but for the first update, `old_logprobs` (nats).
        cap: bound of the ratio itself, not of its distance from 1; 5 is recommended (arXiv:2510.13786).

    Returns:
        One loss a row; `cispo_clip_ratio` (ratio above the cap, advantage positive) and `entropy`.
    """
    ratio, advantage = ratios.token(scores, batch).detach(), batch.advantage
    hit = (ratio > cap) & (advantage > 0)
    return -ratio.clamp(max=cap) * advantage * scores.logprobs, {"cispo_clip_ratio": hit, **_watched(scores)}


def sapo(scores: pack.Scores, batch: pack.Batch, *, positive: float = 1.0, negative: float = 1.05) -> Values:
    """Fade tokens out smoothly as their ratio leaves 1.

        loss = -(4 / tau) sigmoid(tau (r - 1)) A,  tau = positive for A > 0, else negative

    Gao et al. 2025, SAPO (arXiv:2511.20347), eq. 5 and 6. At r = 1 the gradient is REINFORCE's.

    Args:
        scores: `logprobs` (nats); `entropies` (nats) for the metrics.
        batch: columns `advantage` (per sample) and, but for the first update, `old_logprobs` (nats).
        positive, negative: temperatures by the sign of the advantage, above 0; a higher one fades faster.

    Returns:
        One loss a row; `entropy`.
    """
    ratio, advantage = ratios.token(scores, batch), batch.advantage
    tau = torch.where(advantage > 0, torch.full_like(advantage, positive), negative)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage, _watched(scores)


def vespo(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    k_positive: float = 2.0,
    rate_positive: float = 3.0,
    k_negative: float = 3.0,
    rate_negative: float = 2.0,
    weights: Callable[[pack.Scores, pack.Batch], ratios.Weights] | None = None,
) -> Values:
    """Weigh sequences by a smooth bump of the ratio of whole answers.

        w = exp(sum_t log r_t), each log r_t within 20, the sum from log 1e-8 to 20
        phi = exp(lam + k log w - lam w), so that phi(1) = 1
        loss = -detach(phi) A logp,  (k, lam) = (2, 3) for A >= 0, else (3, 2)

    Shen et al. 2026, VESPO (arXiv:2602.10693).

    Args:
        scores: `logprobs` (nats); `entropies` (nats) for the metrics.
        batch: columns `advantage` (per sample) and, but for the first update, `old_logprobs` (nats).
        k_positive, k_negative: power of the ratio, by the sign of the advantage.
        rate_positive, rate_negative: how fast a large ratio fades, at least 1e-4.
        weights: `ratios.token_truncate` or `token_mask` count the generator's drift in w; None leaves it out.

    Returns:
        One loss a row; `vespo/phi_seq_mean` over sequences, and `entropy`.
    """
    least, advantage = math.log(LEAST_WEIGHT), batch.advantage
    logs, seen = ratios.log_token(scores, batch).detach().clamp(-20.0, 20.0), {}
    if weights is not None:
        weight, seen = weights(scores, batch)
        logs = logs + weight.log().clamp(least, 20.0)
    total = segments.sample_sums(logs, batch).clamp(least, 20.0).index_select(0, batch.terms.sample)
    good = advantage >= 0
    k = torch.where(good, torch.full_like(advantage, k_positive), k_negative)
    rate = torch.where(good, torch.full_like(advantage, rate_positive), rate_negative).clamp(min=1e-4)
    phi = (rate + k * total - rate * total.exp()).exp()
    watched = {**_over_samples({"vespo/phi_seq_mean": phi}, batch), **seen, **_watched(scores)}
    return -phi * advantage * scores.logprobs, watched


def gmpo(scores: pack.Scores, batch: pack.Batch, *, low: float = 0.4, high: float = 0.4) -> Values:
    """Take the geometric mean of a sequence's token ratios, each clipped where its advantage pushes.

        m_t = min(log r_t, high) for A > 0, else max(log r_t, -low)
        loss = -A exp(mean_t m_t)

    Zhao et al. 2025, GMPO (arXiv:2507.20673), sec. 3; the bounds are of the log-ratio.

    Args:
        scores: `logprobs` (nats); `entropies` (nats) for the metrics.
        batch: columns `advantage` (per sample) and, but for the first update, `old_logprobs` (nats).
        low, high: how far the log-ratio may leave 0 on either side.

    Returns:
        At each row its sequence's loss; `clip_ratio/...` over tokens, and `entropy`.
    """
    logs, advantage = ratios.log_token(scores, batch), batch.advantage
    held = torch.where(advantage > 0, logs.clamp(max=high), logs.clamp(min=-low))
    mean = segments.sample_means(held, batch).exp().index_select(0, batch.terms.sample)
    below, above = (logs < -low) & (advantage < 0), (logs > high) & (advantage > 0)
    return -advantage * mean, {**_named(below, above), **_watched(scores)}


def _surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float, delta: float) -> Tensor:
    """Return the clipped loss."""
    held = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio.clamp(max=delta) * advantage, held * advantage)


def _clips(ratio: Tensor, advantage: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Say which rows are clipped: only where the advantage pushes outwards."""
    below, above = (ratio < 1 - low) & (advantage < 0), (ratio > 1 + high) & (advantage > 0)
    return _named(below, above)


def _named(below: Bool[Tensor, " terms"], above: Bool[Tensor, " terms"]) -> dict[str, Tensor]:
    """Name the clip ratios as dashboards do."""
    return {
        "clip_ratio/low_mean": below,
        "clip_ratio/high_mean": above,
        "clip_ratio/region_mean": below | above,
    }


def _over_samples(rows: Mapping[str, Tensor], batch: pack.Batch) -> dict[str, metrics.Metric]:
    """Average what is one number a sequence over sequences, whatever their length."""
    return {name: metrics.mean(values, 1 / batch.num_terms) for name, values in rows.items()}


def _watched(scores: pack.Scores) -> dict[str, Tensor]:
    """Collect the entropy where it was asked for."""
    return {} if scores.entropies is None else {"entropy": scores.entropies}
