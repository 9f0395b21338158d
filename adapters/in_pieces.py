"""A forest over the budget: its pieces run one at a time, exactly.

1. Without gradients, in order: each piece runs against the keys and values of its ancestors; those that later
   pieces need are kept, and the fields at the edges are recorded.
2. The loss is differentiated by these fields, a small table; any loss will do.
3. In reverse order each piece runs again with gradients and is pulled back from its edges and from what later
   pieces wanted of its keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from adapters import tree_attention
from core import keys, metrics, pack, ports
from core.plan import pieces

if TYPE_CHECKING:
    from adapters import transformers_lm

Fields = dict[str, Tensor]


class Walk:
    """One pack's way through a model, piece by piece; inside a swap of the parameters."""

    def __init__(
        self, model: transformers_lm.TransformersLM, params: ports.Params, each: pack.Pack, key: int
    ) -> None:
        """Cut the forest.

        Args:
            model: runs the pieces.
            params: what is swapped in.
            each: a pack of several pieces.
            key: names the draws; both runs of a piece see the same.
        """
        self._model, self._params, self._pack, self._key = model, params, each, key
        self._pieces = pieces.cut(each.ends.cpu().numpy(), each.table.numpy(), each.pieces)
        kept = [torch.from_numpy(piece.kept) for piece in self._pieces]
        self._slots = torch.full((len(each.tokens),), -1, dtype=torch.int64)
        self._slots[torch.cat(kept)] = torch.arange(sum(map(len, kept)))
        self._store: dict[int, tuple[Tensor, Tensor]] = {}

    def fields(self) -> Fields:
        """Return the fields at all edges, in their order, and keep the keys and values that pieces share."""
        found: list[Fields] = []
        with torch.no_grad():
            for number, piece in enumerate(self._pieces):
                route, part = self._run(number, self._past(piece))
                found.append(part)
                self._keep(piece, route)
        return {name: torch.cat([part[name] for part in found]) for name in found[0]}

    def pull_back(
        self, loss: Callable[[Fields], tuple[Float[Tensor, ""], metrics.Metrics]]
    ) -> tuple[Float[Tensor, ""], metrics.Metrics, dict[str, Tensor]]:
        """Return the loss, its metrics and the gradient of every parameter.

        Args:
            loss: from the fields at the edges.
        """
        leaves = {name: values.requires_grad_() for name, values in self.fields().items()}
        value, means = loss(leaves)
        slopes = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        wanted = {name: slope for name, slope in zip(leaves, slopes, strict=True) if slope is not None}
        owed = {
            layer: tuple(torch.zeros_like(t, dtype=_wide(t)) for t in both)
            for layer, both in self._store.items()
        }
        grads: dict[str, Tensor] = {n: torch.zeros_like(p) for n, p in self._params.items()}
        for number in reversed(range(len(self._pieces))):
            self._pull_piece(number, wanted, owed, grads)
        return value.detach(), means, grads

    def _pull_piece(
        self, number: int, wanted: Mapping[str, Tensor], owed: Mapping[int, Any], grads: dict[str, Tensor]
    ) -> None:
        """Run one piece with gradients and add what it gives to the sums, whose memory is ours."""
        piece = self._pieces[number]
        past = {
            layer: (k.requires_grad_(), v.requires_grad_()) for layer, (k, v) in self._past(piece).items()
        }
        route, part = self._run(number, past)
        outputs = [part[name] for name in wanted]
        pulled = [slope[route.edges] for slope in wanted.values()]
        slots = self._slots[torch.from_numpy(piece.kept)]
        local = torch.from_numpy(piece.kept - piece.start)
        for layer, both in (route.fresh or {}).items():
            if len(slots):
                outputs += [t.index_select(2, local.to(t.device)) for t in both]
                pulled += [d.index_select(2, slots.to(d.device)).to(both[0].dtype) for d in owed[layer]]
        inputs = [*self._params.values(), *(t for both in past.values() for t in both)]
        found = torch.autograd.grad(outputs, inputs, pulled, allow_unused=True)
        for name, grad in zip(self._params, found, strict=False):
            if grad is not None:
                grads[name] += grad
        above = self._slots[torch.from_numpy(piece.ancestors)]
        rest = iter(found[len(self._params) :])
        for layer in past:
            for total in owed[layer]:
                grad = next(rest)
                if grad is not None:
                    total.index_add_(2, above.to(total.device), grad.to(total.dtype))

    def _run(
        self, number: int, past: Mapping[int, tree_attention.KeysValues]
    ) -> tuple[tree_attention.Route, Fields]:
        """Run one piece forward; its draws hang on the key and its number alone."""
        piece = self._pieces[number]
        route = tree_attention.piece_route(self._pack, piece, past, kind=self._model.attention)
        if self._model.module.training:
            torch.manual_seed(keys.fold_in(self._key, "piece", number))
        return route, self._model.edges(self._pack, route, self._params)

    def _keep(self, piece: pieces.Piece, route: tree_attention.Route) -> None:
        """Store the keys and values that later pieces attend to."""
        slots = self._slots[torch.from_numpy(piece.kept)]
        local = torch.from_numpy(piece.kept - piece.start)
        for layer, both in (route.fresh or {}).items():
            if layer not in self._store:
                size = int((self._slots >= 0).sum())
                self._store[layer] = tuple(t.new_zeros(*t.shape[:2], size, t.shape[3]) for t in both)  # type: ignore[assignment]
            for whole, part in zip(self._store[layer], both, strict=True):
                whole.index_copy_(2, slots.to(whole.device), part.index_select(2, local.to(part.device)))

    def _past(self, piece: pieces.Piece) -> dict[int, tree_attention.KeysValues]:
        """Return the keys and values of a piece's ancestors by layer."""
        if not len(piece.ancestors):
            return {}
        slots = self._slots[torch.from_numpy(piece.ancestors)]
        return {
            layer: (k.index_select(2, slots.to(k.device)), v.index_select(2, slots.to(v.device)))
            for layer, (k, v) in self._store.items()
        }


def _wide(values: Tensor) -> torch.dtype:
    """Return float32 or better."""
    return torch.promote_types(values.dtype, torch.float32)
