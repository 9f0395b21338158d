"""What is put around a policy loss: a penalty, weights, a bonus, a choice of tokens.

Each takes a loss over rows as a keyword and is such a loss itself, so they nest, the innermost first:

    partial(with_kl, beta=0.04, loss=partial(weighted, weights=ratios.sequence_mask, loss=policy.clipped))

penalizes what the weights have left alone. The order matters and is the caller's: whatever stands outside
`weighted` or `top_entropy` is not weighted or left out by it.

Axes: terms (trained tokens).
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from core import kl, metrics, pack, ratios, reduce, segments
from core.losses import policy

Loss = Callable[..., policy.Values]
Divergence = Callable[[Tensor, Tensor], Float[Tensor, " terms"]]


def with_kl(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    loss: Loss,
    beta: float,
    divergence: Divergence = kl.k3,
) -> policy.Values:
    """Add a divergence from the reference to each row.

        loss + beta k

    Shao et al. 2024, GRPO (arXiv:2402.03300), eq. 3. Which divergence's gradient is followed depends on the
    estimator: see `core.kl`. k3, GRPO's, does not follow that of KL(policy || reference); k2 does.

    Args:
        scores: `logprobs` (nats), and what `loss` reads.
        batch: column `reference_logprobs` (nats), and those of `loss`.
        loss: what it is added to.
        beta: loss a nat.
        divergence: `kl.k1`, `k2` or `k3`.

    Returns:
        One loss a row; the metrics of `loss` and `kl`.
    """
    values, seen = loss(scores, batch)
    penalty = divergence(scores.logprobs, batch.reference_logprobs)
    return values + beta * penalty, {**seen, "kl": penalty}


def with_corrected_kl(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    loss: Loss,
    beta: float,
    divergence: Divergence = kl.k3,
) -> policy.Values:
    """Add a divergence times the token's ratio, whose gradient is that of KL(policy || reference).

        loss + beta r k

    DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv:2512.02556).

    Args:
        scores: `logprobs` (nats), and what `loss` reads.
        batch: columns `reference_logprobs` and `old_logprobs` (nats), and those of `loss`.
        loss: what it is added to.
        beta: loss a nat.
        divergence: `kl.k1` or `k3`.

    Returns:
        One loss a row; the metrics of `loss` and `kl`.

    Raises:
        ValueError: `k2`, see `kl.corrected`.
    """
    values, seen = loss(scores, batch)
    ratio = ratios.token(scores, batch)
    penalty = kl.corrected(scores.logprobs, batch.reference_logprobs, ratio, divergence=divergence)
    return values + beta * penalty, {**seen, "kl": penalty}


def weighted(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    loss: Loss,
    weights: Callable[[pack.Scores, pack.Batch], ratios.Weights] = ratios.sequence_mask,
) -> policy.Values:
    """Weigh each row by how likely the trainer finds what the generator wrote.

        w loss,  w of the trainer over the generator, bounded, without gradient

    A row of weight 0 still counts in the reduction, whose weights come from the counts of the step alone.

    Args:
        scores: `logprobs` (nats), and what `loss` reads.
        batch: columns `sampled_logprobs` and `old_logprobs` (nats), and those of `loss`.
        loss: what is weighted.
        weights: `ratios.token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`.

    Returns:
        One loss a row; the metrics of `loss`, which are not weighted, and `sampling/...`.
    """
    values, seen = loss(scores, batch)
    weight, watched = weights(scores, batch)
    return values * weight, {**seen, **watched}


def off_policy_masked(
    scores: pack.Scores, batch: pack.Batch, *, loss: Loss, threshold: float
) -> policy.Values:
    """Leave out bad answers that the policy has moved away from since they were written.

        0 where A < 0 and mean_t(logp_sampled_t - logp_t) > threshold, else loss

    DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv:2512.02556), "off-policy sequence masking". A row that is left
    out still counts in the reduction.

    Args:
        scores: `logprobs` (nats), and what `loss` reads.
        batch: columns `sampled_logprobs` (nats) and `advantage` (per sample), and those of `loss`.
        loss: what is left out.
        threshold: nats a token, at least 0.

    Returns:
        One loss a row; the metrics of `loss`, and `sampling/off_policy_masked`, the part of the samples.
    """
    values, seen = loss(scores, batch)
    gone = segments.sample_means(batch.sampled_logprobs - scores.logprobs.detach(), batch)
    strayed = (batch.samples.advantage < 0) & (gone > threshold)
    watched = metrics.mean(strayed.to(gone.dtype), batch.samples.num_terms > 0)
    kept = values.where(~strayed.index_select(0, batch.terms.sample), 0.0)
    return kept, {**seen, "sampling/off_policy_masked": watched}


def observed(scores: pack.Scores, batch: pack.Batch, *, loss: Loss) -> policy.Values:
    """Report how far the trainer has drifted from the generator; the loss stays as it is.

    Args:
        scores: `logprobs` (nats), and what `loss` reads.
        batch: columns `sampled_logprobs` and, but for the first update, `old_logprobs` (nats).
        loss: what is minimized.

    Returns:
        What `loss` returns, and `sampling/...` of each token.
    """
    values, seen = loss(scores, batch)
    return values, {**ratios.token_truncate(scores, batch)[1], **seen}


def top_entropy(scores: pack.Scores, batch: pack.Batch, *, loss: Loss, part: float = 0.2) -> policy.Values:
    """Train only the tokens where the policy was least sure what to say.

        loss where H >= the (1 - part) quantile of H over the step, else 0

    Wang et al. 2025 (arXiv:2506.01939), sec. 5. Tokens left out still count in the reduction. The quantile is
    over all rows that are seen together: an algorithm with it couples the `step`.

    Args:
        scores: `entropies` (nats), and what `loss` reads.
        batch: the columns of `loss`.
        loss: what is left out elsewhere.
        part: of the tokens, those kept: above 0; 1 keeps all.

    Returns:
        One loss a row; the metrics of `loss`, over all tokens.
    """
    values, seen = loss(scores, batch)
    sure = pack.field(scores, "entropies").detach()
    if not len(sure):
        return values, seen
    return values.where(sure >= torch.quantile(sure, 1 - part), 0.0), seen


def with_entropy(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    loss: Loss,
    coefficient: float,
    active: float = 1.0,
    by: Callable[[Tensor, pack.Batch], Float[Tensor, ""]] = reduce.token_mean,
) -> policy.Values:
    """Reward entropy, averaged over the step's tokens whatever the rest of the loss is averaged over.

        L = reduce(loss) - coefficient active sum(H) / terms

    Args:
        scores: `entropies` (nats), and what `loss` reads.
        batch: the columns of `loss`.
        loss: what it is added to.
        coefficient: loss a nat.
        active: 1 or 0: `adapted_entropy` switches the bonus off while entropy is high.
        by: the reduction of the algorithm, to scale the bonus by.

    Returns:
        One loss a row; the metrics of `loss`, and `entropy_coef` as it counted.
    """
    values, seen = loss(scores, batch)
    bonus = reduce.as_token_mean(pack.field(scores, "entropies"), batch, by=by)
    now = coefficient * active
    return values - now * bonus, {**seen, "entropy_coef": metrics.whole(now)}


def adapted_entropy(
    carry: Mapping[str, float],
    means: Mapping[str, float],
    *,
    target: float = 0.2,
    step: float = 0.005,
    low: float = 0.0,
    high: float = 1.0,
) -> Mapping[str, float]:
    """Raise the coefficient of `with_entropy` while entropy is at most the target, else lower it.

        c' = clip(c + step if H <= target else c - step, low, high);  active' = 1 if H <= target else 0

    He et al. 2025, Skywork-OR1 (arXiv:2505.22312). The `next_carry` of an algorithm whose outermost
    loss is `with_entropy` and whose `carry` is `{"coefficient": c, "active": 0.0}`.

    Args:
        carry: `coefficient` and `active` of the last step.
        means: `entropy` (nats) of the last step, the mean over its tokens; missing where nothing was trained.
        target: nats.
        step: change of the coefficient a step.
        low, high: bounds of the coefficient.
    """
    if "entropy" not in means:
        return carry
    lacking = means["entropy"] <= target
    moved = carry["coefficient"] + (step if lacking else -step)
    return {**carry, "coefficient": min(max(moved, low), high), "active": float(lacking)}
