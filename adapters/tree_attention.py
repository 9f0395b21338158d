"""Tree attention as transformers sees it: one entry of its attention interface, one of its mask interface."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import attrs
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from core import attention, pack
from core.plan import pieces

NAME = "espalier_tree"
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
        edges: which of the pack's edges the nodes predict.
        kind: `rectangles` or `mask`.
        max_depth: of the pack.
        past: keys and values of earlier nodes by layer, `[1, kv, past, width]`; empty when all run at once.
        fresh: where to put the keys and values of the nodes that run, by layer; None: nobody asks.
        calls: layers that came by; a model whose layers pass this interface by cannot be served.
        windows: those of them that came with a window.
        masks: dense masks by window.
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
    past: Mapping[int, KeysValues] = attrs.field(factory=dict)
    fresh: dict[int, KeysValues] | None = None
    calls: int = 0
    windows: int = 0
    masks: dict[int, Tensor] = attrs.field(factory=dict)


def route(each: pack.Pack, *, kind: str) -> Route:
    """Make the route of one forward over a whole pack.

    Args:
        each: the forest.
        kind: `rectangles` where the kernels serve a layer, the dense mask elsewhere; `mask` for the dense
            mask everywhere.
    """
    nodes = torch.arange(len(each.tokens), device=each.tokens.device)
    return Route(
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
    )


def piece_route(each: pack.Pack, piece: pieces.Piece, past: Mapping[int, KeysValues], *, kind: str) -> Route:
    """Make the route of one forward over a piece of a pack.

    Args:
        each: the forest.
        piece: which nodes run, and what they attend to.
        past: keys and values of the piece's ancestors by layer.
        kind: as in `route`.
    """
    own = slice(piece.start, piece.stop)
    nodes = torch.arange(piece.start, piece.stop, device=each.tokens.device)
    keys = torch.cat([torch.from_numpy(piece.ancestors).to(nodes.device), nodes])
    first, last = torch.searchsorted(each.edge_nodes, torch.tensor([own.start, own.stop]).to(nodes)).tolist()
    return Route(
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
        fresh={},
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
    if not isinstance(tree, Route):
        looks = {"window": sliding_window or 0, "softcap": softcap or 0.0, "sinks": s_aux}
        return tree.attend(_layer(module), query, key, value, scale=scale, **looks), None
    tree.calls += 1
    tree.windows += bool(sliding_window)
    if tree.fresh is not None:
        key, value = _lengthened(tree, module, key, value)
    window = sliding_window if sliding_window and tree.max_depth >= sliding_window else 0
    if tree.kind == "rectangles" and not softcap and s_aux is None and query.shape[-1] == value.shape[-1]:
        out = attention.rectangles(
            query, key, value, tree.table, tree.depths, tree.key_depths, scale=scale, window=window
        )
    else:
        if window not in tree.masks:
            tree.masks[window] = attention.between(
                tree.nodes, tree.keys, tree.key_ends, tree.depths, tree.key_depths, window=window
            )
        out = attention.masked(
            query, key, value, tree.masks[window], scale=scale, softcap=softcap or 0.0, sinks=s_aux
        )
    return out.transpose(1, 2).contiguous(), None


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
