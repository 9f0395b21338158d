"""What can be known of an option, and the algorithms that read options."""

from collections.abc import Mapping
from typing import Any

import attrs

# True: the algorithm runs. A known name that is not built yet is refused as such, not as a misspelling.
ALGORITHMS = {
    "sft": True,
    "dpo": True,
    "kto": True,
    "reward": True,
    "grpo": True,
    "rloo": True,
    "distill": True,
}
# What others call an algorithm of its own.
KINDRED = {
    **{name: f"dpo --loss_type {name}" for name in ("ipo", "orpo", "cpo", "simpo")},
    **{"gkd": "distill", "ppo": "grpo", "gspo": "grpo --loss_type gspo", "dapo": "grpo", "rm": "reward"},
}
# Any `module:name`: such an algorithm brings its loss and numbers, and reads options of data and rollouts.
OWN = "own"
# What it trains on, and the built-in algorithm whose defaults it takes where they depend on that.
KIN = {"text": "sft", "pairs": "dpo", "unpaired": "kto", "prompts": "grpo"}

POLICY = ("grpo", "rloo")
GENERATING = ("grpo", "rloo", "distill")
ROLLOUTS = (*GENERATING, OWN)

# An entry that is a mapping has these keys, of which the path is needed.
ENTRY = ("path", "weight", "config", "split")
FILES = (".jsonl", ".json", ".parquet", ".csv")
"""What a file of rows ends in."""

Rows = tuple[str | dict[str, str | float | None], ...] | str | None


@attrs.frozen(kw_only=True)
class About:
    """What is known of an option beside its name, type and default.

    Attributes:
        group: the heading that help puts it under.
        text: one line of help.
        only: the algorithms that read it, with their defaults; None: every algorithm reads it.
        differs: defaults of algorithms for which the field's own is not right.
        under: defaults that hold under some values of `loss_type` in the place of the algorithm's.
        choices: values that each algorithm takes; None: the type says it all.
        low, high: the least and the greatest value of a number.
        above, below: what a value must exceed, and what it must stay under.
        built: whether its part is built; before that only the default is taken.
        result: whether another value gives other weights, so that a run cannot be continued under it.
    """

    group: str
    text: str
    only: Mapping[str, Any] | None = None
    differs: Mapping[str, Any] = attrs.field(factory=dict)
    under: Mapping[str, Any] = attrs.field(factory=dict)
    choices: Mapping[str, tuple[str, ...]] | None = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    built: bool = True
    result: bool = True


def option(group: str, default: Any, text: str, **known: Any) -> Any:
    """Declare one option."""
    return attrs.field(default=default, metadata={"about": About(group=group, text=text, **known)})


def by(names: tuple[str, ...], default: Any) -> dict[str, Any]:
    """Give several algorithms one default."""
    return dict.fromkeys(names, default)
