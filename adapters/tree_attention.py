"""Tree attention as transformers sees it: one entry of its attention interface, one of its mask interface."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import attrs
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from core import attention, blocks, flex, pack
from core.plan import pieces, spans

NAME = "espalier_tree"
KINDS = ("blocks", "flex", "mask")
"""Blocks on the kernels of `core.blocks`, FlexAttention, the dense mask."""
KeysValues: TypeAlias = tuple[Tensor, Tensor]


class Step(Protocol):
    """A forward whose attention is not that of a forest: it comes with its own."""

    tokens: Tensor
    depths: Tensor
    max_depth: int

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend in a layer; `[1, heads, queries, width]` in, `[1, queries, heads, width]` out."""
        ...


@attrs.define(kw_only=True, eq=False)
class Route:
    """What the attention of one forward reads, made once for all layers: a pack's, or that of one piece.

    Attributes:
        tokens, depths: of the nodes that run, the queries.
        nodes: their numbers in the forest.
        keys, key_ends, key_depths: numbers, ends and depths of the nodes that are attended to: those of
            `past`, then those that run.
        table: the blocks in these coordinates.
        host_depths, host_key_depths, host_sizes: for blocks, the two depths and the nodes of each key's
            subtree on the host; None elsewhere.
        edges: which of the pack's edges the nodes predict.
        kind: one of `KINDS`, where it serves a layer; the dense mask serves the others.
        max_depth: of the pack.
        past: keys and values of earlier nodes by layer, `[1, kv, past, width]`; empty when all run at once.
        masks: dense masks, or those of FlexAttention's blocks, by window.
        fresh: where to put the keys and values of the nodes that run, by layer; None: nobody asks.
        calls: layers that came by; a model whose layers pass this interface by cannot be served.
        windows: those of them that came with a window.

    A field with a factory would stop torch.compile: it cannot see through the initializer that attrs makes.
    """

    tokens: Tensor
    depths: Tensor
    nodes: Tensor
    keys: Tensor
    key_ends: Tensor
    key_depths: Tensor
    table: Tensor
    edges: slice
    kind: str
    max_depth: int
    past: Mapping[int, KeysValues]
    masks: dict[int, Any]
    host_depths: Tensor | None = None
    host_key_depths: Tensor | None = None
    host_sizes: Tensor | None = None
    fresh: dict[int, KeysValues] | None = None
    calls: int = 0
    windows: int = 0


def route(each: pack.Pack, *, kind: str, rates: spans.Rates | None = None) -> Route:
    """Make the route of one forward over a whole pack.

    Args:
        each: the forest.
        kind: one of `KINDS`.
        rates: what blocks cost; small ones are then run together where that is cheaper. None: each is a
            block of its own. A compiled graph, which must serve every table, takes it as it is.
    """
    nodes = torch.arange(len(each.tokens), device=each.tokens.device)
    return _on_host(
        rates,
        tokens=each.tokens,
        depths=each.depths,
        nodes=nodes,
        keys=nodes,
        key_ends=each.ends,
        key_depths=each.depths,
        table=each.table,
        edges=slice(0, len(each.edge_nodes)),
        kind=kind,
        max_depth=each.max_depth,
        past={},
        masks={},
    )


def piece_route(
    each: pack.Pack,
    piece: pieces.Piece,
    past: Mapping[int, KeysValues],
    *,
    kind: str,
    rates: spans.Rates | None = None,
) -> Route:
    """Make the route of one forward over a piece of a pack.

    Args:
        each: the forest.
        piece: which nodes run, and what they attend to.
        past: keys and values of the piece's ancestors by layer.
        kind, rates: as in `route`.
    """
    own = slice(piece.start, piece.stop)
    nodes = torch.arange(piece.start, piece.stop, device=each.tokens.device)
    keys = torch.cat([torch.from_numpy(piece.ancestors).to(nodes.device), nodes])
    first, last = torch.searchsorted(each.edge_nodes, torch.tensor([own.start, own.stop]).to(nodes)).tolist()
    return _on_host(
        rates,
        tokens=each.tokens[own],
        depths=each.depths[own],
        nodes=nodes,
        keys=keys,
        key_ends=each.ends.index_select(0, keys),
        key_depths=each.depths.index_select(0, keys),
        table=torch.from_numpy(piece.table),
        edges=slice(first, last),
        kind=kind,
        max_depth=each.max_depth,
        past=past,
        masks={},
        fresh={},
    )


def _on_host(rates: spans.Rates | None, **fields: Any) -> Route:
    """Make a route; one of blocks with what the walk over them reads on the host."""
    table, kind = fields["table"], fields["kind"]
    if kind != "blocks":
        return Route(**fields)
    if rates is not None and not torch.compiler.is_compiling():
        fields["table"] = torch.from_numpy(spans.fused(table.numpy(), rates))
    return Route(
        **fields,
        host_depths=fields["depths"].cpu(),
        host_key_depths=fields["key_depths"].cpu(),
        host_sizes=(fields["key_ends"] - fields["keys"]).cpu(),
    )


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    tree: Route | Step | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend over the forest; the arguments are those that transformers passes to any attention function."""
    if tree is None:
        raise ValueError(
            "the model does not hand its keyword arguments to its attention; trees cannot be served."
        )
    if dropout:
        raise ValueError(f"attention dropout is {dropout}; branches would share its mask. Set it to 0.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast rotation leaves queries and keys in float32, and values are what a product gave.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if not isinstance(tree, Route):
        looks = {"window": sliding_window or 0, "softcap": softcap or 0.0, "sinks": s_aux}
        return tree.attend(_layer(module), query, key, value, scale=scale, **looks), None
    if not torch.compiler.is_compiling():  # what is recomputed in a graph may change nothing outside of it
        tree.calls += 1
        tree.windows += bool(sliding_window)
    if tree.fresh is not None:
        key, value = _lengthened(tree, module, key, value)
    window = sliding_window if sliding_window and tree.max_depth >= sliding_window else 0
    looks: dict[str, Any] = {"scale": scale, "sinks": s_aux}
    if tree.kind == "flex":
        # The plain form, on a CPU, is for comparison.
        kernel = flex.plain if query.device.type == "cpu" else flex.compiled
        mask = _mask(tree, window, flex.block_mask)
        out = flex.attend(query, key, value, mask, softcap=softcap or 0.0, kernel=kernel, **looks)
    elif tree.kind == "blocks" and not softcap and _serves(query, value):
        assert tree.host_depths is not None
        assert tree.host_key_depths is not None
        depths, sizes = (tree.host_depths, tree.host_key_depths), tree.host_sizes
        out = attention.rectangles(
            query, key, value, tree.table, *depths, window=window, sizes=sizes, **looks
        )
    else:
        mask = _mask(tree, window, attention.between)
        out = attention.masked(query, key, value, mask, softcap=softcap or 0.0, **looks)
    return out.transpose(1, 2).contiguous(), None


def _serves(query: Tensor, value: Tensor) -> bool:
    """Say whether the device's kernel of blocks takes a layer; the dense mask serves whatever it does not."""
    return query.shape[-1] == value.shape[-1] and blocks.takes(query.device.type, query.dtype)


def _mask(tree: Route, window: int, make: Callable[..., Any]) -> Any:
    """Return the mask of a window, made once for all layers; a graph makes it in each, its compiler once."""
    if window in tree.masks:
        return tree.masks[window]
    mask = make(tree.nodes, tree.keys, tree.key_ends, tree.depths, tree.key_depths, window=window)
    if not torch.compiler.is_compiling():
        tree.masks[window] = mask
    return mask


def _layer(module: torch.nn.Module) -> int:
    """Return which layer an attention belongs to."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ValueError("the model's attention has no layer_idx; its keys and values cannot be kept.")
    return layer


def _lengthened(tree: Route, module: torch.nn.Module, key: Tensor, value: Tensor) -> KeysValues:
    """Note a layer's keys and values, and put those of the ancestors before them."""
    layer = _layer(module)
    assert tree.fresh is not None
    tree.fresh[layer] = (key, value)
    if layer not in tree.past:
        return key, value
    past_key, past_value = tree.past[layer]
    return torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)
