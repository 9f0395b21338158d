"""Runs whose parameters are split over their processes: what a checkpoint and a model folder need whole."""

from collections.abc import Mapping

import attrs
from torch import Tensor

from adapters import shards, transformers_lm
from core import optimizers, ports
from shell import mistake, options, references


def check(chosen: options.Options, device: ports.Device, ranks: ports.Ranks) -> None:
    """Refuse what does not go with split parameters, before anything is loaded.

    Raises:
        mistake.Mistake: names it.
    """
    if not chosen.fsdp:
        return
    if ranks.num == 1:
        raise mistake.Mistake(
            "fsdp: true came, and there is one process; start several, as in torchrun --nproc_per_node 2 -m "
            "shell.train ..., or leave it out"
        )
    sized = chosen.max_shapes is not None or chosen.pad_to_multiple_of not in ("auto", "none")
    for name, there in (
        ("compile", chosen.compile),
        ("planned sizes (pad_to_multiple_of, max_shapes)", sized),
        (f"device {device.name}", device.static_shapes),
    ):
        if there:
            raise mistake.Mistake(f"fsdp: true came with {name}, which is not built yet; leave one out")


def split(
    model: transformers_lm.TransformersLM,
    params: Mapping[str, Tensor],
    reference: references.Reference | None,
    ranks: ports.Ranks,
    device: ports.Device,
) -> tuple[transformers_lm.TransformersLM, dict[str, Tensor], references.Reference | None, ports.Ranks]:
    """Split a model's parameters and those of its reference.

    Args:
        model, params, reference: whole, on the host.
        ranks: the processes.
        device: where the parts go.
    """
    made, parts = shards.split(model, params, ranks, device=device.type)
    assert made.sharding is not None
    layout = made.sharding.layout
    if reference is not None and reference.params is not None:
        cut = {n: layout.part(n, p).to(device.type) for n, p in reference.params.items()}
        reference = attrs.evolve(reference, params=cut)
    return made, parts, reference, attrs.evolve(ranks, split=True)


def whole(model: transformers_lm.TransformersLM, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with split ones put together; every process must call this.

    Args:
        model: split or not.
        tensors: by path, which ends in the parameter's name.
    """
    if model.sharding is None:
        return dict(tensors)
    layout = model.sharding.layout
    return {
        path: layout.whole(name, tensor).cpu() if layout.is_part(name := _name(path), tensor) else tensor
        for path, tensor in tensors.items()
    }


def cut(
    model: transformers_lm.TransformersLM, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return this process's parts of a checkpoint's tensors, the reverse of `whole`.

    Args:
        model: split or not.
        tensors: by path.
        like: what this process holds, by path.
    """
    if model.sharding is None:
        return dict(tensors)
    layout = model.sharding.layout
    return {
        path: layout.part(name, tensor)
        if path in like and layout.is_part(name := _name(path), like[path])
        else tensor
        for path, tensor in tensors.items()
    }


def norm(ranks: ports.Ranks) -> optimizers.Norm:
    """Return what measures gradients: all there are, or the parts of all processes."""
    return shards.norm(ranks) if ranks.split else optimizers.global_norm


def _name(path: str) -> str:
    """Return the last part of a path."""
    return path.rpartition("/")[2]
