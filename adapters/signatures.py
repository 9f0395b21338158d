"""Operators that ran one by one, told apart as a compiler of operators would: by shapes and dtypes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Signatures(TorchDispatchMode):
    """Counts (operator, shapes, dtypes) while it is entered; what runs inside a compiled graph has none.

    Attributes:
        seen: every signature so far.
    """

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.seen: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        # Numbers are arguments of a kernel, not part of it; whole numbers and names choose one.
        self.seen.add((func, _told(args), tuple((name, _told(value)) for name, value in named.items())))
        return func(*args, **named)


def _told(value: Any) -> Any:
    """Return of an argument what tells one compiled operator from another."""
    if isinstance(value, torch.Tensor):
        return (value.device.type, tuple(value.shape), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_told(one) for one in value)
    return float if isinstance(value, float) else repr(value)
