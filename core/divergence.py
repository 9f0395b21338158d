"""Divergences between a student's and a teacher's distribution, the vocabulary never held for all edges.

Logits of both models exist for one tile of edges at a time, in forward and, recomputed, in backward. Products
run in the dtype of their model; log-sum-exp, ratios and sums in float32 or better.

With p the student, t the teacher and m = (1 - beta) p + beta t the three are one family:

    beta = 0           KL(t || p), forward: the student covers what the teacher does
    0 < beta < 1       beta KL(t || m) + (1 - beta) KL(p || m), generalized Jensen-Shannon
    beta = 1           KL(p || t), reverse: the student stays where the teacher is

The ends are exact and are no limits: near them the family shrinks to 0.

Axes: edges (predictions that are trained), hidden, vocab, kept (tokens that a server told).
"""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor

from core import head, precision

TILE_BYTES = 1 << 28
LIVE_TILES = 8
TeacherLowRank = tuple[Float[Tensor, "edges teacher_rank"], Float[Tensor, "teacher_vocab teacher_rank"]]
"""As `core.head.LowRank`, of a teacher."""
FLOOR = -1e4
"""Log-probabilities go no lower: the probability is 0 all the same, and 0 times infinity never comes up."""


def divergences(
    hidden: Float[Tensor, "edges hidden"],
    weight: Float[Tensor, "vocab hidden"],
    teacher_hidden: Float[Tensor, "edges teacher_hidden"],
    teacher_weight: Float[Tensor, "teacher_vocab teacher_hidden"],
    *,
    beta: float = 1.0,
    temperature: float | None = None,
    bias: Float[Tensor, " vocab"] | None = None,
    teacher_bias: Float[Tensor, " teacher_vocab"] | None = None,
    low_rank: head.LowRank | None = None,
    teacher_low_rank: TeacherLowRank | None = None,
    shape: head.Shape = head.Shape(),  # noqa: B008
    teacher_shape: head.Shape = head.Shape(),  # noqa: B008
    tile_bytes: int = TILE_BYTES,
) -> Float[Tensor, " edges"]:
    """Measure how far the student is from the teacher at each edge.

        beta KL(t || m) + (1 - beta) KL(p || m),  m = (1 - beta) p + beta t;  0: KL(t || p);  1: KL(p || t)

    Agarwal et al. 2023, GKD (arXiv:2306.13649), sec. 2. Each KL(a || b) is summed as a log(a / b) - a + b,
    which is nowhere negative and in which an error of a log-sum-exp enters squared.

    Args:
        hidden, teacher_hidden: last hidden state of each edge's parent under each model.
        weight, teacher_weight: of the heads, over one vocabulary.
        beta: in [0, 1].
        temperature: of both models, in the place of their shapes'; None: as the shapes say.
        bias, teacher_bias: of the heads.
        low_rank, teacher_low_rank: of adapters beside the heads.
        shape, teacher_shape: what is done to the products.
        tile_bytes: most bytes that are live at a time for a tile of both models.

    Returns:
        One divergence an edge, in nats, at least 0, float32 or better; gradients flow to the student alone.

    Raises:
        ValueError: beta is outside [0, 1], or the vocabularies differ.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {beta}; a number in [0, 1] is wanted: 0 forward KL, 1 reverse KL.")
    if len(weight) != len(teacher_weight):
        raise ValueError(
            f"the student has {len(weight)} tokens and the teacher {len(teacher_weight)}; one vocabulary is "
            "wanted: take a teacher of the same family, or cut the rows that only pad one of the heads."
        )
    if temperature is not None:
        shape, teacher_shape = (attrs.evolve(s, temperature=temperature) for s in (shape, teacher_shape))
    rows = head.tile_rows(hidden, weight, tile_bytes // LIVE_TILES)
    student = (hidden, weight, bias, *(low_rank or (None, None)))
    teacher = (teacher_hidden, teacher_weight, teacher_bias, *(teacher_low_rank or (None, None)))
    frozen = (None if x is None else x.detach() for x in teacher)
    return _Divergence.apply((shape, teacher_shape), beta, rows, *student, *frozen)


def top_logprobs(
    hidden: Float[Tensor, "edges hidden"],
    weight: Float[Tensor, "vocab hidden"],
    tokens: Int[Tensor, "edges kept"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    low_rank: head.LowRank | None = None,
    shape: head.Shape = head.Shape(),  # noqa: B008
    tile_bytes: int = TILE_BYTES,
) -> Float[Tensor, "edges kept"]:
    """Score several tokens at each edge: what `kept` compares with what a server told of a teacher.

    Args:
        hidden: last hidden state of each edge's parent.
        weight: of the head.
        tokens: token ids, no id twice in a row.
        bias: of the head.
        low_rank: of an adapter beside the head.
        shape: what is done to the product.
        tile_bytes: most bytes that a tile of logits takes.

    Returns:
        Their log-probabilities in nats, float32 or better.
    """
    rows = head.tile_rows(hidden, weight, tile_bytes // LIVE_TILES)
    return _Top.apply(tokens, shape, rows, hidden, weight, bias, *(low_rank or (None, None)))


def likeliest(
    hidden: Float[Tensor, "edges hidden"],
    weight: Float[Tensor, "vocab hidden"],
    num_kept: int,
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    low_rank: head.LowRank | None = None,
    shape: head.Shape = head.Shape(),  # noqa: B008
    tile_bytes: int = TILE_BYTES,
) -> Int[Tensor, "edges kept"]:
    """Find the likeliest tokens at each edge: which ones `kept` is to look at.

    Args:
        hidden: last hidden state of each edge's parent.
        weight: of the head.
        num_kept: tokens of each edge, at most the vocabulary.
        bias: of the head.
        low_rank: of an adapter beside the head.
        shape: what is done to the product.
        tile_bytes: most bytes that a tile of logits takes.

    Returns:
        Their ids, the likeliest first.
    """
    rows = head.tile_rows(hidden, weight, tile_bytes // LIVE_TILES)
    product = head.Product(shape, hidden, weight, bias, *(low_rank or (None, None)))
    found = torch.empty(len(hidden), num_kept, dtype=torch.int64, device=hidden.device)
    with torch.no_grad():
        for start in range(0, len(hidden), rows):
            tile = slice(start, start + rows)
            found[tile] = head.logits(product.tile(tile)).topk(num_kept).indices
    return found


def kept(
    student: Float[Tensor, "edges kept"], teacher: Float[Tensor, "edges kept"], *, beta: float = 1.0
) -> Float[Tensor, " edges"]:
    """Measure the divergence over the tokens that are known and one more outcome, all the others.

        `divergences`, where the last outcome has the probability 1 - sum of the known ones under each model

    A lower bound of the divergence over the vocabulary, for telling less apart never tells more; equal to it
    when the known tokens are all but one.

    Args:
        student, teacher: log-probabilities (nats) of the same tokens under each; minus infinity fills up
            where fewer are known.
        beta: in [0, 1].

    Returns:
        One divergence an edge, in nats, at least 0; gradients flow to the student alone.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {beta}; a number in [0, 1] is wanted: 0 forward KL, 1 reverse KL.")
    known = teacher.isfinite()
    both = (student, teacher.detach().to(student.dtype))
    p, t = (_floored(x.masked_fill(~known, FLOOR)) for x in both)
    p, t = (torch.cat([x, _rest(x)[:, None]], 1) for x in (p, t))
    return _excesses(p, t, beta).sum(-1).clamp(min=0.0)


def _floored(logprobs: Float[Tensor, "edges kept"]) -> Float[Tensor, "edges kept"]:
    """Return log-probabilities no lower than the floor; a finite one that was lower is still pulled."""
    finite = logprobs.masked_fill(logprobs == -torch.inf, FLOOR)
    return torch.where(finite < FLOOR, FLOOR + (finite - finite.detach()), finite)


def _rest(logprobs: Float[Tensor, "edges kept"]) -> Float[Tensor, " edges"]:
    """Return the log-probability of all other outcomes, never quite impossible: rounding may leave none."""
    least = torch.finfo(logprobs.dtype).eps
    return torch.log1p(-logprobs.exp().sum(-1).clamp(max=1.0 - least))


class _Divergence(torch.autograd.Function):
    """The tiles of `divergences`, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, shapes: tuple[head.Shape, head.Shape], beta: float, rows: int, *tensors: Any
    ) -> Tensor:
        student, teacher = _both(tensors, shapes)
        wide = precision.wide(student.hidden.dtype)
        found = torch.empty(len(student.hidden), dtype=wide, device=student.hidden.device)
        for start in range(0, len(found), rows):
            tile = slice(start, start + rows)
            p, t = (_logprobs(head.logits(one.tile(tile))) for one in (student, teacher))
            found[tile] = _excesses(p, t.to(wide), beta).sum(-1).clamp_(min=0.0)
        ctx.save_for_backward(*tensors)
        ctx.plan = (shapes, beta, rows)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shapes, beta, rows = ctx.plan
        student, teacher = _both(ctx.saved_tensors, shapes)

        def pull(z: Tensor, tile: slice) -> Tensor:
            t = _logprobs(head.logits(teacher.tile(tile)))
            return _pull(_logprobs(z), t.to(z.dtype), beta) * gradients[0][tile, None]

        wanted = ctx.needs_input_grad[3 : 3 + len(student.tensors)]
        return (*(None,) * 3, *_backward(wanted, student, rows, pull), *(None,) * len(teacher.tensors))


def _both(tensors: Sequence[Any], shapes: tuple[head.Shape, head.Shape]) -> tuple[head.Product, head.Product]:
    """Return what the logits of either model are made of, the student's first."""
    half = len(tensors) // 2
    return head.Product(shapes[0], *tensors[:half]), head.Product(shapes[1], *tensors[half:])


class _Top(torch.autograd.Function):
    """The tiles of `top_logprobs`, forward and backward."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, shape: head.Shape, rows: int, *tensors: Any) -> Tensor:
        product = head.Product(shape, *tensors)
        wide = precision.wide(product.hidden.dtype)
        found = torch.empty(tokens.shape, dtype=wide, device=tokens.device)
        for start in range(0, len(tokens), rows):
            tile = slice(start, start + rows)
            found[tile] = _logprobs(head.logits(product.tile(tile))).gather(-1, tokens[tile])
        ctx.save_for_backward(tokens, *tensors)
        ctx.plan = (shape, rows)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shape, rows = ctx.plan
        tokens, *tensors = ctx.saved_tensors

        def pull(z: Tensor, tile: slice) -> Tensor:
            step = gradients[0][tile]
            dz = -_logprobs(z).exp() * step.sum(-1, keepdim=True)
            return dz.scatter_add(-1, tokens[tile], step)

        product = head.Product(shape, *tensors)
        return (*(None,) * 3, *_backward(ctx.needs_input_grad[3:], product, rows, pull))


def _backward(
    wanted: Sequence[bool], product: head.Product, rows: int, pull: Callable[[Tensor, slice], Tensor]
) -> head.Sums:
    """Return the gradients of what logits are made of; `pull` gives that of a tile of logits."""
    sums = head.zeros(product, wanted)
    for start in range(0, len(product.hidden), rows):
        tile = slice(start, start + rows)
        part = product.tile(tile)
        z = head.logits(part)
        bend = head.slope(z, product.shape)
        head.add(sums, part, tile, pull(z, tile), bend)
    return head.narrowed(sums, product)


def _logprobs(z: Tensor) -> Tensor:
    """Return log-probabilities, no lower than the floor."""
    return z.log_softmax(-1).clamp_(min=FLOOR)


def _excesses(p: Tensor, t: Tensor, beta: float) -> Tensor:
    """Return what each token adds to the divergence, at least 0; `p` and `t` are log-probabilities."""
    if beta == 0.0:
        return _excess(t, t - p)
    if beta == 1.0:
        return _excess(p, p - t)
    above_p, above_t = _above(p, t, beta)
    return beta * _excess(t, above_t) + (1.0 - beta) * _excess(p, above_p)


def _excess(a: Tensor, gap: Tensor) -> Tensor:
    """Return exp(a) gap - exp(a) + exp(a - gap), by its series where the gap is small and digits would go."""
    series = gap.square() * (0.5 + gap * (-1 / 6 + gap * (1 / 24 + gap * (-1 / 120 + gap / 720))))
    probability = a.exp()
    return torch.where(gap.abs() < 0.05, probability * series, probability * (gap - 1.0) + (a - gap).exp())


def _above(p: Tensor, t: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return log p - log m and log t - log m, by the ratio of the two that does not overflow."""
    gap = t - p
    ahead = gap > 0
    share = ahead.to(gap.dtype) * (1.0 - 2.0 * beta) + beta
    larger = -torch.log1p(share * torch.expm1(-gap.abs()))
    return torch.where(ahead, larger - gap, larger), torch.where(ahead, larger, larger + gap)


def _pull(p: Tensor, t: Tensor, beta: float) -> Tensor:
    """Return the gradient by the student's logits.

    beta = 0: p - t;  beta = 1: p (g - sum p g), g = log(p / t);  else (1 - beta) of that, g = log(p / m)
    """
    probability = p.exp()
    if beta == 0.0:
        return probability - t.exp()
    g = p - t if beta == 1.0 else (1.0 - beta) * _above(p, t, beta)[0]
    return probability * (g - (probability * g).sum(-1, keepdim=True))
