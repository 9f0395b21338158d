"""Slopes of a function by finite differences, to hold autograd's against.

A loss may hold a part of itself fixed (`detach`, `no_grad`): the weight of CISPO, the probability of DFT. Its
gradient is then not that of its value, and differences of values would only say so. Here what is held fixed
is remembered in the first call and given back in the others, so that both sides differentiate the same.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, overrides
from torch.autograd import function as autograd_function

STEP = 1e-6
"""Where the error of the difference and that of float64 are about alike."""
_HOLDS = (Tensor.detach, torch.detach, Tensor.data.__get__)  # pyright: ignore[reportAttributeAccessIssue]


def along(
    function: Callable[[Mapping[str, Tensor]], Tensor],
    at: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
) -> tuple[float, float]:
    """Return the slope of a scalar function in one direction, by autograd and by a central difference.

        df = sum_i g_i d_i        df = (f(x + h d) - f(x - h d)) / 2h

    What the function detaches, or makes where no gradient is recorded, stays what it is at `at`.

    >>> cube = lambda given: (given["x"].detach() * given["x"] ** 2).sum()
    >>> x = torch.tensor([3.0], dtype=torch.float64)
    >>> one, two = along(cube, {"x": x}, {"x": torch.ones_like(x)})
    >>> round(one, 6), round(two, 6)
    (18.0, 18.0)

    Args:
        function: of tensors by name, float64, the same operations in the same order each time.
        at: where.
        direction: as large as `at`.

    Raises:
        ValueError: the function runs other operations when it is called again.
    """
    leaves = {name: value.clone().requires_grad_() for name, value in at.items()}
    first = _Held(None)
    with torch.enable_grad(), first:
        value = function(leaves)
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    slope = sum((g * direction[name]).sum() for name, g in zip(leaves, found, strict=True))
    ends = []
    for sign in (1.0, -1.0):
        # Gradients are recorded here too: where none would be, all would count as held fixed.
        moved = {name: (at[name] + sign * STEP * direction[name]).requires_grad_() for name in at}
        with torch.enable_grad(), _Held(first.seen):
            end = function(moved)
        ends.append(end.item())
    return float(slope), (ends[0] - ends[1]) / (2 * STEP)


class _Held(overrides.TorchFunctionMode):
    """Remembers what is held fixed, or gives back what another remembered.

    Attributes:
        seen: what was held, in order.
    """

    def __init__(self, known: Sequence[Any] | None) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self._known: Iterator[Any] | None = None if known is None else iter(known)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if not isinstance(found, Tensor) or not (func in _HOLDS or _unrecorded()):
            return found
        if self._known is None:
            self.seen.append(found.detach().clone())
            return found
        known = next(self._known, None)
        if known is None or known.shape != found.shape:
            raise ValueError("the loss runs other operations when it is called again.")
        return known


def _unrecorded() -> bool:
    """Say whether the caller turned gradients off; a function with a backward of its own is not meant."""
    if torch.is_grad_enabled():
        return False
    frame = inspect.currentframe()
    while frame is not None:
        given = frame.f_locals.get("ctx")
        if frame.f_code.co_name == "forward" and isinstance(given, autograd_function.FunctionCtx):
            return False
        frame = frame.f_back
    return True


def direction(at: Mapping[str, Tensor], seed: int) -> dict[str, Float[Tensor, "*any"]]:
    """Draw a direction: a normal number for each of the tensors'.

    Args:
        at: tensors by name.
        seed: names the draw.
    """
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=draw, dtype=value.dtype) for name, value in at.items()}
