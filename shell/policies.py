"""From options to the algorithms that learn from rewards: which loss, with which numbers."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core import advantages, algorithms, ratios, reduce
from core.losses import composition, policy
from shell import options

SCALES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group": advantages.group_normalized,
    "batch": advantages.batch_normalized,
    "none": advantages.centered,
}


def grpo(chosen: options.Options) -> algorithms.Algorithm:
    """Return the policy loss that was asked for, and what is put around it.

    Around it stand, the innermost first: the choice of tokens by entropy, the divergence from the reference,
    the bonus for entropy.
    """
    loss, by = _loss(chosen)
    needs, couples = [], "token" if chosen.importance_sampling_level == "token" else "sample"
    if chosen.loss_type == "vespo":
        couples = "sample"
    part, beta, bonus = chosen.top_entropy_quantile, chosen.beta or 0.0, chosen.entropy_coef
    if part is not None and part < 1:
        loss, couples = partial(composition.top_entropy, loss=loss, part=part), "step"
        needs.append("entropies")
    if beta:
        penalized = composition.with_corrected_kl if chosen.use_bias_correction_kl else composition.with_kl
        loss = partial(penalized, loss=loss, beta=beta)
        needs.append("reference_logprobs")
    if bonus:
        loss = partial(composition.with_entropy, loss=loss, coefficient=bonus, by=by)
        needs.append("entropies")
    return algorithms.grpo.evolve(
        loss=partial(composition.observed, loss=loss),
        reduce=by,
        columns=partial(algorithms.advantage, of=SCALES[str(chosen.scale_rewards)]),
        needs=tuple(dict.fromkeys(needs)),
        couples=couples,
    )


def rloo(chosen: options.Options) -> algorithms.Algorithm:
    """Return REINFORCE leave-one-out."""
    low, high = _bounds(chosen)
    columns: Callable[..., Any] = partial(algorithms.penalized_advantage, beta=chosen.beta or 0.0)
    loss = partial(policy.sequence_clipped, ratio=ratios.sequence_sum, low=low, high=high)
    return algorithms.rloo.evolve(
        loss=partial(composition.observed, loss=loss),
        columns=partial(_standardized, columns=columns) if chosen.normalize_advantages else columns,
        needs=("reference_logprobs",) if chosen.beta else (),
    )


def _standardized(
    rewards: Tensor, groups: Tensor, *, columns: Callable[..., Any], divergences: Tensor | None = None
) -> dict[str, Tensor]:
    """Bring the advantages of the step to mean 0 and deviation 1."""
    found = columns(rewards, groups, divergences=divergences)["advantage"]
    return {"advantage": advantages.standardized(found)}


def _loss(chosen: options.Options) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the loss itself and its reduction."""
    low, high = _bounds(chosen)
    by = {
        "grpo": reduce.sequence_mean,
        "dr_grpo": partial(reduce.constant, length=float(chosen.max_completion_length or 1)),
        "sapo": reduce.sequence_mean,
        "luspo": reduce.sequence_sum,
    }.get(str(chosen.loss_type), reduce.token_mean)
    delta = torch.inf if chosen.delta is None else chosen.delta
    if chosen.loss_type == "cispo":
        return partial(policy.cispo, cap=high), by
    if chosen.loss_type == "sapo":
        numbers = {"positive": chosen.sapo_temperature_pos, "negative": chosen.sapo_temperature_neg}
        return partial(policy.sapo, **{name: float(number or 1.0) for name, number in numbers.items()}), by
    if chosen.loss_type == "vespo":
        numbers = {
            "k_positive": chosen.vespo_k_pos,
            "rate_positive": chosen.vespo_lambda_pos,
            "k_negative": chosen.vespo_k_neg,
            "rate_negative": chosen.vespo_lambda_neg,
        }
        return partial(policy.vespo, **{name: float(number or 1.0) for name, number in numbers.items()}), by
    if chosen.importance_sampling_level == "token":
        return partial(policy.clipped, low=low, high=high, delta=delta), by
    # A loss of whole sequences is one number a sequence: over tokens it would count by their length.
    by = by if chosen.loss_type == "luspo" else reduce.sequence_mean
    return partial(policy.sequence_clipped, low=low, high=high, delta=delta), by


def _bounds(chosen: options.Options) -> tuple[float, float]:
    """Return how far the ratio may leave 1 on either side."""
    low = chosen.epsilon or 0.0
    return low, low if chosen.epsilon_high is None else chosen.epsilon_high
