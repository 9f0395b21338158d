"""Distillation: a student's distribution at each trained token, drawn to that of a teacher.

Axes: terms (trained tokens).
"""

from collections.abc import Mapping
from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor

from core import pack

Metrics: TypeAlias = Mapping[str, Tensor]

NEAR = 0.01


def to_teacher(scores: pack.Scores, batch: pack.Batch) -> tuple[Float[Tensor, " terms"], Metrics]:
    """Take each token's divergence from the teacher as its loss.

        loss = divergence(student, teacher)

    Which divergence it is was decided where it was measured: `core.divergence.divergences` over the whole
    vocabulary, or `core.divergence.kept` over the tokens that a server told. GKD, Agarwal et al. 2023
    (arXiv:2306.13649), sec. 3; on the student's own answers, the gradient stops at the draw.

    Args:
        scores: `divergences` (nats); `entropies` (nats) for the metrics.
        batch: no columns.

    Returns:
        One loss a trained token, in nats; `entropy`.
    """
    watched = {} if scores.entropies is None else {"entropy": scores.entropies}
    return pack.field(scores, "divergences"), watched


def fading(beta: float) -> str:
    """Say what is wrong with a beta that is nearly, but not quite, an end; an empty string if nothing.

    >>> print(fading(0.999))
    beta 0.999 is within 0.01 of 1, where the divergence shrinks towards 0; take 1 for KL(student || teacher).

    Args:
        beta: of `core.divergence.divergences`, in [0, 1].
    """
    for end, name in ((0, "KL(teacher || student)"), (1, "KL(student || teacher)")):
        if 0.0 < abs(beta - end) < NEAR:
            return (
                f"beta {beta:g} is within {NEAR:g} of {end}, where the divergence shrinks towards 0; "
                f"take {end} for {name}."
            )
    return ""
