"""Attention over a forest: every token sees its ancestors and itself.

Two ways that agree: a dense mask, the reference that any device can run, and blocks, which need no mask. In
the layout of a PrefixTree the forest is one causal block a heavy chain and dense rectangles between a subtree
and the chain that it hangs from; their softmaxes are merged by log-sum-exp, exactly. A token takes part in at
most log2(nodes) merges.

Axes: batch, heads, kv (heads of keys and values), nodes, width.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

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
    return between(place, place, ends, depths, depths, window=window)


def between(
    queries: Int[Tensor, " queries"],
    keys: Int[Tensor, " keys"],
    ends: Int[Tensor, " keys"],
    query_depths: Int[Tensor, " queries"],
    key_depths: Int[Tensor, " keys"],
    *,
    window: int = 0,
) -> Bool[Tensor, "queries keys"]:
    """Say the same as `ancestors` for some nodes of a forest as queries and some as keys.

    Args:
        queries, keys: nodes.
        ends: one past the last descendant of each key.
        query_depths, key_depths: their positions.
        window: how many tokens back a query sees, itself among them; 0: all.
    """
    mask = (queries[:, None] >= keys) & (queries[:, None] < ends)
    return mask & (query_depths[:, None] - key_depths < window) if window else mask


def masked(
    query: Float[Tensor, "batch heads queries width"],
    key: Float[Tensor, "batch kv keys width"],
    value: Float[Tensor, "batch kv keys width"],
    mask: Bool[Tensor, "queries keys"],
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "batch heads queries width"]:
    """Attend under a dense mask, softmax in float32 or better: the reference.

    Args:
        query, key, value: heads of queries are a multiple of those of keys.
        mask: True where a query (row) sees a key (column).
        scale: factor of the products.
        softcap: bound of the scores, `cap tanh(s / cap)`; 0: none.
        sinks: a learned score a head that takes part in the softmax and has no value.
    """
    batch, heads, nodes, width = query.shape
    shared = query.reshape(batch, key.shape[1], heads // key.shape[1], nodes, width)
    scores = torch.einsum("bkgqd,bknd->bkgqn", shared, key) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return torch.einsum("bkgqn,bknd->bkgqd", weights, value).reshape(query.shape)


def rectangles(
    query: Float[Tensor, "batch heads queries width"],
    key: Float[Tensor, "batch kv keys width"],
    value: Float[Tensor, "batch kv keys width"],
    table: Int[Tensor, "blocks five"],
    query_depths: Int[Tensor, " queries"],
    key_depths: Int[Tensor, " keys"],
    *,
    scale: float,
    window: int = 0,
) -> Float[Tensor, "batch heads queries width"]:
    """Attend block by block on CPU kernels that return and take the log-sum-exp; nothing is gathered.

    Only a window needs masks, one a tile. It is one operator over an integer table, so one compiled graph
    serves every forest of a size.

    Args:
        query, key, value: heads of queries are a multiple of those of keys.
        table: (causal, query start, stop, key start, stop) on the host, the causal blocks first and covering
            every query; rows of no queries are padding.
        query_depths, key_depths: positions in the sequences; read only under a window.
        scale: factor of the products.
        window: how many tokens back a query sees, itself among them; 0: all.
    """
    return _blocks(query, key, value, table, query_depths, key_depths, scale, window)[0]


@torch.library.custom_op("espalier::attention_blocks", mutates_args=())
def _blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    query_depths: Tensor,
    key_depths: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Run the blocks; the output and its log-sum-exp."""
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    for block in _walk(table, query_depths, key_depths, window, query.dtype):
        q, k, causal, mask = block.queries, block.keys, block.causal, block.mask
        part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[:, :, q], key[:, :, k], value[:, :, k], 0.0, causal, attn_mask=mask, scale=scale
        )
        if block.first:
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
    query_depths: Tensor,
    key_depths: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run each block's backward with the merged output and log-sum-exp: the parts then add up."""
    d_query, d_key, d_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for block in _walk(table, query_depths, key_depths, window, query.dtype):
        q, k, causal, mask = block.queries, block.keys, block.causal, block.mask
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
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=wide)


@_blocks_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, table, query_depths, key_depths, scale, window = inputs
    ctx.save_for_backward(query, key, value, *output, table, query_depths, key_depths)
    ctx.numbers = (scale, window)


def _pull_back(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*_blocks_backward(grad, *ctx.saved_tensors, *ctx.numbers), *(None,) * 5)


_blocks.register_autograd(_pull_back, setup_context=_remember)


class _Block(NamedTuple):
    """One call of a kernel; `first` starts the softmax of its queries, the others are merged into it."""

    first: bool
    causal: bool
    queries: slice
    keys: slice
    mask: Tensor | None


def _walk(
    table: Tensor, query_depths: Tensor, key_depths: Tensor, window: int, dtype: torch.dtype
) -> Iterator[_Block]:
    """Yield the blocks of a table; under a window, the tiles of each that see anything."""
    for causal, a, b, x, y in table.tolist():
        if a == b:
            continue
        if not window:
            yield _Block(bool(causal), bool(causal), slice(a, b), slice(x, y), None)
            continue
        for start in range(a, b, window):
            q = slice(start, min(b, start + window))
            seen = query_depths[q].amin() - window + 1
            first = x + int((seen - key_depths[x]).clamp(min=0))
            k = slice(first, x + q.stop - a if causal else y)
            if k.start >= k.stop:
                continue
            far = query_depths[q, None] - key_depths[None, k]
            hidden = (far < 0) | (far >= window) if causal else far >= window
            mask = torch.zeros(far.shape, dtype=dtype).masked_fill_(hidden, FAR * torch.finfo(dtype).max)
            yield _Block(bool(causal), False, q, k, mask)
