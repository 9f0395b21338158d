"""Tree attention as transformers sees it: one entry of its attention interface, one of its mask interface."""

from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from core import attention, pack

NAME = "espalier_tree"


@attrs.define(eq=False)
class Route:
    """What the attention of one forward over one pack reads, made once and used by every layer.

    Attributes:
        pack: the forest.
        kind: `rectangles` or `mask`.
        calls: layers that came by; a model whose layers pass this interface by cannot be served.
        masks: dense masks by window.
    """

    pack: pack.Pack
    kind: str
    calls: int = 0
    masks: dict[int, Tensor] = attrs.field(factory=dict)


def route(each: pack.Pack, *, kind: str) -> Route:
    """Make the route of one forward.

    Args:
        each: the forest.
        kind: `rectangles` where the kernels serve a layer, the dense mask elsewhere; `mask` for the dense
            mask everywhere.
    """
    return Route(each, kind)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    tree: Route | None = None,
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
    tree.calls += 1
    each = tree.pack
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window if sliding_window and each.max_depth >= sliding_window else 0
    if tree.kind == "rectangles" and not softcap and s_aux is None and query.shape[-1] == value.shape[-1]:
        out = attention.rectangles(query, key, value, each.table, each.depths, scale=scale, window=window)
    else:
        if window not in tree.masks:
            tree.masks[window] = attention.ancestors(each.ends, each.depths, window=window)
        out = attention.masked(
            query, key, value, tree.masks[window], scale=scale, softcap=softcap or 0.0, sinks=s_aux
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)
