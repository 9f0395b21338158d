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


def check(numbers: Mapping[str, Any], where: str) -> None:
    """Refuse a scaling that has no type or factor, before anything is loaded.

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
