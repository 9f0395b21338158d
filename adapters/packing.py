"""Weights in the layout that the processor's matrix kernels read, for products of few rows.

A decoding step multiplies every weight with a handful of rows. The CPU's plain product first copies the
weight into blocks of its own, which then costs more than the product; here that is done once for many steps.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adapters import transformers_lm
from core import ports


class Packed(Tensor):
    """A weight of linear layers; to all but `torch.nn.functional.linear` it is the plain tensor.

    Attributes:
        blocks: the same numbers in oneDNN's layout.
    """

    blocks: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.linear:
            return _linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, weight.blocks, bias, "none", [], "")


def packed(
    model: transformers_lm.TransformersLM, params: ports.Params, *, rows: int, max_bytes: int
) -> dict[str, Tensor]:
    """Return the parameters, weights of linear layers among them packed where the device has a use for it.

    Args:
        model: whose parameters these are.
        params: plain tensors; they are not written to and share their memory with what is returned.
        rows: about how many rows a product will have.
        max_bytes: most memory that the packed copies take; weights beyond stay plain.
    """
    found = {**model.frozen, **params}
    if not torch.backends.mkldnn.is_available():
        return found
    linear = {
        n for module, place, n in model.slots if isinstance(module, torch.nn.Linear) and place == "weight"
    }
    for name in sorted(linear):
        weight = found[name]
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            continue
        max_bytes -= weight.nbytes
        if max_bytes >= 0:
            both = weight.detach().as_subclass(Packed)
            both.blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
            found[name] = both
    return found
