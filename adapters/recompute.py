"""What the backward makes again of a layer, and what it finds kept."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.utils import checkpoint
from transformers import modeling_layers

from core import blocks

if TYPE_CHECKING:
    from adapters import chunks

Context = contextlib.AbstractContextManager[Any]


def layers(module: torch.nn.Module) -> list[modeling_layers.GradientCheckpointingLayer]:
    """Return the decoder's layers, in their order: what is made again, gathered or chunked as one."""
    return [m for m in module.modules() if isinstance(m, modeling_layers.GradientCheckpointingLayer)]


def arm(
    module: transformers.PreTrainedModel,
    chunked: Sequence[chunks.Chunked],
    again: Callable[[torch.nn.Module], Context],
    *,
    keep_attention: bool,
) -> None:
    """Hand every part that the backward makes again what its second run needs, for one pass.

    Args:
        module: whose layers are made again, if any are.
        chunked: the parts that run in chunks, each of which is made again.
        again: opens what the second run of a module needs.
        keep_attention: of layers; see `contexts`.
    """
    for part in chunked:
        entered = functools.partial(again, part.module)
        part.recompute = functools.partial(contexts, entered, keep_attention=False)
    for layer in layers(module) if module.is_activation_checkpointing else ():
        made = functools.partial(contexts, functools.partial(again, layer), keep_attention=keep_attention)
        once_more = functools.partial(checkpoint.checkpoint, use_reentrant=False, context_fn=made)
        layer._gradient_checkpointing_func = once_more  # type: ignore[assignment]


def contexts(enter: Callable[[], Context], *, keep_attention: bool) -> tuple[Context, Context]:
    """Return what the forward of a layer and its second run are wrapped in.

    Args:
        enter: opens what the second run needs: by then the parameters of the first are out of the module.
        keep_attention: keep what attention in blocks gave, its log-sum-exp included, in the place of running
            it again. Other kinds run again: a dense mask is many operators, none of which is worth keeping
            alone, and FlexAttention is not seen inside of what is compiled.
    """
    if not keep_attention:
        return contextlib.nullcontext(), enter()
    keeping, finding = checkpoint.create_selective_checkpoint_contexts(_choose)
    return keeping, both(enter(), finding)


def _choose(_: Any, operator: Any, *__: Any, **___: Any) -> checkpoint.CheckpointPolicy:
    """Keep attention; whatever else may be made again."""
    kept = operator is blocks.OPERATOR
    return checkpoint.CheckpointPolicy.MUST_SAVE if kept else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def both(first: Context, second: Context) -> Iterator[None]:
    """Enter two contexts as one.

    Args:
        first, second: in this order; they are left in the other.
    """
    with first, second:
        yield
