"""Attention over a forest: every token sees its ancestors and itself.

Three ways that agree: a dense mask, the reference that any device can run; blocks, which need no mask; and,
in `core.flex`, one kernel that passes over what is hidden. In the layout of a PrefixTree the forest is one
causal block a heavy chain and dense rectangles between a subtree and the chain that it hangs from; their
softmaxes are merged by log-sum-exp, exactly. A token takes part in at most log2(nodes) merges.

Axes: batch, heads, kv (heads of keys and values), nodes, width.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from core import blocks, precision


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
    mask: Bool[Tensor, "queries keys"] | Bool[Tensor, "batch queries keys"],
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "batch heads queries width"]:
    """Attend under a dense mask, softmax in float32 or better: the reference.

    Args:
        query, key, value: heads of queries are a multiple of those of keys.
        mask: True where a query (row) sees a key (column), for all of the batch or each of it.
        scale: factor of the products.
        softcap: bound of the scores, `cap tanh(s / cap)`; 0: none.
        sinks: a learned score a head that takes part in the softmax and has no value.
    """
    batch, heads, nodes, width = query.shape
    shared = query.reshape(batch, key.shape[1], heads // key.shape[1], nodes, width)
    scores = torch.einsum("bkgqd,bknd->bkgqn", shared, key) * scale
    scores = precision.widened(scores)
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~(mask if mask.ndim == 2 else mask[:, None, None]), -torch.inf)
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
    sizes: Int[Tensor, " keys"] | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "batch heads queries width"]:
    """Attend block by block on kernels that return and take the log-sum-exp; only batches are gathered.

    It is one operator over an integer table, so one compiled graph serves every forest of a size. Where the
    tensors are decides the kernel: the CPU's own, or the flash kernel of CUDA and ROCm, which takes one
    forest at a time and float16 or bfloat16.

    Args:
        query, key, value: heads of queries are a multiple of those of keys.
        table: (kind, query start, stop, key start, stop) on the host, with the kinds of `core.plan.spans`.
            CAUSAL and MASKED are runs of nodes that are queries and keys, each of which sees its ancestors.
            Kinds from BATCH on are causal too: those of one kind are one call. All these come first and cover
            every query once; DENSE is the rest. Rows of no queries are padding. The CPU alone runs masked
            blocks and batches.
        query_depths, key_depths: positions in the sequences, on the host; read only under a window.
        scale: factor of the products.
        window: how many tokens back a query sees, itself among them; 0: all.
        sizes: nodes of each key's subtree, itself among them, on the host; read by masked blocks alone.
        sinks: a learned score a head that takes part in the softmax and has no value.
    """
    return blocks.attend(query, key, value, sinks, table, query_depths, key_depths, sizes, scale, window)[0]
