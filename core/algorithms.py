"""Algorithm, a record of functions and numbers, and one value of it per published method."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor

from core import advantages, metrics, pack, ratios, reduce
from core.losses import (
    anchored,
    pair_composition,
    policy,
    preference,
    reference_free,
    supervised,
    transport,
    unpaired,
)
from core.losses import (
    distill as distillation,
)
from core.losses import (
    reward as reward_models,
)
from core.plan import batching

Rows = Literal["text", "pairs", "unpaired", "prompts"]
Couples = batching.Couples


@attrs.frozen(kw_only=True)
class Algorithm:
    """What is trained on, what is minimized, and what it reads; packs, trees and ranks are not its business.

    Attributes:
        loss: `(scores, batch) -> (values, metrics)`: one value a row, sample or pair, and metrics likewise.
            What `carry` holds is passed to it by keyword.
        reduce: `(values, batch) -> scalar`, weights from the counts of the step alone.
        rows: what a row of the dataset is.
        columns: `(rewards, groups) -> {name: one number a sample}`, once a step, before packing; None: no
            such columns. Rewards are the weighted sum over reward functions, NaN for none. A parameter that
            is called `parts` is given each function's own, `[samples, functions]`; one called `divergences`
            each sample's sum of `kl.k1` from the reference.
        needs: fields of Scores beside `logprobs` that the loss reads, and `reference_logprobs`; what is not
            asked for is not computed.
        watches: fields of Scores that only its metrics read; the loss must accept that they are None.
        linear: the scalar is a sum of numbers times log-probabilities: its gradient is known before the
            forward, which saves the head a product.
        couples: the least that must be seen together for the loss to be a sum over it.
        carry: numbers that it remembers between steps.
        next_carry: `(carry, metrics) -> carry` after each step; None: it stays as it is.
    """

    loss: Callable[..., tuple[Tensor, Mapping[str, Tensor | metrics.Metric]]]
    reduce: Callable[[Tensor, pack.Batch], Float[Tensor, ""]] = reduce.token_mean
    rows: Rows = "text"
    columns: Callable[..., Mapping[str, Tensor]] | None = None
    needs: tuple[str, ...] = ()
    watches: tuple[str, ...] = ()
    linear: bool = False
    couples: Couples = "token"
    carry: Mapping[str, float] = attrs.field(factory=dict)
    next_carry: Callable[[Mapping[str, float], Mapping[str, float]], Mapping[str, float]] | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Return what the loss and its metrics read, `needs` and `watches`."""
        return (*self.needs, *self.watches)

    def evolve(self, **changes: Any) -> "Algorithm":
        """Return a variant with some fields changed; of another loss or reduction `linear` is said anew."""
        known = {} if changes.keys() & {"linear", "loss", "reduce"} == set() else {"linear": False}
        return attrs.evolve(self, **(known | changes))


sft = Algorithm(loss=supervised.nll, watches=("entropies", "top1"), linear=True)
"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens."""

dft = sft.evolve(loss=supervised.dft)
"""Dynamic fine-tuning, Wu et al. 2025 (arXiv:2508.05629)."""


def advantage(
    rewards: Float[Tensor, " samples"],
    groups: Int[Tensor, " samples"],
    *,
    of: Callable[[Tensor, Tensor], Tensor] = advantages.group_normalized,
) -> dict[str, Tensor]:
    """Make the one column that most policy losses read.

    Args:
        rewards: any unit; NaN for none.
        groups: which prompt each sample answers.
        of: a function of `core.advantages`.
    """
    return {"advantage": of(rewards, groups)}


def decoupled_advantage(
    rewards: Float[Tensor, " samples"],
    groups: Int[Tensor, " samples"],
    *,
    parts: Float[Tensor, "samples functions"] | None = None,
    weights: Sequence[float] | None = None,
) -> dict[str, Tensor]:
    """Make GDPO's column, each reward function normalized for itself.

    Args:
        rewards: used where there are no parts: the only function's.
        groups: which prompt each sample answers.
        parts: of each reward function, before weights; NaN for none.
        weights: of the functions; None: 1 each.
    """
    parts = rewards[:, None] if parts is None else parts
    return {"advantage": advantages.normalize_then_sum(parts, groups, weights=weights)}


def penalized_advantage(
    rewards: Float[Tensor, " samples"],
    groups: Int[Tensor, " samples"],
    *,
    divergences: Float[Tensor, " samples"] | None = None,
    beta: float = 0.05,
    low: float = -math.inf,
    high: float = math.inf,
) -> dict[str, Tensor]:
    """Make RLOO's column, the divergence from the reference being part of the reward.

    Args:
        rewards: any unit; NaN for none.
        groups: which prompt each sample answers.
        divergences: in nats, each sample's sum of `kl.k1` from the reference; None: as if there were none.
        beta: reward a nat.
        low, high: bounds of the reward, before the penalty.
    """
    divergences = torch.zeros_like(rewards) if divergences is None else divergences
    kept = advantages.penalized(rewards, divergences, beta=beta, low=low, high=high)
    return {"advantage": advantages.leave_one_out(kept, groups)}


grpo = Algorithm(
    loss=policy.clipped,
    reduce=reduce.sequence_mean,
    rows="prompts",
    columns=advantage,
    watches=("entropies",),
)
"""Group relative policy optimization, Shao et al. 2024 (arXiv:2402.03300), eq. 3, without the divergence."""

dapo = grpo.evolve(loss=partial(policy.clipped, low=0.2, high=0.28), reduce=reduce.token_mean)
"""DAPO, Yu et al. 2025 (arXiv:2503.14476): clip-higher, and a mean over all tokens of the step."""

dapo_prompts = dapo.evolve(reduce=reduce.prompt_mean)
"""DAPO as its eq. 8 reads: a mean over the tokens of each prompt's answers, then over prompts."""

bnpo = grpo.evolve(reduce=reduce.token_mean)
"""GRPO's loss and bounds, averaged over all tokens; over those of the step, never of a micro-batch."""

dr_grpo = grpo.evolve(
    columns=partial(advantage, of=advantages.centered), reduce=partial(reduce.constant, length=512)
)
"""Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783): one length divides all, no deviation."""

gspo = grpo.evolve(loss=policy.sequence_clipped, couples="sample")
"""Group sequence policy optimization, Zheng et al. 2025 (arXiv:2507.18071), eq. 5."""

luspo = gspo.evolve(loss=partial(policy.sequence_clipped, low=2e-3, high=2.5e-3), reduce=reduce.sequence_sum)
"""Length-unbiased sequence policy optimization, Liu et al. 2026 (arXiv:2602.05261), bounds of sec. 5.1."""

cispo = grpo.evolve(loss=partial(policy.cispo, cap=5.0), reduce=reduce.token_mean)
"""CISPO, MiniMax 2025 (arXiv:2506.13585), eq. 4, with ScaleRL's cap (arXiv:2510.13786)."""

sapo = grpo.evolve(loss=policy.sapo)
"""Soft adaptive policy optimization, Gao et al. 2025 (arXiv:2511.20347)."""

vespo = grpo.evolve(loss=policy.vespo, reduce=reduce.token_mean, couples="sample")
"""Variational sequence-level soft policy optimization, Shen et al. 2026 (arXiv:2602.10693)."""

gmpo = grpo.evolve(loss=policy.gmpo, couples="sample")
"""Geometric-mean policy optimization, Zhao et al. 2025 (arXiv:2507.20673)."""

gdpo = dapo.evolve(loss=policy.clipped, columns=decoupled_advantage)
"""Group reward-decoupled policy optimization, Liu et al. 2026 (arXiv:2601.05242)."""

rloo = gspo.evolve(
    loss=partial(policy.sequence_clipped, ratio=ratios.sequence_sum, low=0.2, high=0.2),
    columns=penalized_advantage,
    needs=("reference_logprobs",),
)
"""REINFORCE leave-one-out, Ahmadian et al. 2024 (arXiv:2402.14740), one action an answer."""

dpo = Algorithm(
    loss=preference.sigmoid,
    reduce=reduce.pair_mean,
    rows="pairs",
    needs=("reference_logprobs",),
    watches=("entropies",),
    couples="pair",
)
"""Direct preference optimization, Rafailov et al. 2023 (arXiv:2305.18290), eq. 7."""

orpo = dpo.evolve(loss=reference_free.orpo, needs=())
"""Odds ratio preference optimization, Hong et al. 2024 (arXiv:2403.07691), eq. 6."""

cpo = dpo.evolve(loss=reference_free.cpo, needs=())
"""Contrastive preference optimization, Xu et al. 2024 (arXiv:2401.08417)."""

simpo = dpo.evolve(loss=partial(reference_free.simpo, beta=2.0), needs=())
"""Simple preference optimization, Meng et al. 2024 (arXiv:2405.14734), eq. 6."""

preferences: Mapping[str, Algorithm] = {
    "sigmoid": dpo,
    **{
        loss.__name__: dpo.evolve(loss=loss)
        for loss in (
            preference.hinge,
            preference.ipo,
            preference.sigmoid_norm,
            preference.robust,
            preference.exo_pair,
            preference.discopop,
            anchored.nca_pair,
            anchored.bco_pair,
            anchored.sppo_hard,
            anchored.apo_zero,
            anchored.apo_down,
        )
    },
    "aot": dpo.evolve(loss=transport.aot, couples="step"),
    "aot_unpaired": dpo.evolve(loss=transport.aot_unpaired, couples="step"),
    "sft": dpo.evolve(loss=preference.sft, needs=()),
    "orpo": orpo,
    "cpo": cpo,
    "simpo": simpo,
}
"""DPO and its relatives by the names that the field gives their losses."""


def preference_mixture(parts: Sequence[tuple[Algorithm, float]]) -> Algorithm:
    """Add the losses of several algorithms over pairs, each with a weight; see `pair_composition.mixture`.

    >>> named = zip(("sigmoid", "bco_pair", "sft"), (0.8, 0.2, 1.0))
    >>> preference_mixture([(preferences[name], weight) for name, weight in named]).needs
    ('reference_logprobs',)

    Args:
        parts: (algorithm, weight), at least one, each one value a pair.

    Raises:
        ValueError: there is none, or one is not over pairs.
    """
    if not parts or any(one.rows != "pairs" or one.reduce is not reduce.pair_mean for one, _ in parts):
        raise ValueError(
            f"preference_mixture: {len(parts)} algorithms came; at least one, each with one value a pair, is "
            "wanted."
        )
    step = any(one.couples == "step" for one, _ in parts)
    return parts[0][0].evolve(
        loss=partial(pair_composition.mixture, parts=tuple((one.loss, weight) for one, weight in parts)),
        needs=tuple(dict.fromkeys(name for one, _ in parts for name in one.needs)),
        watches=tuple(dict.fromkeys(name for one, _ in parts for name in one.watches)),
        couples="step" if step else "pair",
    )


kto = Algorithm(
    loss=unpaired.kto,
    reduce=reduce.sample_mean,
    rows="unpaired",
    needs=("mismatched", "reference_logprobs"),
    watches=("entropies",),
    couples="step",
)
"""Kahneman-Tversky optimization, Ethayarajh et al. 2024 (arXiv:2402.01306), eq. 8."""

apo_zero_unpaired = kto.evolve(
    loss=unpaired.apo_zero_unpaired, needs=("reference_logprobs",), couples="sample"
)
"""APO-zero without pairs, D'Oosterlinck et al. 2024 (arXiv:2408.06266), eq. 7."""

reward = Algorithm(
    loss=reward_models.bradley_terry,
    reduce=reduce.pair_mean,
    rows="pairs",
    needs=("values",),
    couples="pair",
)
"""A reward model of pairs, Ouyang et al. 2022 (arXiv:2203.02155), eq. 1."""

distill = Algorithm(
    loss=distillation.to_teacher,
    rows="prompts",
    needs=("divergences",),
    watches=("entropies",),
)
"""Distillation on the student's own answers, Agarwal et al. 2023 (arXiv:2306.13649)."""
