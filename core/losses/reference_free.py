"""Preference losses that need no reference model.

c and l are log-probabilities (nats) of the chosen and the rejected side under the policy, summed over their
trained tokens, n the number of these, b = beta.

Axes: terms (trained tokens), samples, pairs.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from core import pack, segments
from core.losses import margins

CERTAIN = -1e-7
"""The log-probability from which on a side counts as certain: its log-odds go no higher, about 16."""


def orpo(
    scores: pack.Scores, batch: pack.Batch, *, beta: float = 0.1
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Imitate the chosen side and make its odds higher than those of the rejected side.

        m = logprob / n        log odds = m - log(1 - exp(m))
        loss = nll of chosen - b logsig(log odds_c - log odds_l)

    ORPO, Hong et al. 2024 (arXiv:2403.07691), eqs. 3, 4, 6 and 7. The first term is a mean over the chosen
    tokens of the step, see `margins.chosen_nll`. At m = 0 odds are infinite; m is held below, and what is cut
    off has no gradient, as the logits of a certain token have none.

    Args:
        scores: `logprobs` (nats).
        batch: no columns.
        beta: weight of the second term, at least 0.

    Returns:
        One loss a pair, in nats; rewards (b m), log-probabilities and log-odds.
    """
    means = segments.sample_means(scores.logprobs, batch)
    held = means.clamp(max=CERTAIN)
    better, worse = margins.sides(held - torch.log(-torch.expm1(held)), batch)
    ratio = logsigmoid(better - worse)
    watched = margins.watched(scores, batch, beta * means)
    found = {**watched, "log_odds_chosen": better - worse, "log_odds_ratio": ratio}
    return margins.chosen_nll(scores, batch) - beta * ratio, found


def cpo(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    beta: float = 0.1,
    cpo_alpha: float = 1.0,
    label_smoothing: float = 0.0,
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Tell the sides apart under a uniform reference, and imitate the chosen one.

        loss = -(1 - e) logsig(b (c - l)) - e logsig(-b (c - l)) + alpha nll of chosen

    CPO, Xu et al. 2024 (arXiv:2401.08417), sec. 3. The last term is a mean over the chosen tokens of the
    step, see `margins.chosen_nll`.

    Args:
        scores: `logprobs` (nats).
        batch: no columns.
        beta: reward a nat of log-probability, above 0.
        cpo_alpha: weight of the last term, at least 0.
        label_smoothing: e, in [0, 0.5].

    Returns:
        One loss a pair, in nats; rewards and log-probabilities of both sides.
    """
    rewards = beta * segments.sample_sums(scores.logprobs, batch)
    chosen, rejected = margins.sides(rewards, batch)
    apart = margins.logistic(chosen - rejected, label_smoothing)
    return apart + cpo_alpha * margins.chosen_nll(scores, batch), margins.watched(scores, batch, rewards)


def simpo(
    scores: pack.Scores,
    batch: pack.Batch,
    *,
    beta: float = 0.1,
    simpo_gamma: float = 0.5,
    label_smoothing: float = 0.0,
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Tell the sides apart by average log-probability, with a margin.

        x = b (c / n_c - l / n_l) - gamma        loss = -(1 - e) logsig(x) - e logsig(-x)

    SimPO, Meng et al. 2024 (arXiv:2405.14734), eq. 6; its experiments take beta from 2 to 10.

    Args:
        scores: `logprobs` (nats).
        batch: no columns.
        beta: reward a nat of log-probability a token, above 0.
        simpo_gamma: margin (rewards), at least 0.
        label_smoothing: e, in [0, 0.5].

    Returns:
        One loss a pair, in nats; rewards and log-probabilities of both sides.
    """
    rewards = beta * segments.sample_means(scores.logprobs, batch)
    chosen, rejected = margins.sides(rewards, batch)
    loss = margins.logistic(chosen - rejected - simpo_gamma, label_smoothing)
    return loss, margins.watched(scores, batch, rewards)
