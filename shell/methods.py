"""From options to the built-in algorithms: which loss, with which numbers."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from core import algorithms
from core.losses import margins, pair_composition, preference, reward, unpaired
from shell import options, policies

DIVERGENCES: Mapping[str, preference.Divergence] = {
    "forward_kl": margins.forward_kl,
    "js_divergence": margins.js_divergence,
}


def sft(chosen: options.Options) -> algorithms.Algorithm:
    """Return supervised fine-tuning or its relative."""
    return {"nll": algorithms.sft, "dft": algorithms.dft}[str(chosen.loss_type)]


def dpo(chosen: options.Options) -> algorithms.Algorithm:
    """Return the preference loss that was asked for, or the weighted sum of several."""
    names = (chosen.loss_type,) if isinstance(chosen.loss_type, str) else chosen.loss_type or ()
    weights = chosen.loss_weights or (1.0,) * len(names)
    parts = [(_preference(name, chosen), weight) for name, weight in zip(names, weights, strict=True)]
    found = parts[0][0] if len(parts) == 1 and weights[0] == 1 else algorithms.preference_mixture(parts)
    if not chosen.use_weighting:
        return found
    return found.evolve(
        loss=partial(pair_composition.policy_weighted, loss=found.loss),
        needs=(*found.needs, "log_sum_squares"),
    )


def kto(chosen: options.Options) -> algorithms.Algorithm:
    """Return the loss over labeled answers that was asked for."""
    named = {"kto": algorithms.kto, "apo_zero_unpaired": algorithms.apo_zero_unpaired}
    found = named[str(chosen.loss_type)]
    return found.evolve(loss=_with_numbers(getattr(unpaired, str(chosen.loss_type)), chosen))


def reward_model(chosen: options.Options) -> algorithms.Algorithm:
    """Return the loss of a reward model."""
    pull = chosen.center_rewards_coefficient or 0.0
    return algorithms.reward.evolve(loss=partial(reward.bradley_terry, center_rewards_coefficient=pull))


def distill(chosen: options.Options) -> algorithms.Algorithm:
    """Return distillation on answers of the student's own, or on those that the rows bring."""
    return algorithms.distill.evolve(rows="prompts" if chosen.lmbda else "text")


BUILT: Mapping[str, Callable[[options.Options], algorithms.Algorithm]] = {
    "sft": sft,
    "dpo": dpo,
    "kto": kto,
    "reward": reward_model,
    "grpo": policies.grpo,
    "rloo": policies.rloo,
    "distill": distill,
}


def _preference(name: str, chosen: options.Options) -> algorithms.Algorithm:
    """Return one preference loss with its numbers."""
    found = algorithms.preferences[name]
    loss = found.loss
    if chosen.f_divergence_type != "reverse_kl":
        loss = pair_composition.diverging(loss, _divergence(chosen))
    loss = _with_numbers(loss, chosen)
    if chosen.ld_alpha is not None:
        loss = partial(pair_composition.length_desensitized, loss=loss, ld_alpha=chosen.ld_alpha)
    return found.evolve(loss=loss)


def _divergence(chosen: options.Options) -> preference.Divergence:
    """Return the divergence that stands in for the log-ratio."""
    if chosen.f_divergence_type == "alpha_divergence":
        coefficient = chosen.f_alpha_divergence_coef
        return partial(margins.alpha_divergence, f_alpha_divergence_coef=float(coefficient or 0.0))
    return DIVERGENCES[str(chosen.f_divergence_type)]


def _with_numbers(loss: Callable[..., Any], chosen: options.Options) -> Callable[..., Any]:
    """Bind the options that bear the names of the loss' own numbers."""
    taken = inspect.signature(loss).parameters
    return partial(loss, **{name: getattr(chosen, name) for name in taken if name in options.FIELDS})
