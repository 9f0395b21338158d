"""Rotary positions beyond those that a model was trained with: `rope_scaling`."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shell import mistake, translate

if TYPE_CHECKING:
    import transformers  # mistakes in options are told before it is loaded

TYPES = ("linear", "dynamic", "yarn", "llama3")
EXAMPLE = "{rope_type: yarn, factor: 4.0}"
ORIGINAL = "original_max_position_embeddings"
_ANY = ("rope_type", "type", "factor", "rope_theta", "partial_rotary_factor", ORIGINAL)
_OF = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
}
"""What each type takes beside; transformers would only remark on another name, and take what it has."""
_PAIRS = {"yarn": ("beta_slow", 1, "beta_fast", 32), "llama3": ("low_freq_factor", 0, "high_freq_factor", 0)}


def check(numbers: Mapping[str, Any], where: str) -> None:
    """Refuse a scaling without a type or a factor, or with what its type does not take.

    Args:
        numbers: the option's value.
        where: it stands.

    Raises:
        mistake.Mistake: says what was wanted.
    """
    kind, factor = numbers.get("rope_type", numbers.get("type")), numbers.get("factor")
    if kind not in TYPES:
        hint = translate.hint(str(kind), TYPES)
        raise mistake.Mistake(
            f"{where}: rope_type {kind!r} came; one of {', '.join(TYPES)} was wanted, as in {EXAMPLE}.{hint}"
        )
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < math.inf:
        raise mistake.Mistake(
            f"{where}: factor {factor!r} came; a number of at least 1 was wanted, as in {EXAMPLE}."
        )
    # What is null is not told, as transformers reads it.
    _check_rest(str(kind), {name: value for name, value in numbers.items() if value is not None}, where)


def _check_rest(kind: str, numbers: Mapping[str, Any], where: str) -> None:
    """Refuse what a type does not take, or takes otherwise."""
    taken = (*_ANY, *_OF.get(kind, ()))
    for name, value in numbers.items():
        if name not in taken:
            hint = translate.hint(str(name), taken)
            raise mistake.Mistake(
                f"{where}: {name} came, and {kind} takes {', '.join(taken[2:])}; leave it out.{hint}"
            )
        wanted = None if name in ("rope_type", "type") else _unfit(name, value)
        if wanted:
            raise mistake.Mistake(f"{where}: {name} {value!r} came; {wanted} was wanted.")
    low, least, high, most = _PAIRS.get(kind, ("", 0, "", 1))
    if kind == "llama3" and not {low, high} <= numbers.keys():
        raise mistake.Mistake(f"{where}: llama3 takes {low} and {high}, and has no usual ones; name both.")
    if numbers.get(low, least) > numbers.get(high, most):
        raise mistake.Mistake(
            f"{where}: {low} {numbers.get(low, least)} and {high} {numbers.get(high, most)} came; the second "
            "at least as great was wanted."
        )


def _unfit(name: str, value: Any) -> str | None:
    """Say what was wanted of a number of a scaling; None where it is that."""
    if name == "truncate":
        return None if isinstance(value, bool) else "true or false"
    if name == ORIGINAL:
        fits = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return None if fits else "a whole number above 0"
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    return None if fits else "a number of at least 0"


def scaled(
    described: transformers.PretrainedConfig, numbers: Mapping[str, Any]
) -> transformers.PretrainedConfig:
    """Return a config whose positions are scaled, and that holds as many more of them.

    With `dynamic` each sequence that is longer than before has frequencies of its own, which sequences that
    share a prefix cannot have: the model goes on to hold what it held.

    Args:
        described: of the model; it is left as it is.
        numbers: `rope_type`, `factor` and what the type takes; see transformers' rope parameters.

    Raises:
        mistake.Mistake: the model's positions do not turn, or transformers refuses a number.
    """
    found = copy.deepcopy(described)
    text = found.get_text_config()
    before = getattr(text, "rope_parameters", None)
    if not before or not getattr(text, "max_position_embeddings", None):
        raise mistake.Mistake(
            f"rope_scaling: a {described.model_type} model has no rotary positions to scale; leave it out"
        )
    rest = {name: value for name, value in numbers.items() if name != "type"}
    kind = rest.setdefault("rope_type", numbers.get("type"))
    layers = [name for name, value in before.items() if isinstance(value, dict)]
    # Where layers differ, those that look back all the way are the ones whose positions run out.
    own = before["full_attention"] if "full_attention" in layers else before
    if all(own.get(name) == value for name, value in rest.items()):
        return found  # it is so already: its length would grow once more
    original = int(rest.get(ORIGINAL) or own.get(ORIGINAL) or text.max_position_embeddings)
    kept = {name: own[name] for name in ("rope_theta", "partial_rotary_factor") if name in own}
    made = {**kept, **rest} | ({} if kind in ("linear", "dynamic") else {ORIGINAL: original})
    text.rope_parameters = {**before, "full_attention": made} if layers else made
    if kind != "dynamic":
        text.max_position_embeddings = math.floor(original * rest["factor"])
    try:
        text.standardize_rope_params()
        text.validate_rope()
    except (KeyError, TypeError, ValueError) as problem:
        raise mistake.Mistake(
            f"rope_scaling: {problem} (transformers says so of rope_type {kind})"
        ) from problem
    return found
