"""Float32 or better: what sums, norms and losses are in, whatever their terms are."""

import torch
from jaxtyping import Shaped
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or the dtype that came where that is wider.

    >>> wide(torch.bfloat16), wide(torch.float64)
    (torch.float32, torch.float64)

    Args:
        dtype: of terms; booleans and integers give float32.
    """
    return torch.promote_types(dtype, torch.float32)


def widened(values: Shaped[Tensor, "*axes"]) -> Shaped[Tensor, "*axes"]:
    """Return the values in float32 or better, themselves where they are.

    Args:
        values: of any dtype.
    """
    return values.to(wide(values.dtype))
