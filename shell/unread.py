"""Options that a caller's own algorithm does not read, refused once it is imported and known."""

from collections.abc import Iterator

from core import algorithms
from shell import about, config, entries, idle, mistake, options, reference_checks

TEACHING = ("teacher_model", *reference_checks.ASKED)
MASKS = ("completion_only_loss", "assistant_only_loss")
REWARDED = ("reward_funcs", "reward_weights", "dynamic_sampling")
BOTH = ("temperature",)
"""What completions are drawn at, and a teacher is compared at."""


def check(command: config.Command, found: algorithms.Algorithm) -> None:
    """Refuse options that do nothing under an algorithm, and ask for what it cannot do without.

    Args:
        command: what was asked for; that of a built-in algorithm was checked when it was read.
        found: the algorithm.

    Raises:
        mistake.Mistake: names the option, and what the algorithm would have to be.
    """
    if command.algorithm in about.ALGORITHMS:
        return
    for name, why in _idle(found, taught=command.options.teacher_model is not None):
        if options.asked(command.algorithm, command.options, command.given, name):
            came = entries.shown(getattr(command.options, name))
            raise mistake.Mistake(f"{name}: {came} came, and {command.algorithm} {why}; leave it out.")
    if "divergences" in found.reads and command.options.teacher_model is None:
        raise mistake.Mistake(
            f"--teacher_model: nothing came, and {command.algorithm} reads divergences; a folder or hub id "
            "was wanted, as in --teacher_model BASE."
        )


def _idle(found: algorithms.Algorithm, *, taught: bool) -> Iterator[tuple[str, str]]:
    """Give the options that an algorithm does not read, and why; `taught`: there is a teacher."""
    if found.rows == "prompts":
        yield "truncation", idle.UNCUT
    for name in options.FIELDS:
        if about.OWN not in (options.known(name).only or ()):
            continue
        read, why = _read(name, found, judged=taught and found.columns is None)
        if not read:
            yield name, why


def _read(name: str, found: algorithms.Algorithm, *, judged: bool) -> tuple[bool, str]:
    """Say whether an algorithm reads an option, and why not; `judged`: a teacher stands in for rewards."""
    taught, rows = "divergences" in found.reads, found.rows
    if name == "ref_model":
        return "reference_logprobs" in found.needs, "needs no reference_logprobs"
    if name in TEACHING:
        return taught, "reads no divergences"
    if name in MASKS:
        return rows == "text", f"trains on {rows}, which say themselves what is trained"
    if name in REWARDED and rows == "prompts":
        return not judged, "makes nothing of rewards: its teacher judges every token"
    return rows == "prompts" or (taught and name in BOTH), f"draws no completions of {rows}"
