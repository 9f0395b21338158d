"""Preference losses: of two answers to one prompt, make the chosen one likelier.

Throughout, c and l are policy minus reference log-probabilities (nats) of the chosen and the rejected side,
summed over their trained tokens, D = c - l, b = beta, sig the logistic function. A loss takes `divergence`
exactly when an f-divergence may stand in for the log-ratio; then c and l are g(c) and g(l).

Axes: terms (trained tokens), samples, pairs.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from core import pack
from core.losses import margins

Divergence: TypeAlias = Callable[[Tensor], Tensor]


def sigmoid(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    divergence: Divergence = margins.reverse_kl,
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Fit the Bradley-Terry model with the policy as its own reward.

        loss = -(1 - e) logsig(b D) - e logsig(-b D)

    DPO, Rafailov et al. 2023 (arXiv:2305.18290), eq. 7. e > 0 is conservative DPO: labels are wrong with
    probability e. f-divergences: Wang et al. 2023 (arXiv:2309.16240).

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats).
        beta: reward a nat of log-ratio, above 0.
        label_smoothing: e, in [0, 0.5].
        divergence: g.

    Returns:
        One loss a pair, in nats; rewards and log-probabilities of both sides.
    """
    ratios = margins.log_ratios(scores, batch)
    chosen, rejected = margins.sides(divergence(ratios), batch)
    loss = margins.logistic(beta * (chosen - rejected), label_smoothing)
    return loss, margins.watched(scores, batch, beta * ratios)


def hinge(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    beta: float = 0.1,
    divergence: Divergence = margins.reverse_kl,
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Ask for a margin of 1 / beta and for nothing beyond it.

        loss = max(0, 1 - b D)

    SLiC-HF, Zhao et al. 2023 (arXiv:2305.10425), sec. 2, on log-ratios as in RSO (arXiv:2309.06657).

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats).
        beta: one over the margin, per nat, above 0.
        divergence: g.

    Returns:
        One loss a pair; rewards and log-probabilities of both sides.
    """
    ratios = margins.log_ratios(scores, batch)
    chosen, rejected = margins.sides(divergence(ratios), batch)
    return torch.relu(1.0 - beta * (chosen - rejected)), margins.watched(scores, batch, beta * ratios)


def ipo(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    beta: float = 0.1,
    divergence: Divergence = margins.reverse_kl,
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Pull the difference of average log-ratios to 1 / (2 beta).

        loss = (c / n_c - l / n_l - 1 / (2 b))^2,    n the trained tokens of a side

    IPO, Azar et al. 2023 (arXiv:2310.12036), eq. 17, where b is tau; averaged over tokens, as its authors
    confirmed. There is no label smoothing in it.

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats).
        beta: one over twice the margin, per nat, above 0.
        divergence: g.

    Returns:
        One loss a pair, in nats squared; rewards and log-probabilities of both sides.
    """
    ratios = margins.log_ratios(scores, batch)
    chosen, rejected = margins.sides(margins.per_token(divergence(ratios), batch), batch)
    return (chosen - rejected - 0.5 / beta).square(), margins.watched(scores, batch, beta * ratios)


def sigmoid_norm(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    divergence: Divergence = margins.reverse_kl,
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Normalize the log-ratios by length before the logistic loss.

        loss = -(1 - e) logsig(b x) - e logsig(-b x),    x = c / n_c - l / n_l

    Length-normalized DPO, Lambert et al. 2024 (arXiv:2411.15124), sec. 5.

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats).
        beta: reward a nat of log-ratio a token, above 0.
        label_smoothing: e, in [0, 0.5].
        divergence: g, before it is divided by the length.

    Returns:
        One loss a pair, in nats; rewards and log-probabilities of both sides.
    """
    ratios = margins.log_ratios(scores, batch)
    chosen, rejected = margins.sides(margins.per_token(divergence(ratios), batch), batch)
    loss = margins.logistic(beta * (chosen - rejected), label_smoothing)
    return loss, margins.watched(scores, batch, beta * ratios)


def robust(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    divergence: Divergence = margins.reverse_kl,
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Estimate DPO's loss without bias when labels are flipped with a known probability.

        loss = (-(1 - e) logsig(b D) + e logsig(-b D)) / (1 - 2 e)

    rDPO, Chowdhury et al. 2024 (arXiv:2403.00409), sec. 3.1.

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats).
        beta: reward a nat of log-ratio, above 0.
        label_smoothing: e, the probability of a flip, in [0, 0.5).
        divergence: g.

    Returns:
        One loss a pair, in nats, of either sign; rewards and log-probabilities of both sides.

    Raises:
        ValueError: e is not in [0, 0.5).
    """
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(
            f"robust: label_smoothing is {label_smoothing}; the probability of a flipped label is wanted, at "
            "least 0 and below 0.5."
        )
    ratios = margins.log_ratios(scores, batch)
    chosen, rejected = margins.sides(divergence(ratios), batch)
    x = beta * (chosen - rejected)
    clean, flipped = (1.0 - label_smoothing) * logsigmoid(x), label_smoothing * logsigmoid(-x)
    return (flipped - clean) / (1.0 - 2.0 * label_smoothing), margins.watched(scores, batch, beta * ratios)


def exo_pair(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    beta: float = 0.1,
    label_smoothing: float = 1e-3,
    divergence: Divergence = margins.reverse_kl,
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Minimize the reverse KL from the smoothed label to the policy's choice between the two.

        loss = sig(b D) (logsig(b D) - log(1 - e)) + sig(-b D) (logsig(-b D) - log e)

    EXO, Ji et al. 2024 (arXiv:2402.00856), eq. 16.

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats).
        beta: reward a nat of log-ratio, above 0.
        label_smoothing: e, in (0, 1): at 0 the divergence is infinite.
        divergence: g.

    Returns:
        One loss a pair, in nats; rewards and log-probabilities of both sides.

    Raises:
        ValueError: e is not in (0, 1).
    """
    if not 0.0 < label_smoothing < 1.0:
        raise ValueError(
            f"exo_pair: label_smoothing is {label_smoothing}; above 0 and below 1 is wanted, such as 0.001."
        )
    ratios = margins.log_ratios(scores, batch)
    chosen, rejected = margins.sides(divergence(ratios), batch)
    x = beta * (chosen - rejected)
    right, wrong = math.log1p(-label_smoothing), math.log(label_smoothing)
    loss = torch.sigmoid(x) * (logsigmoid(x) - right) + torch.sigmoid(-x) * (logsigmoid(-x) - wrong)
    return loss, margins.watched(scores, batch, beta * ratios)


def discopop(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    beta: float = 0.1,
    discopop_tau: float = 0.05,
    divergence: Divergence = margins.reverse_kl,
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Blend the logistic and the exponential loss by the log-ratio itself.

        w = sig(b D / tau)        loss = (1 - w) (-logsig(b D)) + w exp(-b D)

    DiscoPOP, Lu et al. 2024 (arXiv:2406.08414), eq. 5. The second term is exp(logsig(b D / tau) - b D): w
    falls faster than exp(-b D) grows, and the product alone would be 0 times infinity.

    Args:
        scores: `logprobs` (nats).
        batch: column `reference_logprobs` (nats).
        beta: reward a nat of log-ratio, above 0.
        discopop_tau: tau, width of the blend, above 0.
        divergence: g.

    Returns:
        One loss a pair; rewards and log-probabilities of both sides.
    """
    ratios = margins.log_ratios(scores, batch)
    chosen, rejected = margins.sides(divergence(ratios), batch)
    x = beta * (chosen - rejected)
    exponential = (logsigmoid(x / discopop_tau) - x).clamp(max=margins.MAX_EXPONENT).exp()
    loss = exponential - torch.sigmoid(-x / discopop_tau) * logsigmoid(x)
    return loss, margins.watched(scores, batch, beta * ratios)


def sft(scores: pack.Scores, batch: pack.Batch) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Imitate the chosen side: its mean negative log-likelihood over the chosen tokens of the step.

        loss_k = sum_t -logprobs_kt / (chosen_terms / pairs)

    One pair's sum, in units of the mean length of a chosen side of the step. Their mean over pairs is the
    sum over all chosen tokens divided by how many there are, so that a token counts alike in short and long
    answers and in any split of the step.

    Args:
        scores: `logprobs` (nats).
        batch: no columns.

    Returns:
        One loss a pair, in nats a token; log-probabilities of both sides.
    """
    return margins.chosen_nll(scores, batch), margins.watched(scores, batch, None)
