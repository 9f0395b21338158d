"""Feed-forward parts that run a chunk of positions at a time: their inner width is held for one chunk."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils import checkpoint

from adapters import recompute

NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe")


class Chunked:
    """A feed-forward part's forward over chunks; each chunk is run again in the backward.

    Attributes:
        module: whose forward it wraps.
        size: positions of a chunk.
        recompute: the contexts of a chunk's forward and of its second run, which must swap the parameters in
            again; set before each forward.
    """

    def __init__(self, module: torch.nn.Module, size: int) -> None:
        """Wrap a module's forward.

        Args:
            module: from `[batch, positions, hidden]` to the same, each position for itself.
            size: positions of a chunk.
        """
        self.module, self._forward, self.size = module, module.forward, size
        self.recompute: Callable[[], tuple[Any, Any]] = checkpoint.noop_context_fn

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the chunks one after another."""
        if hidden.shape[1] <= self.size:
            return self._forward(hidden, *args, **kwargs)
        made = [self._part(part, *args, **kwargs) for part in hidden.split(self.size, dim=1)]
        if isinstance(made[0], Tensor):
            return torch.cat(made, dim=1)
        # Experts tell their router's scores too, `[positions, experts]`.
        outputs, *others = zip(*made, strict=True)
        return torch.cat(outputs, dim=1), *(torch.cat(each) for each in others)

    def _part(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run one chunk."""
        if not torch.is_grad_enabled():
            return self._forward(hidden, *args, **kwargs)
        return checkpoint.checkpoint(
            self._forward, hidden, *args, use_reentrant=False, context_fn=self.recompute, **kwargs
        )


def install(module: transformers.PreTrainedModel, size: int) -> tuple[Chunked, ...]:
    """Let every layer's feed-forward part run in chunks.

    Args:
        module: whose layers they are.
        size: positions of a chunk.

    Returns:
        What runs in the place of each.

    Raises:
        ValueError: a layer has none that can be run on its own.
    """
    layers = recompute.layers(module)
    parts = [next((getattr(layer, n) for n in NAMES if hasattr(layer, n)), None) for layer in layers]
    if not parts or not all(isinstance(part, torch.nn.Module) for part in parts):
        raise ValueError(
            f"a {module.config.model_type} model's layers have no feed-forward part of their own; leave "
            "chunk_size_feed_forward out."
        )
    made = []
    for part in parts:
        assert part is not None
        part.forward = Chunked(part, size)
        made.append(part.forward)
    return tuple(made)
