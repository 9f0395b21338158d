"""Algorithm, a record of functions and numbers, and one value of it per published method."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
from jaxtyping import Float
from torch import Tensor

from core import pack, reduce
from core.losses import supervised

Rows = Literal["text", "pairs", "unpaired", "prompts"]
Couples = Literal["token", "sample", "pair", "group", "step"]


@attrs.frozen(kw_only=True)
class Algorithm:
    """What is trained on, what is minimised, and what it reads; packs, trees and ranks are not its business.

    Attributes:
        loss: `(scores, batch) -> (values, metrics)`: one value a row, sample or pair, and metrics likewise.
            What `carry` holds is passed to it by keyword.
        reduce: `(values, batch) -> scalar`, weights from the counts of the step alone.
        rows: what a row of the dataset is.
        columns: `(rewards, groups) -> {name: one number a sample}`, once a step, before packing; None: no
            such columns.
        needs: fields of Scores beside `logprobs` that the loss reads; what is not asked for is not computed.
        watches: fields of Scores that only its metrics read; the loss must accept that they are None.
        couples: the least that must be seen together for the loss to be a sum over it.
        carry: numbers that it remembers between steps.
        next_carry: `(carry, metrics) -> carry` after each step; None: it stays as it is.
    """

    loss: Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
    reduce: Callable[[Tensor, pack.Batch], Float[Tensor, ""]] = reduce.token_mean
    rows: Rows = "text"
    columns: Callable[..., Mapping[str, Tensor]] | None = None
    needs: tuple[str, ...] = ()
    watches: tuple[str, ...] = ()
    couples: Couples = "token"
    carry: Mapping[str, float] = attrs.field(factory=dict)
    next_carry: Callable[[Mapping[str, float], Mapping[str, float]], Mapping[str, float]] | None = None

    def evolve(self, **changes: Any) -> "Algorithm":
        """Return a variant with some fields changed."""
        return attrs.evolve(self, **changes)


sft = Algorithm(loss=supervised.nll, watches=("entropies", "top1"))
"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens."""

dft = sft.evolve(loss=supervised.dft)
"""Dynamic fine-tuning, Wu et al. 2025 (arXiv:2508.05629)."""
