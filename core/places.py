"""Where the nodes of a block lie: one run of them, or several that one call of a kernel takes as a batch.

Runs of a batch are filled up to the longest by repeating their last node. Under causal attention nobody but
the filling sees the filling, and it is neither read nor given a gradient, so it changes nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Runs(NamedTuple):
    """Several runs of nodes.

    Attributes:
        nodes: of each place of the batch, `[runs * length]`.
        length: of the longest run.
        real: places that are not filling; None: all are.
        own: their nodes.
    """

    nodes: Tensor
    length: int
    real: Tensor | None
    own: Tensor


Place = slice | Runs


def runs(starts: Tensor, stops: Tensor) -> Runs:
    """Lay runs out as a batch.

    Args:
        starts, stops: of each run, on the host, `[runs]`.
    """
    length = int((stops - starts).amax())
    steps = torch.arange(length)
    nodes = torch.minimum(starts[:, None] + steps, stops[:, None] - 1).flatten()
    real = (steps < (stops - starts)[:, None]).flatten().nonzero()[:, 0]
    whole = len(real) == len(nodes)
    return Runs(nodes, length, None if whole else real, nodes if whole else nodes[real])


def taken(heads: Tensor, place: Place) -> Tensor:
    """Take nodes out of `[batch, heads, nodes, ...]`; of runs `[batch * runs, heads, length, ...]`."""
    if isinstance(place, slice):
        return heads[:, :, place]
    found = heads.index_select(2, place.nodes).unflatten(2, (-1, place.length))
    return found.transpose(1, 2).flatten(0, 1)


def without_filling(part: Tensor, place: Place) -> Tensor:
    """Zero what stands at the filling of a batch."""
    if isinstance(place, slice) or place.real is None:
        return part
    filling = torch.ones(len(place.nodes), dtype=torch.bool).index_fill_(0, place.real, False)
    batch = len(part) * place.length // len(filling)
    return part.masked_fill(filling.view(-1, 1, place.length, 1).repeat(batch, 1, 1, 1), 0)


def put(whole: Tensor, place: Place, part: Tensor) -> None:
    """Write what `taken` would take."""
    if isinstance(place, slice):
        whole[:, :, place] = part
    else:
        whole.index_copy_(2, place.own, _laid(whole, place, part))


def add(whole: Tensor, place: Place, part: Tensor) -> None:
    """Add to what `taken` would take, the filling apart."""
    if isinstance(place, slice):
        whole[:, :, place] += part
    else:
        whole.index_add_(2, place.own, _laid(whole, place, part))


def _laid(whole: Tensor, place: Runs, part: Tensor) -> Tensor:
    """Lay a batch out as its nodes, in the dtype of the whole: kernels give back that of the heads."""
    flat = part.to(whole.dtype).unflatten(0, (len(whole), -1)).transpose(1, 2).flatten(2, 3)
    return flat if place.real is None else flat.index_select(2, place.real)
