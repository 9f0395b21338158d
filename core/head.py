"""The output head: hidden states to what a loss reads, the vocabulary never held for all edges.

Logits exist for one tile of edges at a time, in forward and, recomputed, in backward. Products run in the
dtype of the model; log-sum-exp, ratios and sums in float32 or better.

Axes: edges (predictions that are trained), hidden, vocab, rank (of an adapter beside the head).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from core import precision, record

TILE_BYTES = 1 << 26
FIELDS = ("logprobs", "entropies", "log_sum_squares", "mean_logits", "top1")

LowRank = tuple[Float[Tensor, "edges rank"], Float[Tensor, "vocab rank"]]
"""An adapter beside the head: `low`, narrow states of the edges, and `up`; it adds `low up^T`."""


@record.record
class Shape:
    """How logits follow from `x = hidden weight + bias`: `softcap tanh(scale x / softcap) / temperature`.

    Attributes:
        scale: factor of the product, bias included.
        softcap: bound of the logits, 0 for none.
        temperature: what the capped logits are divided by.
    """

    scale: float = record.static(default=1.0)
    softcap: float = record.static(default=0.0)
    temperature: float = record.static(default=1.0)


class Product(NamedTuple):
    """What logits are made of: `x = hidden weight^T + low up^T + bias`, and the shape.

    Attributes:
        shape: what is done to the product.
        hidden: last hidden state of each edge's parent.
        weight, bias: of the head.
        low, up: of an adapter beside the head, both or none. They stay apart from the weight, so that a
            frozen one is neither copied nor given a gradient.
    """

    shape: Shape
    hidden: Float[Tensor, "edges hidden"]
    weight: Float[Tensor, "vocab hidden"]
    bias: Float[Tensor, " vocab"] | None = None
    low: Float[Tensor, "edges rank"] | None = None
    up: Float[Tensor, "vocab rank"] | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all but the shape, in the order of `Sums`."""
        return self[1:]

    @property
    def low_rank(self) -> LowRank | None:
        """Return the adapter as functions take it."""
        return None if self.low is None or self.up is None else (self.low, self.up)

    def tile(self, edges: slice) -> "Product":
        """Return what the logits of some edges are made of."""
        return self._replace(hidden=self.hidden[edges], low=None if self.low is None else self.low[edges])

    def first(self, num: int) -> "Product":
        """Return what the logits of the first tokens of the vocabulary are made of."""
        bias, up = (None if rows is None else rows[:num] for rows in (self.bias, self.up))
        return self._replace(weight=self.weight[:num], bias=bias, up=up)


def score(
    hidden: Float[Tensor, "edges hidden"],
    weight: Float[Tensor, "vocab hidden"],
    targets: Int[Tensor, " edges"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    low_rank: LowRank | None = None,
    shape: Shape = Shape(),  # noqa: B008
    needs: tuple[str, ...] = (),
    slopes: Float[Tensor, " edges"] | None = None,
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
        low_rank: of an adapter beside the head, in the dtype of the hidden states.
        shape: what is done to the product.
        needs: fields beside `logprobs`, of `FIELDS`.
        slopes: the gradient by `logprobs` where it is known before: what follows from it is then formed while
            the logits are there. Should another gradient come, the logits are made again, as without it.
        tile_bytes: most bytes that a tile of logits takes.

    Returns:
        The fields by name, in nats, float32 or better; all but `top1` can be differentiated.
    """
    names = ("logprobs", *(n for n in FIELDS[1:] if n in needs))
    rows = tile_rows(hidden, weight, tile_bytes)
    slopes = None if slopes is None else slopes.to(precision.wide(hidden.dtype))
    product = Product(shape, hidden, weight, bias, *(low_rank or (None, None)))
    outputs = _Score.apply(targets, slopes, shape, names, rows, *product.tensors)
    return dict(zip(names, outputs, strict=True))


def tile_rows(
    hidden: Float[Tensor, "edges hidden"], weight: Float[Tensor, "vocab hidden"], tile_bytes: int
) -> int:
    """Return how many edges a tile of logits in float32 or better holds, at least one.

    Args:
        hidden, weight: whose logits they are.
        tile_bytes: most bytes of a tile.
    """
    return max(1, tile_bytes // (len(weight) * precision.wide(hidden.dtype).itemsize))


class _Score(torch.autograd.Function):
    """The tiles, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        targets: Tensor,
        slopes: Tensor | None,
        shape: Shape,
        names: tuple[str, ...],
        rows: int,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        product, wanted = Product(shape, *tensors), ctx.needs_input_grad[-len(tensors) :]
        wide = precision.wide(product.hidden.dtype)
        outputs = {n: torch.empty(len(targets), dtype=wide, device=targets.device) for n in ("lse", *names)}
        sums = zeros(product, wanted) if slopes is not None and any(wanted) else None
        for start in range(0, len(targets), rows):
            tile = slice(start, start + rows)
            part = product.tile(tile)
            z = logits(part)
            for name, values in _measure(z, targets[tile], names).items():
                outputs[name][tile] = values
            if sums is not None and slopes is not None:
                bend, given = slope(z, shape), {"logprobs": slopes[tile]}
                dz = _pull(z, targets[tile], outputs["lse"][tile], given, {})
                add(sums, part, tile, dz, bend)
                del dz
            del z  # before the next tile is made: two at once are the most that is held
        ctx.save_for_backward(targets, *tensors, *(outputs[n] for n in ("lse", *names)))
        ctx.plan = (shape, names, rows, len(tensors))
        ctx.ready = (slopes, sums)
        ctx.set_materialize_grads(False)  # a field that only metrics read costs nothing in backward
        if "top1" in names:
            ctx.mark_non_differentiable(outputs["top1"])
        return tuple(outputs[n] for n in names)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        shape, names, rows, num = ctx.plan
        targets, *saved = ctx.saved_tensors
        product, (lse, *values) = Product(shape, *saved[:num]), saved[num:]
        grads = {n: g for n, g in zip(names, gradients, strict=True) if g is not None}
        slopes, sums = ctx.ready
        ctx.ready = (slopes, None)  # a sum in float32 would live on through the backward of all layers
        if sums is not None and list(grads) == ["logprobs"] and torch.equal(grads["logprobs"], slopes):
            return (*(None,) * 5, *narrowed(sums, product))
        grads.setdefault("logprobs", torch.zeros_like(lse))
        known = dict(zip(names, values, strict=True))
        sums = zeros(product, ctx.needs_input_grad[-num:])
        for start in range(0, len(targets), rows):
            tile = slice(start, start + rows)
            part = product.tile(tile)
            z = logits(part)
            bend = slope(z, shape)
            dz = _pull(z, targets[tile], lse[tile], _cut(grads, tile), _cut(known, tile))
            add(sums, part, tile, dz, bend)
            del z, dz
        return (*(None,) * 5, *narrowed(sums, product))


Sums = tuple[Tensor | None, ...]
"""Gradients by the tensors of a product, in their order; None: nobody asks."""


def zeros(product: Product, wanted: Sequence[bool]) -> Sums:
    """Make room for the gradients; those that all edges add to are summed in float32 or better.

    Args:
        product: what the logits of all edges are made of.
        wanted: whose gradients are asked for, in the order of `Sums`.
    """
    wide = precision.wide(product.hidden.dtype)
    per_edge = (True, False, False, True, False)
    made: list[Tensor | None] = []
    for x, is_wanted, own in zip(product.tensors, wanted, per_edge, strict=True):
        if x is None or not is_wanted:
            made.append(None)
        else:
            made.append(torch.empty_like(x) if own else torch.zeros_like(x, dtype=wide))
    return tuple(made)


def add(
    sums: Sums,
    product: Product,
    tile: slice,
    dz: Float[Tensor, "tile vocab"],
    bend: Float[Tensor, "tile vocab"] | float | None,
) -> None:
    """Add what one tile of gradients by logits gives; products run in the dtype of the hidden states.

    Args:
        sums: of `zeros`.
        product: what the logits of the tile are made of.
        tile: its edges.
        dz: the gradient by logits; its memory may be overwritten.
        bend: `slope` there.
    """
    by_hidden, by_weight, by_bias, by_low, by_up = sums
    dz = dz if bend is None else dz.mul_(bend)
    if by_bias is not None:
        by_bias += dz.sum(0)
    dz = dz.to(product.hidden.dtype)
    if by_hidden is not None:
        torch.mm(dz, product.weight, out=by_hidden[tile])
    if by_low is not None and product.up is not None:
        torch.mm(dz, product.up, out=by_low[tile])
    for total, states in ((by_weight, product.hidden), (by_up, product.low)):
        if total is None or states is None:
            continue
        if total.dtype == dz.dtype:
            total.addmm_(dz.T, states)
        else:
            total += dz.T @ states


def narrowed(sums: Sums, product: Product) -> Sums:
    """Return the gradients in the dtypes of what they belong to."""
    both = zip(sums, product.tensors, strict=True)
    return tuple(None if total is None or x is None else total.to(x.dtype) for total, x in both)


def logits(product: Product) -> Float[Tensor, "edges vocab"]:
    """Return a tile of logits in float32 or better; the memory is the caller's to overwrite."""
    shape, hidden, weight, bias, low, up = product
    z = precision.widened(torch.nn.functional.linear(hidden, weight))
    if low is not None and up is not None:
        z = z.addmm_(low, up.T) if z.dtype == low.dtype else z.add_(low @ up.T)
    if bias is not None:
        z += bias
    if shape.scale != 1.0:
        z *= shape.scale
    if shape.softcap:
        z /= shape.softcap
        z = z.tanh_()
        z *= shape.softcap
    if shape.temperature != 1.0:
        z /= shape.temperature
    return z


def slope(z: Float[Tensor, "edges vocab"], shape: Shape) -> Float[Tensor, "edges vocab"] | float | None:
    """Return the derivative of the logits by the product and bias, None where it is 1."""
    factor = shape.scale / shape.temperature
    if shape.softcap:
        return (z * (shape.temperature / shape.softcap)).square_().neg_().add_(1.0).mul_(factor)
    return None if factor == 1.0 else factor


def _measure(z: Tensor, targets: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Measure what was asked for on a tile of logits."""
    lse = z.logsumexp(-1)
    found = {"lse": lse, "logprobs": z.gather(-1, targets[:, None])[:, 0] - lse}
    if "mean_logits" in names:
        found["mean_logits"] = z.mean(-1)
    if "top1" in names:
        found["top1"] = (z.argmax(-1) == targets).to(z.dtype)
    if "entropies" in names or "log_sum_squares" in names:
        p = (z - lse[:, None]).exp_()
        if "entropies" in names:
            found["entropies"] = lse - _dot(p, z)
        if "log_sum_squares" in names:
            found["log_sum_squares"] = _dot(p, p).log()
    return found


def _pull(
    z: Tensor, targets: Tensor, lse: Tensor, grads: dict[str, Tensor], known: dict[str, Tensor]
) -> Tensor:
    """Return the gradient by a tile of logits, in the memory of `z`.

    dz = g 1[target] - p (g + g_entropy (log p + entropy) + 2 g_squares (1 - p / sum p^2)) + g_mean / vocab
    """
    step = grads["logprobs"][:, None]
    dz = z.sub_(lse[:, None])
    if "entropies" in grads or "log_sum_squares" in grads:
        p = dz.exp()
        if "entropies" in grads:
            dz = dz.add_(known["entropies"][:, None]).mul_(grads["entropies"][:, None]).add_(step)
        else:
            dz = dz.zero_().add_(step)
        if "log_sum_squares" in grads:
            twice = 2.0 * grads["log_sum_squares"][:, None]
            dz = dz.add_(twice).addcmul_(p, twice * (-known["log_sum_squares"][:, None]).exp(), value=-1.0)
        dz = dz.mul_(p).neg_()
    else:
        dz = dz.exp_().mul_(-step)
    dz = dz.scatter_add_(-1, targets[:, None], step)
    return dz.add_(grads["mean_logits"][:, None] / z.shape[-1]) if "mean_logits" in grads else dz


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of rows with rows; a matrix product holds no tile between."""
    return torch.bmm(left[:, None, :], right[:, :, None])[:, 0, 0]


def _cut(fields: dict[str, Tensor], tile: slice) -> dict[str, Tensor]:
    """Take one tile of every field."""
    return {name: values[tile] for name, values in fields.items()}
