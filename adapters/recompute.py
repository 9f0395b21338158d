"""What the backward makes again of a layer, and what it finds kept."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint
from transformers import modeling_layers

from core import blocks

Context = contextlib.AbstractContextManager[Any]
# Attention under a dense mask is many operators, none of which is worth keeping alone.
KEPT = (blocks.OPERATOR, torch.ops.higher_order.flex_attention)


def layers(module: torch.nn.Module) -> list[modeling_layers.GradientCheckpointingLayer]:
    """Return the decoder's layers, in their order: what is made again, gathered or chunked as one."""
    return [m for m in module.modules() if isinstance(m, modeling_layers.GradientCheckpointingLayer)]


def contexts(enter: Callable[[], Context], *, keep_attention: bool) -> tuple[Context, Context]:
    """Return what the forward of a layer and its second run are wrapped in.

    Args:
        enter: opens what the second run needs: by then the parameters of the first are out of the module.
        keep_attention: keep what attention gave, its log-sum-exp included, in the place of running it again.
    """
    if not keep_attention:
        return contextlib.nullcontext(), enter()
    keeping, finding = checkpoint.create_selective_checkpoint_contexts(_choose)
    return keeping, both(enter(), finding)


def _choose(_: Any, operator: Any, *__: Any, **___: Any) -> checkpoint.CheckpointPolicy:
    """Keep attention; whatever else may be made again."""
    kept = operator in KEPT
    return checkpoint.CheckpointPolicy.MUST_SAVE if kept else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def both(first: Context, second: Context) -> Iterator[None]:
    """Enter two contexts as one.

    Args:
        first, second: in this order; they are left in the other.
    """
    with first, second:
        yield
