"""Preference losses that look at each side on its own: not only apart, but above and below the reference.

c and l are policy minus reference log-probabilities (nats) of the chosen and the rejected side, summed over
their trained tokens, D = c - l, b = beta, sig the logistic function.

Axes: terms (trained tokens), samples, pairs.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from core import pack
from core.losses import margins


def nca_pair(
    scores: pack.Scores, batch: pack.Batch, *, beta: float = 0.1
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Tell both sides from the reference's own answers, the chosen one as better.

        loss = -logsig(b c) - 0.5 logsig(-b c) - 0.5 logsig(-b l)

    Noise contrastive alignment, Chen et al. 2024 (arXiv:2402.05369), sec. 4.1.

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats).
        beta: reward a nat of log-ratio, above 0.

    Returns:
        One loss a pair, in nats; rewards and log-probabilities of both sides.
    """
    rewards = beta * margins.log_ratios(scores, batch)
    chosen, rejected = margins.sides(rewards, batch)
    loss = -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)
    return loss, margins.watched(scores, batch, rewards)


def bco_pair(
    scores: pack.Scores, batch: pack.Batch, *, beta: float = 0.1
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Classify the chosen side as good and the rejected side as bad.

        loss = -logsig(b c) - logsig(-b l)

    Binary classifier optimization without its reward shift, Jung et al. 2024 (arXiv:2404.04656), sec. 4.

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats).
        beta: reward a nat of log-ratio, above 0.

    Returns:
        One loss a pair, in nats; rewards and log-probabilities of both sides.
    """
    rewards = beta * margins.log_ratios(scores, batch)
    chosen, rejected = margins.sides(rewards, batch)
    return -logsigmoid(chosen) - logsigmoid(-rejected), margins.watched(scores, batch, rewards)


def sppo_hard(
    scores: pack.Scores, batch: pack.Batch, *, beta: float = 0.1
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Pull the chosen side to a win and the rejected side to a loss against the reference.

        loss = (c - 1 / (2 b))^2 + (l + 1 / (2 b))^2

    SPPO, Wu et al. 2024 (arXiv:2405.00675), eq. 4.7, with win rates 1 and 0; 1 / b is its eta.

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats).
        beta: one over twice the log-ratio of a win, per nat, above 0.

    Returns:
        One loss a pair, in nats squared; rewards and log-probabilities of both sides.
    """
    ratios = margins.log_ratios(scores, batch)
    chosen, rejected = margins.sides(ratios, batch)
    loss = (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()
    return loss, margins.watched(scores, batch, beta * ratios)


def apo_zero(
    scores: pack.Scores, batch: pack.Batch, *, beta: float = 0.1
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Raise the chosen side and lower the rejected one; for answers better than the model's own.

        loss = 1 - sig(b c) + sig(b l)

    APO-zero, D'Oosterlinck et al. 2024 (arXiv:2408.06266), eq. 7. `1 - sig(x)` is taken as `sig(-x)`, which
    keeps its digits.

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats).
        beta: reward a nat of log-ratio, above 0.

    Returns:
        One loss a pair, in [0, 2]; rewards and log-probabilities of both sides.
    """
    rewards = beta * margins.log_ratios(scores, batch)
    chosen, rejected = margins.sides(rewards, batch)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected), margins.watched(scores, batch, rewards)


def apo_down(
    scores: pack.Scores, batch: pack.Batch, *, beta: float = 0.1
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Lower both sides, the rejected one more; for answers worse than the model's own.

        loss = sig(b c) + 1 - sig(b D)

    APO-down, D'Oosterlinck et al. 2024 (arXiv:2408.06266), eq. 8.

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats).
        beta: reward a nat of log-ratio, above 0.

    Returns:
        One loss a pair, in [0, 2]; rewards and log-probabilities of both sides.
    """
    rewards = beta * margins.log_ratios(scores, batch)
    chosen, rejected = margins.sides(rewards, batch)
    loss = torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)
    return loss, margins.watched(scores, batch, rewards)
