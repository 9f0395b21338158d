"""A host that moves: what a pass saves for its backward is copied and counted on the CPU too."""

import contextlib
from collections.abc import Iterator, Mapping

import attrs
import pytest
from torch import Tensor

from adapters import offload


@attrs.define(eq=False)
class Moved:
    """What was copied to the host.

    Attributes:
        copies: the copies, each held so that no other takes its place.
        frozen: how many of them are of parameters, which are to stay.
    """

    copies: list[Tensor] = attrs.field(factory=list)
    frozen: int = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all copies, each counted once."""
        return sum(each.nbytes for each in {id(each): each for each in self.copies}.values())


@contextlib.contextmanager
def counted(params: Mapping[str, Tensor]) -> Iterator[Moved]:
    """Let everything leave that would leave an accelerator, however small, and count it.

    Args:
        params: every parameter that a pass reads, frozen ones among them.
    """
    found = Moved()
    own = {p.untyped_storage().data_ptr() for p in params.values()}

    def leave(saved: Tensor, stays: set[int], copies: offload.Copies) -> tuple[object, Tensor] | Tensor:
        place = saved.untyped_storage().data_ptr()
        if place in stays or not saved.nbytes:
            return saved.detach()
        found.copies.append(copies.of(saved))
        found.frozen += place in own
        return saved.device, found.copies[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "_leave", leave)
        yield found
