"""One table of options that are read only under others, so that none does nothing without a word.

What only some losses read stands beside these losses, in `loss_checks` and `rollout_checks`; what only some
algorithms read, in the options themselves.
"""

from collections.abc import Callable, Container

import attrs

from shell import entries, options


@attrs.frozen
class Idle:
    """Options that nothing reads under others.

    Attributes:
        names: of the options.
        under: says of an algorithm's name and its options whether they are idle.
        why: what is so, and what to do; after what came.
    """

    names: tuple[str, ...]
    under: Callable[[str, options.Options], bool]
    why: str


def _answers(algorithm: str, chosen: options.Options) -> bool:
    """Say whether all that is trained is what the policy wrote."""
    return algorithm in ("grpo", "rloo") or (algorithm == "distill" and chosen.lmbda == 1)


def _silent(algorithm: str, chosen: options.Options) -> bool:
    """Say whether a student answers nothing."""
    return algorithm == "distill" and not chosen.lmbda


UNCUT = "no prompt is cut: one that leaves no room for its completion is dropped"
TABLE = (
    Idle(("truncation",), _answers, f"{UNCUT}; leave it out."),
    Idle(
        (
            *("num_generations", "max_completion_length", "top_p", "top_k", "min_p"),
            "cache_implementation",
        ),
        _silent,
        "with lmbda 0 the student answers nothing; leave it out.",
    ),
    Idle(
        ("completion_only_loss", "assistant_only_loss"),
        lambda algorithm, chosen: algorithm == "distill" and chosen.lmbda == 1,
        "with lmbda 1 the student's answers are what is trained; leave it out.",
    ),
    Idle(
        ("beta",),
        lambda algorithm, chosen: algorithm == "dpo" and chosen.loss_type in ("sft", ("sft",)),
        "loss_type sft imitates the chosen answers alone; leave it out.",
    ),
    Idle(
        ("ref_model_mixup_alpha", "ref_model_sync_steps"),
        lambda algorithm, chosen: not chosen.sync_ref_model,
        "the reference stays; set sync_ref_model.",
    ),
    Idle(
        ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max"),
        lambda algorithm, chosen: not chosen.use_adaptive_entropy,
        "only an adaptive coefficient reads it; set use_adaptive_entropy.",
    ),
)


def find(algorithm: str, chosen: options.Options, given: Container[str]) -> tuple[str, str] | None:
    """Find an option that was set and that nothing reads under the others.

    Args:
        algorithm: a name.
        chosen: the options.
        given: names of those that were set.

    Returns:
        Its name, and what is wrong with it; None where there is none.
    """
    for row in TABLE:
        for name in row.names:
            if row.under(algorithm, chosen) and options.asked(algorithm, chosen, given, name):
                return name, f"{entries.shown(getattr(chosen, name))} came, and {row.why}"
    return None
