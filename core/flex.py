"""Attention over a forest by FlexAttention: one kernel that passes over blocks in which nobody sees anybody.

Which blocks those are follows from bounds of the nodes, ends and depths in each: no mask of queries by keys
is ever made. The kernel runs compiled on CUDA and ROCm; elsewhere PyTorch's own plain form of it stands in,
which holds all scores and is for comparison.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention import flex_attention

BLOCK = 128
# Compiled for each dtype, window, cap, number of heads and mode of gradients; past the usual 8 kinds PyTorch
# would fall back without an error.
MOST_KINDS = 256
# A key of padding: behind every query, and nobody's ancestor.
NOBODY = 2**31 - 1


def compiled(*args: Any, **kwargs: Any) -> Any:
    """Run FlexAttention compiled: one kernel for every forest of a kind."""
    return _run(_kernel, *args, **kwargs)


def plain(*args: Any, **kwargs: Any) -> Any:
    """Run PyTorch's plain form of FlexAttention."""
    return _run(lambda: flex_attention.flex_attention, *args, **kwargs)


@functools.cache
def _kernel() -> Callable[..., Any]:
    """Return FlexAttention under the compiler, which takes a second to load: only where it is asked for."""
    return torch.compile(flex_attention.flex_attention, dynamic=True)


def _run(kernel: Callable[[], Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
    """Make a kernel and call it; inside of a graph it is a part of that."""
    if torch.compiler.is_compiling():
        return flex_attention.flex_attention(*args, **kwargs)
    # Scale and cap are a model's own; as symbols they would stop the tracing of the kernel.
    with torch._dynamo.config.patch(recompile_limit=MOST_KINDS, specialize_float=True):
        return kernel()(*args, **kwargs)


def block_mask(
    queries: Int[Tensor, " queries"],
    keys: Int[Tensor, " keys"],
    ends: Int[Tensor, " keys"],
    query_depths: Int[Tensor, " queries"],
    key_depths: Int[Tensor, " keys"],
    *,
    window: int = 0,
) -> flex_attention.BlockMask:
    """Say which blocks of queries and keys hold a pair that sees each other, and which hold no other.

    Lengths are filled up to whole blocks: the last query is repeated, and keys are added that nobody sees.

    Args:
        queries, keys: nodes, ascending.
        ends: one past the last descendant of each key.
        query_depths, key_depths: positions in the sequences.
        window: how many tokens back a query sees, itself among them; 0: all.
    """
    nodes, depths = (torch.cat([t, t[-1:].expand(-len(t) % BLOCK)]) for t in (queries, query_depths))
    hidden = ((keys, NOBODY), (ends, 0), (key_depths, 0))
    places, stops, levels = (torch.cat([t, t.new_full((-len(t) % BLOCK,), fill)]) for t, fill in hidden)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        above = (nodes[query] >= places[key]) & (nodes[query] < stops[key])
        return above & (depths[query] - levels[key] < window) if window else above

    (first, last), (shallow, deep) = _bounds(nodes), _bounds(depths)
    (low, high), (near_end, far_end), (top, bottom) = _bounds(places), _bounds(stops), _bounds(levels)
    some = (last[:, None] >= low) & (first[:, None] < far_end)
    every = (first[:, None] >= high) & (last[:, None] < near_end)
    if window:
        some &= shallow[:, None] - bottom < window
        every &= deep[:, None] - top < window
    partly = some & ~every
    return flex_attention.BlockMask.from_kv_blocks(
        *_listed(partly),
        *_listed(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(nodes), len(places)),
    )


def attend(
    query: Float[Tensor, "batch heads queries width"],
    key: Float[Tensor, "batch kv keys width"],
    value: Float[Tensor, "batch kv keys width"],
    mask: flex_attention.BlockMask,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Float[Tensor, " heads"] | None = None,
    kernel: Callable[..., Any] = compiled,
) -> Float[Tensor, "batch heads queries width"]:
    """Attend under a block mask.

    Args:
        query, key, value: heads of queries are a multiple of those of keys.
        mask: as `block_mask` makes it.
        scale: factor of the products.
        softcap: bound of the scores, `cap tanh(s / cap)`; 0: none.
        sinks: a learned score a head that takes part in the softmax and has no value.
        kernel: `compiled` or `plain`.
    """

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    length = query.shape[2]
    query, key, value = (
        torch.nn.functional.pad(t, (0, 0, 0, -t.shape[2] % BLOCK)) for t in (query, key, value)
    )
    out, more = kernel(
        query, key, value, score_mod=capped if softcap else None, block_mask=mask, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1], return_aux=flex_attention.AuxRequest(lse=True),
    )  # fmt: skip
    out = out[:, :, :length]
    if sinks is None:
        return out
    kept = torch.sigmoid(more.lse[:, :, :length] - sinks.to(more.lse.dtype)[None, :, None])
    return out * kept[..., None].to(out.dtype)


def _bounds(values: Int[Tensor, " filled"]) -> tuple[Int[Tensor, " blocks"], Int[Tensor, " blocks"]]:
    """Return the least and the greatest value of each block."""
    blocks = values.view(-1, BLOCK)
    return blocks.amin(1), blocks.amax(1)


def _listed(chosen: Bool[Tensor, "rows columns"]) -> tuple[Tensor, Tensor]:
    """Return how many columns of each row were chosen, and which, those first: what FlexAttention reads."""
    which = chosen.int().argsort(dim=1, descending=True, stable=True).int()
    return chosen.sum(1, dtype=torch.int32)[None, None], which[None, None]
