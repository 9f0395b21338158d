"""Preference losses over distributions: sorted margins of all pairs of a step, compared rank by rank.

Sorting couples the whole step: all its pairs must be in one batch. A value belongs to a rank, not to a pair;
there is one a pair all the same, and only their sum means anything.

Axes: terms (trained tokens), samples, pairs.
"""

from jaxtyping import Float
from torch import Tensor

from core import pack, segments
from core.losses import margins


def aot(
    scores: pack.Scores, batch: pack.Batch, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Make the policy's margins dominate the reference's, as distributions.

        delta = sort(policy c - l) - sort(reference c - l)
        loss = -(1 - e) logsig(b delta) - e logsig(-b delta)

    Here c and l are log-probabilities of the sides under one model. Paired AOT, Melnyk et al. 2024
    (arXiv:2406.05882), sec. 3.

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats); all pairs of the step.
        beta: reward a nat of margin, above 0.
        label_smoothing: e, in [0, 0.5].

    Returns:
        One loss a rank, in nats; rewards and log-probabilities of both sides.
    """
    policy, reference = (
        chosen - rejected
        for chosen, rejected in (
            margins.sides(segments.sample_sums(logprobs, batch), batch)
            for logprobs in (scores.logprobs, batch.reference_logprobs)
        )
    )
    delta = policy.sort().values - reference.sort().values
    rewards = beta * margins.log_ratios(scores, batch)
    return margins.logistic(beta * delta, label_smoothing), margins.watched(scores, batch, rewards)


def aot_unpaired(
    scores: pack.Scores, batch: pack.Batch, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Make log-ratios of chosen sides dominate those of rejected sides, as distributions.

        delta = sort(c) - sort(l)        loss = -(1 - e) logsig(b delta) - e logsig(-b delta)

    c and l are policy minus reference log-probabilities. Unpaired AOT, Melnyk et al. 2024
    (arXiv:2406.05882), sec. 3.

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats); all pairs of the step.
        beta: reward a nat of log-ratio, above 0.
        label_smoothing: e, in [0, 0.5].

    Returns:
        One loss a rank, in nats; rewards and log-probabilities of both sides.
    """
    rewards = beta * margins.log_ratios(scores, batch)
    chosen, rejected = margins.sides(rewards, batch)
    x = chosen.sort().values - rejected.sort().values
    return margins.logistic(x, label_smoothing), margins.watched(scores, batch, rewards)
