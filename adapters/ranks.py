"""Processes that share a step: data parallel sums over torch.distributed.

`accelerate launch` or `torchrun` starts them; without a launcher a process is alone.
"""

import atexit
import datetime
import functools
import os
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch import Tensor

from core import metrics, ports, record

PATIENCE = datetime.timedelta(days=1)
"""How long one process waits for another that tokenizes or saves alone; a launcher ends all when one dies."""


def is_first() -> bool:
    """Say whether this process is the one that speaks and writes, before it has joined the others."""
    return os.environ.get("RANK", "0") == "0"


def join(device: ports.Device) -> ports.Ranks:
    """Join the processes that a launcher started; alone when there is no launcher.

    They stay together until they end: a group cannot be made twice over one launcher's store.

    Args:
        device: what this run computes on; it decides the backend.
    """
    state = accelerate.PartialState(cpu=device.type == "cpu", timeout=PATIENCE)
    if state.num_processes == 1:
        return ports.ALONE
    atexit.register(leave)
    return ports.Ranks(
        index=state.process_index,
        num=state.num_processes,
        sum=functools.partial(_sum, place=device.type),
        merge=_merge,
    )


def leave() -> None:
    """Part from the other processes."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def wait(ranks: ports.Ranks) -> None:
    """Wait until every process is here."""
    if ranks.num > 1:
        dist.barrier()


def _sum(tree: Any, *, place: str = "cpu") -> Any:
    """Add the tensors of a tree up over all processes, one message a dtype.

    Messages go from where the run computes: not every backend takes those of the host, where a loss may be.
    """
    leaves, structure = record.tree.flatten(tree)
    summed: list[Tensor | None] = [None] * len(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        message = torch.cat([leaves[i].detach().reshape(-1).to(place) for i in places])
        dist.all_reduce(message)
        parts = message.split([leaves[i].numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            summed[i] = part.view(leaves[i].shape).to(leaves[i].device)
    return record.tree.unflatten(structure, summed)


def _merge(means: metrics.Metrics) -> metrics.Metrics:
    """Merge metrics over all processes, in the order of the ranks."""
    gathered: list[metrics.Metrics] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, metrics.host(means))
    return metrics.merge(*gathered)
