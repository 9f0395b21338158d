"""Attention over a forest: every token sees its ancestors and itself.

Two ways that agree: a dense mask, the reference that any device can run, and blocks, which need no mask. In
the layout of a PrefixTree the forest is one causal block a heavy chain and dense rectangles between a subtree
and the chain that it hangs from; their softmaxes are merged by log-sum-exp, exactly. A token takes part in at
most log2(nodes) merges.

Axes: batch, heads, kv (heads of keys and values), nodes, width.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Of the largest number: a row that sees nothing of a block gets a weight of exactly 0, where -inf gives NaN.
FAR = -0.25


def ancestors(
    ends: Int[Tensor, " nodes"], depths: Int[Tensor, " nodes"], *, window: int = 0
) -> Bool[Tensor, "nodes nodes"]:
    """Say for each query (row) which keys (columns) are its ancestors or itself.

        mask[q, k] = k <= q < ends[k]   and, with a window,   depths[q] - depths[k] < window

    Args:
        ends: one past the last descendant of each node.
        depths: position of each node in its sequences.
        window: how many tokens back a query sees, itself among them; 0: all.
    """
    place = torch.arange(len(ends), device=ends.device)
    mask = (place[:, None] >= place) & (place[:, None] < ends)
    return mask & (depths[:, None] - depths < window) if window else mask


def masked(
    query: Float[Tensor, "batch heads nodes width"],
    key: Float[Tensor, "batch kv nodes width"],
    value: Float[Tensor, "batch kv nodes width"],
    mask: Bool[Tensor, "nodes nodes"],
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "batch heads nodes width"]:
    """Attend under a dense mask, softmax in float32 or better: the reference.

    Args:
        query, key, value: heads of queries are a multiple of those of keys.
        mask: True where a query (row) sees a key (column).
        scale: factor of the products.
        softcap: bound of the scores, `cap tanh(s / cap)`; 0: none.
        sinks: a learned score a head that takes part in the softmax and has no value.
    """
    batch, _, nodes, width = query.shape
    shared = query.reshape(batch, key.shape[1], -1, nodes, width)
    scores = torch.einsum("bkgqd,bknd->bkgqn", shared, key) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., :nodes].to(value.dtype)
    return torch.einsum("bkgqn,bknd->bkgqd", weights, value).reshape(query.shape)


def rectangles(
    query: Float[Tensor, "batch heads nodes width"],
    key: Float[Tensor, "batch kv nodes width"],
    value: Float[Tensor, "batch kv nodes width"],
    table: Int[Tensor, "blocks five"],
    depths: Int[Tensor, " nodes"],
    *,
    scale: float,
    window: int = 0,
) -> Float[Tensor, "batch heads nodes width"]:
    """Attend block by block on CPU kernels that return and take the log-sum-exp; nothing is gathered.

    Only a window needs masks, one a tile. It is one operator over an integer table, so one compiled graph
    serves every forest of a size.

    Args:
        query, key, value: heads of queries are a multiple of those of keys.
        table: (causal, query start, stop, key start, stop) on the host, chains first and covering every node;
            rows of no queries are padding.
        depths: position of each node in its sequences; read only under a window.
        scale: factor of the products.
        window: how many tokens back a query sees, itself among them; 0: all.
    """
    return _blocks(query, key, value, table, depths, scale, window)[0]


@torch.library.custom_op("espalier::attention_blocks", mutates_args=())
def _blocks(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, depths: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Run the blocks; the output and its log-sum-exp."""
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    for causal, q, k, mask in _walk(table, depths, window, query.dtype):
        part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[:, :, q], key[:, :, k], value[:, :, k], 0.0, causal, attn_mask=mask, scale=scale
        )
        if k.stop == q.stop:
            out[:, :, q], lse[:, :, q] = part, part_lse
            continue
        old = lse[:, :, q]
        new = torch.logaddexp(old, part_lse)
        kept, added = ((x - new).exp()[..., None].to(out.dtype) for x in (old, part_lse))
        out[:, :, q] = out[:, :, q] * kept + part * added
        lse[:, :, q] = new
    return out, lse


@torch.library.custom_op("espalier::attention_blocks_backward", mutates_args=())
def _blocks_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    table: Tensor,
    depths: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run each block's backward with the merged output and log-sum-exp: the parts then add up."""
    d_query, d_key, d_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for causal, q, k, mask in _walk(table, depths, window, query.dtype):
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad[:, :, q],
            query[:, :, q],
            key[:, :, k],
            value[:, :, k],
            out[:, :, q],
            lse[:, :, q],
            0.0,
            causal,
            attn_mask=mask,
            scale=scale,
        )
        for whole, span, part in zip((d_query, d_key, d_value), (q, k, k), parts, strict=True):
            whole[:, :, span] += part
    return d_query, d_key, d_value


@_blocks.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, depths: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=wide)


@_blocks_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, table, depths, scale, window = inputs
    ctx.save_for_backward(query, key, value, *output, table, depths)
    ctx.numbers = (scale, window)


def _pull_back(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*_blocks_backward(grad, *ctx.saved_tensors, *ctx.numbers), None, None, None, None)


_blocks.register_autograd(_pull_back, setup_context=_remember)


def _walk(table: Tensor, depths: Tensor, window: int, dtype: torch.dtype) -> Any:
    """Yield (causal, queries, keys, mask) of each block; under a window, of the tiles that it leaves.

    A block's first tile of a chain covers its queries' own positions and is told from a rectangle by `k.stop
    == q.stop`.
    """
    for causal, a, b, x, y in table.tolist():
        if a == b:
            continue
        if not window:
            yield bool(causal), slice(a, b), slice(x, y), None
            continue
        for start in range(a, b, window):
            q = slice(start, min(b, start + window))
            seen = depths[q].amin() - window + 1
            first = x + int((seen - depths[x]).clamp(min=0))
            k = slice(first, q.stop if causal else y)
            if k.start >= k.stop:
                continue
            far = depths[q, None] - depths[None, k]
            hidden = (far < 0) | (far >= window) if causal else far >= window
            yield (
                False,
                q,
                k,
                torch.zeros(far.shape, dtype=dtype).masked_fill_(hidden, FAR * torch.finfo(dtype).max),
            )
