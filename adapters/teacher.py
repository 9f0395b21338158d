"""A frozen teacher in the same process, which reads the student's forest and is asked for every prediction.

Its last hidden states are taken once a pack, without gradients and by the same pieces as the student's.
Logits of either model exist for a tile of edges at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor

from adapters import in_pieces, tree_attention
from core import divergence, head, pack, ports

if TYPE_CHECKING:
    from adapters import transformers_lm


@attrs.frozen(kw_only=True, eq=False)
class Teacher:
    """What a student is drawn to.

    Attributes:
        model: the teacher's; at the temperature that its distribution is compared at.
        params: its parameters, never updated.
        beta: which divergence; see `core.divergence`.
        num_kept: compare so many tokens and all others as one more outcome; 0: the whole vocabulary. Which
            ones, the model that the divergence is an expectation under says: the teacher at beta 0, the
            student at beta 1, both between.
        fingerprint: names the parameters to the bit, for whoever must know them again.
    """

    model: transformers_lm.TransformersLM
    params: ports.Params
    beta: float = 1.0
    num_kept: int = 0
    fingerprint: str = ""

    def hidden(self, each: pack.Pack) -> Float[Tensor, "edges hidden"]:
        """Return the last hidden state that every edge of a pack leads from; nothing is drawn."""
        with torch.no_grad(), self.model.running(self.params, None):
            if len(each.pieces) > 1:
                walk = in_pieces.Walk(self.model, self.params, each, 0, fields=self._fields)
                return walk.fields()["hidden"]
            return self.model.parents(each, self.model.route(each), self.params)

    def divergences(
        self, student: head.Product, taught: Float[Tensor, "edges teacher_hidden"]
    ) -> Float[Tensor, " edges"]:
        """Return how far the student is from the teacher at each edge, in nats.

        Where one of the heads has more rows, which only pad it, both are compared over the rows of the other.

        Args:
            student: what the student's logits are made of.
            taught: from `hidden`, at the same edges.
        """
        with torch.no_grad(), self.model.still(), self.model.swap(self.params):
            teacher = self.model.product(taught)
        rows = min(len(student.weight), len(teacher.weight))
        student, teacher = student.first(rows), teacher.first(rows)
        if not self.num_kept:
            return divergence.divergences(
                student.hidden, student.weight, teacher.hidden, teacher.weight, beta=self.beta,
                bias=student.bias, teacher_bias=teacher.bias,
                low_rank=student.low_rank, teacher_low_rank=teacher.low_rank,
                shape=student.shape, teacher_shape=teacher.shape,
            )  # fmt: skip
        tokens, twice = _looked_at(student, teacher, self.beta, min(self.num_kept, rows))
        p, t = (
            divergence.top_logprobs(
                one.hidden, one.weight, tokens, bias=one.bias, low_rank=one.low_rank, shape=one.shape
            )
            for one in (student, teacher)
        )
        return divergence.kept(p, t.masked_fill(twice, -torch.inf), beta=self.beta)

    def _fields(
        self, each: pack.Pack, route: tree_attention.Route, params: ports.Params
    ) -> dict[str, Tensor]:
        return {"hidden": self.model.parents(each, route, params)}


def _looked_at(
    student: head.Product, teacher: head.Product, beta: float, num: int
) -> tuple[Int[Tensor, "edges kept"], Tensor]:
    """Return the tokens that are compared, and which of them stand there for the second time."""
    models = [model for model, left_out in ((teacher, 1.0), (student, 0.0)) if beta != left_out]
    found = [
        divergence.likeliest(m.hidden, m.weight, num, bias=m.bias, low_rank=m.low_rank, shape=m.shape)
        for m in models
    ]
    tokens = torch.cat(found, 1)
    earlier = torch.ones(tokens.shape[1], tokens.shape[1], device=tokens.device).tril(-1).bool()
    return tokens, ((tokens[:, :, None] == tokens[:, None, :]) & earlier).any(-1)
