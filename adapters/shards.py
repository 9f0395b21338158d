"""Full sharding: each process holds its part of every parameter, and a layer's are whole only while it runs.

A part is `[ceil(numel / processes)]` of the flattened parameter, padded with zeros, under as many axes as the
whole has. A layer's parts are gathered when its forward begins and dropped when it ends; in the backward they
are gathered again, and each process is left with its part of the sum of all gradients. So parameters stay
values that are swapped in: gradients, moments and masters are parts of the same size, and every rule of an
optimizer works on them as it is. Rajbhandari et al. 2019 (arXiv:1910.02054), stage 3; as a function of the
parts, Zhang et al. 2024 (arXiv:2411.00284).

Every process must run the model the same number of times.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from adapters import recompute
from core import metrics, optimizers, pack, ports, precision
from core.plan import sample

if TYPE_CHECKING:
    from adapters import transformers_lm

Slots = tuple[tuple[torch.nn.Module, str, str], ...]


@attrs.frozen(kw_only=True)
class Layout:
    """How parameters are split.

    Attributes:
        shapes: of the whole parameters, by name.
        index: which part this process holds.
        num: parts of each.
    """

    shapes: Mapping[str, torch.Size]
    index: int
    num: int

    def length(self, name: str) -> int:
        """Return the elements of a part."""
        return -(-math.prod(self.shapes[name]) // self.num)

    def is_part(self, name: str, tensor: Tensor) -> bool:
        """Say whether a tensor is laid out like a part of a parameter; a number that goes with one is not."""
        shape = self.shapes.get(name)
        return shape is not None and tensor.shape == (*(1,) * (len(shape) - 1), self.length(name))

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Cut this process's part out of a whole parameter, or of what is laid out like one.

        Args:
            name: of the parameter.
            whole: in its shape.
        """
        length = self.length(name)
        flat = whole.reshape(-1)[self.index * length : (self.index + 1) * length]
        padded = torch.cat([flat, flat.new_zeros(length - len(flat))])
        return padded.view(*(1,) * (whole.ndim - 1), length)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Put the parts of all processes together; every one of them must call this.

        Args:
            name: of the parameter.
            part: this process's.
        """
        made = part.new_empty(self.num * part.numel())
        dist.all_gather_single(made, part.reshape(-1))
        return made[: math.prod(self.shapes[name])].view(self.shapes[name])


class Gathered(torch.autograd.Function):
    """Whole parameters out of parts of one dtype, in one message; backward, the part of summed gradients."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, names: tuple[str, ...], *parts: Tensor) -> tuple[Tensor, ...]:
        """Gather all parts and take them apart by parameter."""
        ctx.layout, ctx.names = layout, names
        ctx.set_materialize_grads(False)
        ctx.like, ctx.shapes = parts[0], [part.shape for part in parts]
        return gathered(layout, names, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        """Sum over the processes in float32 or better; each keeps its part."""
        layout, names, like = ctx.layout, ctx.names, ctx.like
        wide = precision.wide(like.dtype)
        lengths = [layout.length(name) for name in names]
        sent = torch.zeros(layout.num, sum(lengths), dtype=wide, device=like.device)
        for columns, grad in zip(sent.split(lengths, 1), grads, strict=True):
            if grad is not None:
                flat = torch.zeros(columns.numel(), dtype=wide, device=like.device)
                flat[: grad.numel()] = grad.reshape(-1)
                columns.copy_(flat.view_as(columns))
        summed = sent.new_empty(sum(lengths))
        dist.reduce_scatter_single(summed, sent.view(-1))
        parts = summed.to(like.dtype).split(lengths)
        return None, None, *(part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True))


def gathered(layout: Layout, names: Sequence[str], parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return whole parameters out of their parts, which are of one dtype, in one message."""
    lengths = [layout.length(name) for name in names]
    own = torch.cat([part.detach().reshape(-1) for part in parts])
    every = own.new_empty(layout.num * len(own))
    dist.all_gather_single(every, own)
    columns = every.view(layout.num, -1).split(lengths, 1)
    return tuple(
        column.reshape(-1)[: math.prod(layout.shapes[name])].view(layout.shapes[name])
        for name, column in zip(names, columns, strict=True)
    )


class Unit:
    """A layer, or what is left of the model beside the layers: its parameters are gathered together."""

    def __init__(self, slots: Slots) -> None:
        """Nothing is gathered yet.

        Args:
            slots: places that hold a parameter: (submodule, attribute, name).
        """
        self.slots = slots
        self.names = tuple(dict.fromkeys(name for _, _, name in slots))
        self.held = tuple(part._parameters[attribute] for part, attribute, _ in slots)


class Sharding:
    """What a sharded model does in the place of a swap.

    Attributes:
        layout: how parameters are split.
    """

    def __init__(
        self, layout: Layout, module: torch.nn.Module, slots: Slots, most: Callable[[int], int]
    ) -> None:
        """Let the layers gather what they need.

        Args:
            layout: how parameters are split.
            module: whose layers they are.
            slots: its places of parameters.
            most: the largest of a number over all processes.
        """
        self.layout = layout
        layers = recompute.layers(module)
        inside = {id(part): i for i, layer in enumerate(layers) for part in layer.modules()}
        uses: dict[str, set[int]] = {}
        for part, _, name in slots:
            uses.setdefault(name, set()).add(inside.get(id(part), -1))
        # A parameter that two layers share is gathered with the rest, once.
        alone = {name for name, places in uses.items() if len(places) == 1 and -1 not in places}
        self._rest = Unit(tuple(slot for slot in slots if slot[2] not in alone))
        self._units = tuple(
            Unit(tuple(s for s in slots if inside.get(id(s[0])) == i and s[2] in alone))
            for i in range(len(layers))
        )
        self._parts: Mapping[str, Tensor] | None = None
        self._most = most
        self._known: dict[int, tuple[Unit, str]] = {}
        self._again: tuple[Unit, dict[str, Tensor]] | None = None
        for layer, unit in zip(layers, self._units, strict=True):
            layer.register_forward_pre_hook(lambda *_, unit=unit: self._fill(unit), prepend=True)
            layer.register_forward_hook(lambda *_, unit=unit: self._empty(unit), always_call=True)

    @contextlib.contextmanager
    def swapped(self, parts: Mapping[str, Tensor]) -> Iterator[None]:
        """Gather what stands beside the layers, and let each layer gather its own while it runs.

        Args:
            parts: this process's, by name; what is missing stays out of its place.
        """
        self._parts = parts
        try:
            self._fill(self._rest)
            yield
        finally:
            self._empty(self._rest)
            self._parts, self._again = None, None

    def num_runs(self, own: int) -> int:
        """Return how often all processes run the model where this one would `own` times; at least once."""
        return max(1, self._most(own))

    @contextlib.contextmanager
    def within(self, module: torch.nn.Module, parts: Mapping[str, Tensor]) -> Iterator[None]:
        """Gather the parameters below a module for a second run of it in the backward.

        Args:
            module: a layer, or a part of one.
            parts: this process's, by name.
        """
        below = {id(part) for part in module.modules()}
        unit = next(u for u in self._units if any(id(part) in below for part, _, _ in u.slots))
        again = self._gathered_again(unit, parts)
        places = [slot for slot in unit.slots if id(slot[0]) in below]
        held = [part._parameters[attribute] for part, attribute, _ in places]
        try:
            for part, attribute, name in places:
                whole = again.get(name)
                # What a second run saves must be what the first one did.
                part._parameters[attribute] = None if whole is None else _like(whole, parts[name])  # type: ignore[assignment]
            yield
        finally:
            for (part, attribute, _), before in zip(places, held, strict=True):
                part._parameters[attribute] = before

    def saving(
        self, leave: Callable[[Tensor], Any], come_back: Callable[[Any], Tensor]
    ) -> contextlib.AbstractContextManager[Any]:
        """Return hooks that keep no gathered parameter for the backward: it is gathered again.

        What autocast made of one is kept, unless layers are made again.

        Args:
            leave, come_back: what is done with every other tensor.
        """

        def pack(saved: Tensor) -> Any:
            known = self._known.get(saved.untyped_storage().data_ptr())
            if known is None:
                return None, leave(saved)
            if known[0] is self._rest:  # whole until the pass ends
                return known, saved.detach()
            return known, (saved.shape, saved.stride(), saved.storage_offset(), self._parts)

        def unpack(kept: Any) -> Tensor:
            known, rest = kept
            if known is None:
                return come_back(rest)
            if isinstance(rest, Tensor):
                return rest
            unit, name = known
            shape, stride, offset, parts = rest
            return self._gathered_again(unit, parts)[name].as_strided(shape, stride, offset)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _gathered_again(self, unit: Unit, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a unit's parameters; those of one unit are kept until another's are asked for."""
        if self._again is None or self._again[0] is not unit:
            self._again = None
            with torch.no_grad():
                self._again = (unit, self._whole(unit, parts))
        return self._again[1]

    def _whole(self, unit: Unit, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather a unit's parameters, one message for each dtype of trained and of frozen ones."""
        present = [name for name in unit.names if name in parts]
        kinds = dict.fromkeys((parts[n].dtype, parts[n].requires_grad) for n in present)
        found: dict[str, Tensor] = {}
        for kind in kinds:
            names = tuple(n for n in present if (parts[n].dtype, parts[n].requires_grad) == kind)
            found |= zip(names, Gathered.apply(self.layout, names, *(parts[n] for n in names)), strict=True)
        return found

    def _fill(self, unit: Unit) -> None:
        """Put a unit's parameters in their places; outside of a pass they are somebody else's."""
        if self._parts is None:
            return
        whole = self._whole(unit, self._parts)
        for part, attribute, name in unit.slots:
            part._parameters[attribute] = whole.get(name)  # type: ignore[assignment]
        self._known |= {t.untyped_storage().data_ptr(): (unit, n) for n, t in whole.items()}

    def _empty(self, unit: Unit) -> None:
        """Take a unit's parameters out of their places."""
        if self._parts is None:
            return
        held = itertools.chain.from_iterable(part._parameters.values() for part, _, _ in unit.slots)
        for tensor in held:
            if tensor is not None:
                self._known.pop(tensor.untyped_storage().data_ptr(), None)
        for (part, attribute, _), before in zip(unit.slots, unit.held, strict=True):
            part._parameters[attribute] = before


def split(
    model: transformers_lm.TransformersLM,
    params: Mapping[str, Tensor],
    ranks: ports.Ranks,
    *,
    device: torch.device | str,
) -> tuple[transformers_lm.TransformersLM, dict[str, Tensor]]:
    """Split a model's parameters, trained and frozen, over processes.

    Args:
        model: bound, with its adapter if it has one. From here on only what is returned runs.
        params: the trained ones, whole.
        ranks: the processes, more than one.
        device: where the parts go; only they are ever copied there.

    Returns:
        The model, and this process's parts of what is trained.
    """
    shapes = {n: p.shape for n, p in {**model.frozen, **params}.items()}
    layout = Layout(shapes=shapes, index=ranks.index, num=ranks.num)

    def most(own: int) -> int:
        found = ranks.merge({"runs": metrics.Maximum(value=float(own))})
        return int(metrics.values(found)["runs"])

    def parts(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: layout.part(n, p).to(device) for n, p in whole.items()}

    sharding = Sharding(layout, model.module, model.slots, most)
    return attrs.evolve(model, frozen=parts(model.frozen), sharding=sharding), parts(params)


def idle(model: transformers_lm.TransformersLM, params: Mapping[str, Tensor]) -> Tensor:
    """Run the model on one token and return nothing of it: `[0]`, with a graph to every parameter.

    Args:
        model: split.
        params: this process's parts.
    """
    one = sample.Sample(tokens=np.zeros(1, np.int64), trained=np.zeros(1, np.bool_))
    each = pack.build([one], pack.count([one]), device=next(iter({**model.frozen, **params}.values())).device)
    hidden = model.hidden(model.route(each), params).flatten()[:0]
    # A head may be all that trains beside the layers: the others sum its gradient, so this process must too.
    beside = (part._parameters[attribute] for part, attribute, _ in model.slots)
    heads = [p.flatten()[:0].to(hidden.dtype) for p in beside if p is not None and p.requires_grad]
    return torch.cat([hidden, *heads])


def joined(
    model: transformers_lm.TransformersLM, params: Mapping[str, Tensor], *, device: torch.device | str | None
) -> tuple[transformers_lm.TransformersLM, dict[str, Tensor]]:
    """Put a split model together again; every process must call this.

    Args:
        model: split or not.
        params: what is trained.
        device: where the whole parameters go; None: where the parts are.
    """
    if model.sharding is None:
        return model, dict(params)
    layout = model.sharding.layout

    def whole(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: layout.whole(n, p).to(device or p.device) for n, p in parts.items()}

    return attrs.evolve(model, frozen=whole(model.frozen), sharding=None), whole(params)


def norm(ranks: ports.Ranks) -> optimizers.Norm:
    """Return what measures gradients of which each process holds a part, padding being zero."""
    return lambda grads: ranks.sum(optimizers.global_norm(grads).square()).sqrt()


def _like(whole: Tensor, part: Tensor) -> Tensor:
    """Return a whole parameter that is trained or frozen as its part is."""
    return whole.detach().requires_grad_(part.requires_grad)
