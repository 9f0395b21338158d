"""How much memory tensors hold, counted storage by storage: the same on every run, unlike resident memory."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, from operator to operator, while it is entered.

    What an operator takes and gives back inside of itself is not seen, nor what runs inside a compiled graph.
    What was seen and dies after it was left is let go of all the same.

    Attributes:
        now: bytes alive of what was seen.
        peak: the most that ever were.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        """Begin with what is there already.

        Args:
            held: tensors that were made before.
        """
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, weakref.ref[Any]] = {}
        for tensor in held:
            self.see(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.see(tensor)
        return made

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it dies, once however many tensors share it.

        Args:
            tensor: any; one on the meta device has no bytes.
        """
        if tensor.device.type == "meta":
            return
        held: Any = tensor  # what is laid out for oneDNN shows no storage, and nothing shares it
        key, size = id(tensor), tensor.nbytes
        if not tensor.is_mkldnn:
            held = tensor.untyped_storage()
            key, size = held._cdata, held.nbytes()
        if key in self._seen:
            return

        def gone(_: Any) -> None:
            self.now -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(held, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def peak_bytes(work: Callable[[], Any], held: Iterable[Tensor] = ()) -> int:
    """Return the most bytes that a piece of work adds to what is there already.

    Args:
        work: what runs.
        held: what is there already.
    """
    live = Live(held)
    before = live.now
    with live:
        work()
    return live.peak - before


def size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, of storages that several share once.

    Args:
        tensors: any.
    """
    return Live(tensors).now
