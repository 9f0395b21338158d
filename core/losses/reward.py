"""Reward-model losses: a scalar for each answer, higher for the chosen one.

Axes: terms (trained tokens), samples, pairs.
"""

from collections.abc import Mapping
from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from core import metrics, pack, segments
from core.losses import margins

Metrics: TypeAlias = Mapping[str, Tensor | metrics.Metric]


def bradley_terry(
    scores: pack.Scores, batch: pack.Batch, *, center_rewards_coefficient: float = 0.0
) -> tuple[Float[Tensor, " pairs"], Metrics]:
    """Fit the Bradley-Terry model of which answer is preferred.

        loss = -logsig(r_c - r_l - margin) + coefficient (r_c + r_l)^2

    Ouyang et al. 2022 (arXiv:2203.02155), eq. 1; margin: Touvron et al. 2023 (arXiv:2307.09288), eq. 2;
    centering: Eisenstein et al. 2023 (arXiv:2312.09244). A reward is read at the last row of its sample,
    which the sample's length tells, never a token's value; so the last token of a sample is to be trained.

    Args:
        scores: `values` (rewards).
        batch: column `margin` (rewards; per sample, the chosen side's is read) where the rows have one.
        center_rewards_coefficient: pulls the rewards of a pair to a sum of 0, at least 0.

    Returns:
        One loss a pair, in nats; `accuracy` (equal rewards are a miss), `margin` and the rewards' range.
    """
    rewards = segments.last_rows(pack.field(scores, "values"), batch)
    chosen, rejected = margins.sides(rewards, batch)
    apart = chosen - rejected
    asked = batch.samples.columns.get("margin")
    wanted = apart if asked is None else apart - asked.index_select(0, batch.pairs.chosen)
    loss = -logsigmoid(wanted) + center_rewards_coefficient * (chosen + rejected).square()
    seen = batch.samples.num_terms > 0
    return loss, {
        "accuracy": (apart > 0).to(apart.dtype),
        "margin": apart,
        "min_reward": metrics.minimum(rewards, seen),
        "mean_reward": metrics.mean(rewards, seen),
        "max_reward": metrics.maximum(rewards, seen),
    }
