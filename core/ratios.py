"""Importance ratios: how much likelier the policy makes an answer than the policy that it came from.

Three policies meet: the one being trained, the one before the update (`old_logprobs`; on the first update
after a rollout the two are one, and the column may be missing), and the generator (`sampled_logprobs`), which
computes the same distribution with other kernels. All three are the full tempered distribution: a generator
that samples from its likeliest tokens only still reports log-probabilities under all of them.

* `token`, `sequence`, `sequence_sum`: trained over old, at the rows, with their gradient. For the losses.
* `token_truncate`, `token_mask`, `sequence_truncate`, `sequence_mask`: old over generator, bounded, without
  gradient. For `composition.weighted`.

Axes: terms, samples.
"""

from collections.abc import Callable, Mapping

from jaxtyping import Float
from torch import Tensor

from core import metrics, pack, segments

Fold = Callable[[Tensor, pack.Batch], Float[Tensor, " samples"]]
Weights = tuple[Float[Tensor, " terms"], Mapping[str, Tensor | metrics.Metric]]

# exp(60) is finite in float32, and so is its product with an advantage; exp(89) is not.
MAX_LOG = 60.0


def old_logprobs(scores: pack.Scores, batch: pack.Batch) -> Float[Tensor, " terms"]:
    """Return the log-probabilities (nats) before the update, without gradient.

        logp_old = detach(logp) where the column is missing: the first update after a rollout

    Args:
        scores: `logprobs` (nats).
        batch: column `old_logprobs` (nats), if this is not the first update.
    """
    return batch.terms.columns.get("old_logprobs", scores.logprobs).detach()


def log_token(scores: pack.Scores, batch: pack.Batch) -> Float[Tensor, " terms"]:
    """Return the log of each token's ratio, at most 60.

        d = logp - logp_old

    Args:
        scores: `logprobs` (nats).
        batch: column `old_logprobs` (nats), if this is not the first update.
    """
    return (scores.logprobs - old_logprobs(scores, batch)).clamp(max=MAX_LOG)


def token(scores: pack.Scores, batch: pack.Batch) -> Float[Tensor, " terms"]:
    """Return each token's ratio.

        r_t = exp(logp_t - logp_old_t)

    Schulman et al. 2017 (arXiv:1707.06347), eq. 6.

    Args:
        scores: `logprobs` (nats).
        batch: column `old_logprobs` (nats), if this is not the first update.
    """
    return log_token(scores, batch).exp()


def sequence(scores: pack.Scores, batch: pack.Batch) -> Float[Tensor, " terms"]:
    """Return the geometric mean of a sample's token ratios, the same at each of its rows.

        s = exp(mean_t(logp_t - logp_old_t))        ds = s mean_t(dlogp_t)

    Zheng et al. 2025, GSPO (arXiv:2507.18071), eq. 7. The gradient reaches all tokens of the sample alike.
    Reduce it with `reduce.sequence_mean`: a mean over tokens would weigh a sample by its length.

    Args:
        scores: `logprobs` (nats).
        batch: column `old_logprobs` (nats), if this is not the first update.
    """
    return _spread(segments.sample_means(log_token(scores, batch), batch).exp(), batch)


def sequence_sum(scores: pack.Scores, batch: pack.Batch) -> Float[Tensor, " terms"]:
    """Return the ratio of whole answers, the same at each of a sample's rows.

        s = exp(sum_t(logp_t - logp_old_t))

    Ahmadian et al. 2024, RLOO (arXiv:2402.14740): the whole answer is one action. It leaves 1 faster the
    longer the answer: .012 a token is 3.32 over 100.

    Args:
        scores: `logprobs` (nats).
        batch: column `old_logprobs` (nats), if this is not the first update.
    """
    return _spread(segments.sample_sums(log_token(scores, batch), batch).clamp(max=MAX_LOG).exp(), batch)


def token_truncate(
    scores: pack.Scores, batch: pack.Batch, *, floor: float = 0.0, cap: float = 3.0
) -> Weights:
    """Weigh each token by trainer over generator, held between two bounds.

        w_t = clip(exp(logp_old_t - logp_sampled_t), floor, cap)

    Truncated importance sampling: Ionides 2008; Yao et al. 2025, https://fengyao.notion.site/off-policy-rl.

    Args:
        scores: `logprobs` (nats), used where `old_logprobs` is missing.
        batch: columns `sampled_logprobs` and `old_logprobs` (nats).
        floor, cap: bounds of the weight.

    Returns:
        One weight a row, without gradient; `sampling/...` before anything is bounded.
    """
    weight, seen = _token_weight(scores, batch)
    return weight.clamp(floor, cap), seen


def token_mask(scores: pack.Scores, batch: pack.Batch, *, floor: float = 0.0, cap: float = 3.0) -> Weights:
    """Weigh each token by trainer over generator, 0 outside two bounds.

        w_t = exp(logp_old_t - logp_sampled_t) if floor <= that <= cap else 0

    Masked importance sampling: IcePop, https://ringtech.notion.site/icepop.

    Args:
        scores: `logprobs` (nats), used where `old_logprobs` is missing.
        batch: columns `sampled_logprobs` and `old_logprobs` (nats).
        floor, cap: what lies outside is 0.

    Returns:
        One weight a row, without gradient; `sampling/...` before anything is masked.
    """
    weight, seen = _token_weight(scores, batch)
    return weight.where((weight >= floor) & (weight <= cap), 0.0), seen


def sequence_truncate(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    floor: float = 0.0,
    cap: float = 3.0,
    fold: Fold = segments.sample_sums,
) -> Weights:
    """Weigh each sample by trainer over generator, held between two bounds.

        w = clip(exp(fold_t(logp_old_t - logp_sampled_t)), floor, cap)

    Args:
        scores: `logprobs` (nats), used where `old_logprobs` is missing.
        batch: columns `sampled_logprobs` and `old_logprobs` (nats).
        floor, cap: bounds of the weight.
        fold: `segments.sample_sums` for the ratio of whole answers, which grows with their length, or
            `segments.sample_means` for its geometric mean.

    Returns:
        One weight a row, without gradient; `sampling/...` before anything is bounded.
    """
    weight, seen = _sample_weight(scores, batch, fold)
    return _spread(weight.clamp(floor, cap), batch), seen


def sequence_mask(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    floor: float = 0.0,
    cap: float = 3.0,
    fold: Fold = segments.sample_sums,
) -> Weights:
    """Weigh each sample by trainer over generator, 0 outside two bounds.

        w = exp(fold_t(logp_old_t - logp_sampled_t)); 0 unless floor <= w <= cap

    Args:
        scores: `logprobs` (nats), used where `old_logprobs` is missing.
        batch: columns `sampled_logprobs` and `old_logprobs` (nats).
        floor, cap: what lies outside is 0.
        fold: `segments.sample_sums` for the ratio of whole answers, which grows with their length, or
            `segments.sample_means` for its geometric mean.

    Returns:
        One weight a row, without gradient; `sampling/...` before anything is masked.
    """
    weight, seen = _sample_weight(scores, batch, fold)
    return _spread(weight.where((weight >= floor) & (weight <= cap), 0.0), batch), seen


def _token_weight(scores: pack.Scores, batch: pack.Batch) -> Weights:
    """Return trainer over generator of each token, and what is watched of it."""
    drift = old_logprobs(scores, batch) - batch.sampled_logprobs
    weight = drift.clamp(max=MAX_LOG).exp()
    return weight, _watched(weight, drift, None)


def _sample_weight(scores: pack.Scores, batch: pack.Batch, fold: Fold) -> Weights:
    """Return trainer over generator of each sample, and what is watched of it."""
    drift = old_logprobs(scores, batch) - batch.sampled_logprobs
    weight = fold(drift, batch).clamp(max=MAX_LOG).exp()
    return weight, _watched(weight, drift, batch.samples.num_terms > 0)


def _watched(weight: Tensor, drift: Tensor, there: Tensor | None) -> Mapping[str, Tensor | metrics.Metric]:
    """Collect the metrics of weights, where there is a trained token."""
    ratio, gap = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"
    return {
        f"{ratio}/min": metrics.minimum(weight, there),
        f"{ratio}/mean": metrics.mean(weight, there),
        f"{ratio}/max": metrics.maximum(weight, there),
        f"{gap}/mean": drift.abs(),
        f"{gap}/max": metrics.maximum(drift.abs()),
    }


def _spread(values: Float[Tensor, " samples"], batch: pack.Batch) -> Float[Tensor, " terms"]:
    """Return each sample's value at its rows."""
    return values.index_select(0, batch.terms.sample)
