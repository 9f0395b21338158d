"""A forest over the budget: its pieces run one at a time, exactly.

1. Without gradients, in order: each piece runs against the keys and values of its ancestors; those that later
   pieces need are kept, and the fields at the edges are recorded.
2. The loss is differentiated by these fields, a small table; any loss will do.
3. In reverse order each piece runs again with gradients and is pulled back from its edges and from what later
   pieces wanted of its keys and values.

What pieces share lives as long as somebody will read it: keys and values until the piece that made them runs
again (without gradients: until the last piece that reads them has run), their gradients from the last reader
until then. Where a model keeps activations in host memory, these wait there too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from adapters import shards, tree_attention
from core import keys, metrics, pack, ports, precision
from core.plan import pieces

if TYPE_CHECKING:
    from adapters import transformers_lm

Fields = dict[str, Tensor]
Loss = Callable[[Fields], tuple[Float[Tensor, ""], metrics.Metrics]]
Layers = dict[int, tuple[Tensor, Tensor]]


class Walk:
    """One pack's way through a model, piece by piece; inside a swap of the parameters."""

    def __init__(
        self,
        model: transformers_lm.TransformersLM,
        params: ports.Params,
        each: pack.Pack,
        key: int,
        fields: Callable[[pack.Pack, tree_attention.Route, ports.Params], Fields] | None = None,
        runs: int | None = None,
    ) -> None:
        """Cut the forest.

        Args:
            model: runs the pieces.
            params: what is swapped in.
            each: a pack of several pieces.
            key: names the draws; both runs of a piece see the same.
            fields: what is taken of a piece at its edges; None: the fields of Scores.
            runs: how often all processes run the model, of which each runs a part; None: once a piece.
        """
        self._fields = fields or model.edges
        self._model, self._params, self._pack, self._key = model, params, each, key
        ran = each.pieces if len(each.edge_nodes) else ()  # a process in which nobody trains only idles
        self._pieces = pieces.cut(each.ends.cpu().numpy(), each.table.numpy(), ran)
        self._sources = [_sources(piece, self._pieces[:number]) for number, piece in enumerate(self._pieces)]
        self._readers = [0] * len(self._pieces)
        for number, sources in enumerate(self._sources):
            for source, _ in sources:
                self._readers[source] = number
        self._device = each.tokens.device
        self._place = torch.device("cpu") if model.offloaded else self._device
        self._idle = max(0, (runs or 0) - len(self._pieces))
        self._store: dict[int, Layers] = {}
        self._owed: dict[int, Layers] = {}

    def fields(self, *, keep: bool = False) -> Fields:
        """Return the fields at all edges, in their order.

        Args:
            keep: keep the keys and values that pieces share, for a second run; they are let go of after the
                last piece that reads them otherwise.
        """
        found: list[Fields] = []
        with torch.no_grad():
            for number in range(len(self._pieces)):
                route, part = self._run(number, self._past(number))
                found.append(part)
                self._keep(number, route)
                for source in () if keep else [n for n in self._store if self._readers[n] <= number]:
                    del self._store[source]
            for _ in range(self._idle):
                shards.idle(self._model, self._params)
        if not found:
            return nothing(self._pack, self._pack.batch.totals.terms)
        return {name: torch.cat([part[name] for part in found]) for name in found[0]}

    def pull_back(self, loss: Loss) -> tuple[Float[Tensor, ""], metrics.Metrics, dict[str, Tensor]]:
        """Return the loss, its metrics and the gradient of every parameter.

        Args:
            loss: from the fields at the edges.
        """
        # Split parameters want every piece pulled back, on every process.
        every = self._model.sharding is not None
        value, means, wanted = slopes(self.fields(keep=True), loss, every=every)
        grads = {n: torch.zeros_like(p, dtype=precision.wide(p.dtype)) for n, p in self._params.items()}
        for _ in range(self._idle):
            resting = shards.idle(self._model, self._params)
            found = torch.autograd.grad(resting.sum(), list(self._params.values()), allow_unused=True)
            self._add(found, grads)  # this process' parts of what the others pulled back
        for number in reversed(range(len(self._pieces))):
            self._pull_piece(number, wanted, grads)
        return value, means, grads

    def _pull_piece(self, number: int, wanted: Mapping[str, Tensor], grads: dict[str, Tensor]) -> None:
        """Run one piece with gradients and add what it gives to the sums, whose memory is ours."""
        self._store.pop(number, None)  # every piece that reads them has run twice
        past = {
            layer: (k.requires_grad_(), v.requires_grad_()) for layer, (k, v) in self._past(number).items()
        }
        route, part = self._run(number, past)
        sources = [(part[name], slope[route.edges]) for name, slope in wanted.items()]
        sources += self._asked(number, route)
        # Below the first trained layer keys and values hang on no parameter.
        sources = [(output, slope) for output, slope in sources if output.requires_grad]
        if not sources:
            return
        outputs, pulled = zip(*sources, strict=True)
        inputs = [*self._params.values(), *(t for both in past.values() for t in both)]
        found = torch.autograd.grad(outputs, inputs, pulled, allow_unused=True)
        self._add(found, grads)
        rest = iter(found[len(self._params) :])
        self._owe(number, {layer: (next(rest), next(rest)) for layer in past})

    def _owe(self, number: int, found: Mapping[int, tuple[Tensor | None, Tensor | None]]) -> None:
        """Add the gradients of a piece's ancestors, in float32 or better, to what earlier pieces are owed."""
        start = 0
        for source, rows in self._sources[number]:
            if source not in self._owed:
                self._owed[source] = {
                    layer: (
                        torch.zeros_like(k, dtype=precision.wide(k.dtype)),
                        torch.zeros_like(v, dtype=precision.wide(v.dtype)),
                    )
                    for layer, (k, v) in self._store[source].items()
                }
            for layer, both in found.items():
                for total, grad in zip(self._owed[source][layer], both, strict=True):
                    if grad is not None:
                        part = grad[:, :, start : start + len(rows)].to(total.device, total.dtype)
                        total.index_add_(2, rows.to(total.device), part)
            start += len(rows)

    def _add(self, found: Sequence[Tensor | None], grads: dict[str, Tensor]) -> None:
        """Add gradients of the parameters, the first of what was found, to the sums."""
        for name, grad in zip(self._params, found, strict=False):
            if grad is not None:
                grads[name] += grad

    def _asked(self, number: int, route: tree_attention.Route) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values that later pieces read, each with what these want of it."""
        owed = self._owed.pop(number, None)
        if owed is None:
            return []
        piece, found = self._pieces[number], []
        local = torch.from_numpy(piece.kept - piece.start).to(self._device)
        for layer, both in (route.fresh or {}).items():
            for each, total in zip(both, owed[layer], strict=True):
                found.append((each.index_select(2, local), total.to(each.device, each.dtype)))
        return found

    def _run(
        self, number: int, past: Mapping[int, tree_attention.KeysValues]
    ) -> tuple[tree_attention.Route, Fields]:
        """Run one piece forward; its draws hang on the key and its number alone."""
        piece = self._pieces[number]
        route = self._model.piece_route(self._pack, piece, past)
        if self._model.module.training:
            torch.manual_seed(keys.fold_in(self._key, "piece", number))
        return route, self._fields(self._pack, route, self._params)

    def _keep(self, number: int, route: tree_attention.Route) -> None:
        """Store the keys and values that later pieces attend to."""
        piece = self._pieces[number]
        if not len(piece.kept):
            return
        local = torch.from_numpy(piece.kept - piece.start).to(self._device)
        self._store[number] = {
            layer: (k.index_select(2, local).to(self._place), v.index_select(2, local).to(self._place))
            for layer, (k, v) in (route.fresh or {}).items()
        }

    def _past(self, number: int) -> dict[int, tree_attention.KeysValues]:
        """Return the keys and values of a piece's ancestors by layer."""
        sources = self._sources[number]
        if not sources:
            return {}

        def gathered(layer: int, which: int) -> Tensor:
            parts = [
                self._store[n][layer][which].index_select(2, rows.to(self._place)) for n, rows in sources
            ]
            return torch.cat([part.to(self._device) for part in parts], dim=2)

        return {layer: (gathered(layer, 0), gathered(layer, 1)) for layer in self._store[sources[0][0]]}


def _sources(piece: pieces.Piece, before: Sequence[pieces.Piece]) -> list[tuple[int, Tensor]]:
    """Say which earlier pieces hold a piece's ancestors, and at which rows of what they keep."""
    found = []
    for number, source in enumerate(before):
        first, last = np.searchsorted(piece.ancestors, (source.start, source.stop))
        if first < last:
            rows = np.searchsorted(source.kept, piece.ancestors[first:last])
            found.append((number, torch.from_numpy(rows)))
    return found


def nothing(each: pack.Pack, first: Tensor) -> Fields:
    """Return the fields of a pack in which nobody trains; with a graph to what `first` hangs on.

    Args:
        each: the pack.
        first: any tensor.
    """
    empty = precision.widened(first.flatten()[:0])
    return {"logprobs": empty, **dict.fromkeys(each.needs, empty)}


def slopes(fields: Fields, loss: Loss, *, every: bool = False) -> tuple[Tensor, metrics.Metrics, Fields]:
    """Return a loss, its metrics, and its gradient by the fields at the edges.

    Args:
        fields: at the edges; no gradient flows into `top1`.
        loss: from the fields.
        every: a field that the loss does not read has zeros; otherwise it is left out.
    """
    given = {name: values.detach().requires_grad_(name != "top1") for name, values in fields.items()}
    value, means = loss(given)
    asked = {name: values for name, values in given.items() if name != "top1"}
    if not value.requires_grad:  # of no rows it may be a number
        return value, means, {n: torch.zeros_like(v) for n, v in asked.items()} if every else {}
    found = torch.autograd.grad(value, list(asked.values()), allow_unused=True, materialize_grads=every)
    wanted = zip(asked, found, strict=True)
    return value.detach(), means, {name: slope for name, slope in wanted if slope is not None}
