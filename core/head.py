"""The output head: hidden states to what a loss reads of the distribution, the vocabulary never held for all edges.

Logits exist for one tile of edges at a time, in forward and, recomputed, in backward. Products run in the dtype of the
model; log-sum-exp, ratios and sums in float32 or better.

Axes: edges (predictions that are trained), hidden, vocab.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from core import record

TILE_BYTES = 1 << 26
FIELDS = ("logprobs", "entropies", "log_sum_squares", "mean_logits", "top1")


@record.record
class Shape:
    """How logits follow from the product with the weight: `softcap tanh(scale x / softcap) / temperature`.

    Attributes:
        scale: factor of the product.
        softcap: bound of the logits, 0 for none.
        temperature: what the capped logits are divided by.
    """

    scale: float = record.static(default=1.0)
    softcap: float = record.static(default=0.0)
    temperature: float = record.static(default=1.0)


def score(
    hidden: Float[Tensor, "edges hidden"],
    weight: Float[Tensor, "vocab hidden"],
    targets: Int[Tensor, " edges"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    shape: Shape = Shape(),  # noqa: B008
    needs: tuple[str, ...] = (),
    tile_bytes: int = TILE_BYTES,
) -> dict[str, Float[Tensor, " edges"]]:
    """Score each edge's target under the distribution that the head gives.

        z = logits of the edge          logprobs = z_target - logsumexp(z)
        entropies = -sum p log p        log_sum_squares = log sum p^2        top1 = [target is the argmax]

    Args:
        hidden: last hidden state of each edge's parent.
        weight: of the head; with tied embeddings, theirs.
        targets: token id of each edge.
        bias: of the head.
        shape: what is done to the product.
        needs: fields beside `logprobs`, of `FIELDS`.
        tile_bytes: most bytes that a tile of logits takes.

    Returns:
        The fields by name, in nats, float32 or better; all but `top1` can be differentiated.
    """
    names = ("logprobs", *(n for n in FIELDS[1:] if n in needs))
    wide = torch.promote_types(hidden.dtype, torch.float32)
    rows = max(1, tile_bytes // (weight.shape[0] * wide.itemsize))
    outputs = _Score.apply(hidden, weight, bias, targets, shape, names, rows)
    return dict(zip(names, outputs, strict=True))


class _Score(torch.autograd.Function):
    """The tiles, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        shape: Shape,
        names: tuple[str, ...],
        rows: int,
    ) -> tuple[Tensor, ...]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        outputs = {n: torch.empty(len(targets), dtype=wide, device=hidden.device) for n in ("lse", *names)}
        for start in range(0, len(targets), rows):
            tile = slice(start, start + rows)
            z = _logits(hidden[tile], weight, bias, shape)
            for name, values in _measure(z, targets[tile], names).items():
                outputs[name][tile] = values
        ctx.save_for_backward(hidden, weight, bias, targets, *(outputs[n] for n in ("lse", *names)))
        ctx.plan = (shape, names, rows)
        if "top1" in names:
            ctx.mark_non_differentiable(outputs["top1"])
        return tuple(outputs[n] for n in names)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        hidden, weight, bias, targets, lse, *values = ctx.saved_tensors
        shape, names, rows = ctx.plan
        grads = dict(zip(names, gradients, strict=True))
        known = dict(zip(names, values, strict=True))
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        d_weight = torch.zeros_like(weight, dtype=lse.dtype) if want_weight else None
        d_bias = torch.zeros_like(bias, dtype=lse.dtype) if want_bias else None
        for start in range(0, len(targets), rows):
            tile = slice(start, start + rows)
            z = _logits(hidden[tile], weight, bias, shape)
            slope = _slope(z, shape)
            dz = _pull(z, targets[tile], lse[tile], _cut(grads, tile), _cut(known, tile))
            dz = (dz if slope is None else dz * slope).to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(dz, weight, out=d_hidden[tile])
            if d_weight is not None:
                d_weight += dz.T @ hidden[tile]
            if d_bias is not None:
                d_bias += dz.sum(0, dtype=lse.dtype) / shape.scale
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    """Return a tile of logits in float32 or better; the memory is the caller's to overwrite."""
    z = torch.nn.functional.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32))
    if shape.scale != 1.0:
        z *= shape.scale
    if bias is not None:
        z += bias
    if shape.softcap:
        z = (z / shape.softcap).tanh_() * shape.softcap
    if shape.temperature != 1.0:
        z /= shape.temperature
    return z


def _slope(z: Tensor, shape: Shape) -> Tensor | float | None:
    """Return the derivative of the logits by the product, None where it is 1."""
    factor = shape.scale / shape.temperature
    if shape.softcap:
        return (1.0 - (z * (shape.temperature / shape.softcap)).square()) * factor
    return None if factor == 1.0 else factor


def _measure(z: Tensor, targets: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Measure what was asked for on a tile of logits."""
    lse = z.logsumexp(-1)
    found = {"lse": lse, "logprobs": z.gather(-1, targets[:, None])[:, 0] - lse}
    if "entropies" in names:
        found["entropies"] = lse - ((z - lse[:, None]).exp_() * z).sum(-1)
    if "log_sum_squares" in names:
        found["log_sum_squares"] = (2.0 * z).logsumexp(-1) - 2.0 * lse
    if "mean_logits" in names:
        found["mean_logits"] = z.mean(-1)
    if "top1" in names:
        found["top1"] = (z.argmax(-1) == targets).to(z.dtype)
    return found


def _pull(
    z: Tensor, targets: Tensor, lse: Tensor, grads: dict[str, Tensor], known: dict[str, Tensor]
) -> Tensor:
    """Return the gradient by a tile of logits; `z` is overwritten when nothing else needs it."""
    extra: Tensor | float = 0.0
    if "entropies" in grads:
        log_p = z - lse[:, None]
        extra = extra - grads["entropies"][:, None] * log_p.exp() * (log_p + known["entropies"][:, None])
    if "log_sum_squares" in grads:
        log_p = z - lse[:, None]
        squares = (2.0 * log_p - known["log_sum_squares"][:, None]).exp_()
        extra = extra + 2.0 * grads["log_sum_squares"][:, None] * (squares - log_p.exp_())
    if "mean_logits" in grads:
        extra = extra + grads["mean_logits"][:, None] / z.shape[-1]
    step = grads["logprobs"][:, None]
    dz = z.sub_(lse[:, None]).exp_().mul_(-step).scatter_add_(-1, targets[:, None], step)
    return dz + extra if isinstance(extra, Tensor) else dz


def _cut(fields: dict[str, Tensor], tile: slice) -> dict[str, Tensor]:
    """Take one tile of every field."""
    return {name: values[tile] for name, values in fields.items()}
