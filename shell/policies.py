"""From options to the algorithms that learn from rewards: which loss, with which numbers."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core import advantages, algorithms, ratios, reduce, segments
from core.losses import composition, policy
from shell import options

SCALES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group": advantages.group_normalized,
    "batch": advantages.batch_normalized,
    "none": advantages.centered,
}
WEIGHTS: Mapping[str, Callable[..., ratios.Weights]] = {
    "token_truncate": ratios.token_truncate,
    "token_mask": ratios.token_mask,
    "sequence_truncate": ratios.sequence_truncate,
    "sequence_mask": ratios.sequence_mask,
    "sequence_mean_truncate": partial(ratios.sequence_truncate, fold=segments.sample_means),
    "sequence_mean_mask": partial(ratios.sequence_mask, fold=segments.sample_means),
}
# Losses in which all rows of a sample meet, whatever has the ratio.
OF_SAMPLES = ("vespo", "gmpo")


def grpo(chosen: options.Options) -> algorithms.Algorithm:
    """Return the policy loss that was asked for, and what is put around it.

    Around it stand, the innermost first: the mask of answers that the policy has left, the choice of tokens
    by entropy, the weights of trainer over generator, the divergence from the reference, the bonus for
    entropy.
    """
    loss, by = _loss(chosen)
    needs, couples = [], "token" if chosen.importance_sampling_level == "token" else "sample"
    couples = "sample" if chosen.loss_type in OF_SAMPLES else couples
    part, beta, bonus = chosen.top_entropy_quantile, chosen.beta, chosen.entropy_coef
    if chosen.off_policy_mask_threshold is not None:
        threshold = chosen.off_policy_mask_threshold
        loss = partial(composition.off_policy_masked, loss=loss, threshold=threshold)
        couples = "sample"
    if part is not None and part < 1:
        loss, couples = partial(composition.top_entropy, loss=loss, part=part), "step"
        needs.append("entropies")
    weights = _weights(chosen)
    if weights is not None and chosen.loss_type != "vespo":
        loss = partial(composition.weighted, loss=loss, weights=weights)
        couples = "sample" if couples == "token" else couples
    if beta:
        penalized = composition.with_corrected_kl if chosen.use_bias_correction_kl else composition.with_kl
        loss = partial(penalized, loss=loss, beta=beta)
        needs.append("reference_logprobs")
    loss = loss if weights is not None else partial(composition.observed, loss=loss)
    entropy = _entropy(chosen)
    if bonus or entropy:
        # Outermost: its coefficient is given to it by what the algorithm remembers.
        constant = {} if entropy else {"coefficient": bonus}
        loss = partial(composition.with_entropy, loss=loss, by=by, **constant)
        needs.append("entropies")
    return algorithms.grpo.evolve(
        loss=loss,
        **entropy,
        reduce=by,
        columns=_columns(chosen),
        needs=tuple(dict.fromkeys(needs)),
        couples=couples,
    )


def _entropy(chosen: options.Options) -> dict[str, Any]:
    """Return what remembers and moves the coefficient of the entropy bonus, empty where it is constant."""
    if not chosen.use_adaptive_entropy:
        return {}
    target, step, low, high = (
        float(options.number(chosen, name))
        for name in ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")
    )
    moved = partial(composition.adapted_entropy, target=target, step=step, low=low, high=high)
    return {
        "carry": {"coefficient": max(low, chosen.entropy_coef or 0.0), "active": 0.0},
        "next_carry": moved,
    }


def rloo(chosen: options.Options) -> algorithms.Algorithm:
    """Return REINFORCE leave-one-out."""
    low, high = _bounds(chosen)
    beta = options.number(chosen, "beta")
    columns: Callable[..., Any] = partial(algorithms.penalized_advantage, beta=beta)
    loss = partial(policy.sequence_clipped, ratio=ratios.sequence_sum, low=low, high=high)
    return algorithms.rloo.evolve(
        loss=partial(composition.observed, loss=loss),
        columns=partial(_standardized, columns=columns) if chosen.normalize_advantages else columns,
        needs=("reference_logprobs",) if beta else (),
    )


def _standardized(
    rewards: Tensor, groups: Tensor, *, columns: Callable[..., Any], divergences: Tensor | None = None
) -> dict[str, Tensor]:
    """Bring the advantages of the step to mean 0 and deviation 1."""
    found = columns(rewards, groups, divergences=divergences)["advantage"]
    return {"advantage": advantages.standardized(found)}


def _columns(chosen: options.Options) -> Callable[..., Mapping[str, Tensor]]:
    """Return what makes advantages of rewards."""
    if chosen.multi_objective_aggregation == "normalize_then_sum":
        return partial(algorithms.decoupled_advantage, weights=chosen.reward_weights)
    return partial(algorithms.advantage, of=SCALES[str(chosen.scale_rewards)])


def _weights(chosen: options.Options) -> Callable[..., ratios.Weights] | None:
    """Return the weights of trainer over generator, None where both are taken for the same."""
    asked = chosen.vllm_importance_sampling_correction
    if not (chosen.engine == "vllm" if asked is None else asked):
        return None
    return partial(
        WEIGHTS[str(chosen.vllm_importance_sampling_mode)],
        floor=chosen.vllm_importance_sampling_clip_min or 0.0,
        cap=options.number(chosen, "vllm_importance_sampling_clip_max"),
    )


def _loss(chosen: options.Options) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the loss itself and its reduction."""
    kind, (low, high) = str(chosen.loss_type), _bounds(chosen)
    delta = torch.inf if chosen.delta is None else chosen.delta
    length = float(options.number(chosen, "max_completion_length"))
    by = {
        "grpo": reduce.sequence_mean,
        "dr_grpo": partial(reduce.constant, length=length),
        "sapo": reduce.sequence_mean,
        "luspo": reduce.sequence_sum,
        "gspo": reduce.sequence_mean,
        "gmpo": reduce.sequence_mean,
        "dapo_prompts": reduce.prompt_mean,
    }.get(kind, reduce.token_mean)
    if kind == "cispo":
        return partial(policy.cispo, cap=high), by
    if kind == "gmpo":
        return partial(policy.gmpo, low=low, high=high), by
    if kind == "sapo":
        return partial(policy.sapo, **_numbers(chosen, _SAPO)), by
    if kind == "vespo":
        return partial(policy.vespo, **_numbers(chosen, _VESPO), weights=_weights(chosen)), by
    if chosen.importance_sampling_level == "token":
        return partial(policy.clipped, low=low, high=high, delta=delta), by
    # A loss of whole sequences is one number a sequence: over tokens it would count by their length.
    by = by if kind == "luspo" else reduce.sequence_mean
    return partial(policy.sequence_clipped, low=low, high=high, delta=delta), by


# Numbers of a loss, each by the option that sets it.
_SAPO = {"positive": "sapo_temperature_pos", "negative": "sapo_temperature_neg"}
_VESPO = {
    "k_positive": "vespo_k_pos",
    "rate_positive": "vespo_lambda_pos",
    "k_negative": "vespo_k_neg",
    "rate_negative": "vespo_lambda_neg",
}


def _numbers(chosen: options.Options, known: Mapping[str, str]) -> dict[str, float]:
    """Return the numbers that are called otherwise in a loss than among the options."""
    return {name: float(options.number(chosen, option)) for name, option in known.items()}


def _bounds(chosen: options.Options) -> tuple[float, float]:
    """Return how far the ratio may leave 1 on either side."""
    low = options.number(chosen, "epsilon")
    return low, low if chosen.epsilon_high is None else chosen.epsilon_high
