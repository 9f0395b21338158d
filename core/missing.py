"""Fields of the scores that a loss reads and does not declare: they are None where nobody asked for them."""

from collections.abc import Callable, Sequence

import attrs
from torch import Tensor

from core import algorithms, pack

TOLERANCE = 1e-10
FIELDS = tuple(field.name for field in attrs.fields(pack.Scores) if field.name != "logprobs")


def problem(algorithm: algorithms.Algorithm, run: Callable[[Sequence[str]], Tensor]) -> str:
    """Return what is wrong with the loss of a step that is not logged, empty where it is the same.

    Such a step is scored with `needs` alone; what only metrics read, `watches`, is None.

    Args:
        algorithm: any Algorithm.
        run: returns the loss of a batch whose scores have these fields.
    """
    failed = _failure(run, algorithm.needs)
    if failed is None:
        whole, again, alone = (run(f).item() for f in (algorithm.reads, algorithm.reads, algorithm.needs))
        if whole != again or abs(whole - alone) <= TOLERANCE * max(abs(whole), 1.0):
            return ""  # one that is another each time, or no number, is another property's to tell
        return (
            f"the loss is {alone:.6g} without {', '.join(algorithm.watches)} and {whole:.6g} with them: what "
            "the loss reads belongs into needs."
        )
    read = _read(algorithm.needs, run)
    if not read:
        raise failed
    return (
        f"the loss reads {' and '.join(read)}, None at steps that are not logged, and fails there "
        f"({type(failed).__name__}: {failed}); declare needs={(*algorithm.needs, *read)}."
    )


def _failure(run: Callable[[Sequence[str]], Tensor], fields: Sequence[str]) -> Exception | None:
    """Return what a loss raises over scores with these fields, None where it runs."""
    try:
        run(fields)
    except (TypeError, AttributeError, ValueError) as problem:  # what comes of None in arithmetic and metrics
        return problem
    return None


def _read(needs: Sequence[str], run: Callable[[Sequence[str]], Tensor]) -> list[str]:
    """Return the undeclared fields without any of which the loss fails; none where it fails with all, too."""
    others = [name for name in FIELDS if name not in needs]
    if _failure(run, [*needs, *others]) is not None:
        return []
    return [name for name in others if _failure(run, [*needs, *(n for n in others if n != name)])]
