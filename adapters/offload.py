"""Activations that wait for the backward in host memory."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

SMALLEST = 1 << 16
"""Bytes below which a tensor stays: moving it would take longer than its memory is worth."""


@contextlib.contextmanager
def to_host(params: Mapping[str, Tensor]) -> Iterator[None]:
    """Keep what the forward saves for the backward in host memory until the backward asks for it.

    Parameters stay where they are: they take no further memory. On the device's own stream a copy is made
    before the memory is given away, and back before it is read, so nothing need be waited for. On the host
    itself everything stays.

    Args:
        params: what is swapped in.
    """
    with torch.autograd.graph.saved_tensors_hooks(*ways(params, moved=True)):
        yield


def ways(
    params: Mapping[str, Tensor], *, moved: bool
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return how a tensor leaves and how it comes back; Args as of `to_host`; unmoved, it stays."""
    own = {p.untyped_storage().data_ptr() for p in params.values()}
    copies = Copies()
    return (lambda saved: _leave(saved, own, copies) if moved else saved.detach()), _come_back


class Copies:
    """What has been copied: several operations save one tensor, and one copy serves them all."""

    def __init__(self) -> None:
        """Begin with none."""
        self._made: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[Tensor]]] = {}

    def of(self, saved: Tensor) -> Tensor:
        """Return the copy of a tensor on the host."""
        storage = saved.untyped_storage()
        place = (
            storage._cdata,
            saved.dtype,
            saved.storage_offset(),
            saved.shape,
            saved.stride(),
            saved._version,
        )
        held, found = self._made.get(place, (None, None))
        # Without a living storage the address may be another tensor's by now.
        host = None if held is None or held.expired() or found is None else found()
        if host is None:
            pinned = saved.device.type == "cuda"
            # Laid out as it was: a second run chooses its kernels by strides, and must choose the first's.
            host = torch.empty_like(saved, device="cpu", pin_memory=pinned)
            host.copy_(saved, non_blocking=pinned)
            self._made[place] = StorageWeakRef(storage), weakref.ref(host)
        return host


def _leave(saved: Tensor, own: set[int], copies: Copies) -> Any:
    """Return a copy on the host and where it came from, or the tensor itself."""
    stays = saved.device.type == "cpu" or saved.nbytes < SMALLEST
    if stays or saved.untyped_storage().data_ptr() in own:
        # Detached: an output that is saved by its own node would otherwise hold itself.
        return saved.detach()
    return saved.device, copies.of(saved)


def _come_back(left: Any) -> Tensor:
    """Return a tensor to where it came from."""
    if isinstance(left, Tensor):
        return left
    device, host = left
    return host.to(device, non_blocking=device.type == "cuda")
