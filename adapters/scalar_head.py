"""A scalar for each prefix of a sequence, from a decoder with the head `score`: what a reward model says."""

from typing import Any

import attrs
import torch
import transformers
from jaxtyping import Float
from torch import Tensor

from core import pack, precision

WEIGHT = "score.weight"


def has(module: transformers.PreTrainedModel) -> bool:
    """Say whether a module has a scalar head in the place of one over the vocabulary."""
    score = getattr(module, "score", None)
    return isinstance(score, torch.nn.Linear) and score.out_features == 1


def draw(module: transformers.PreTrainedModel, seed: int) -> None:
    """Fill the head from a seed, as widely as the model draws its other weights.

    Args:
        module: has a scalar head.
        seed: of the draw alone: no other weight moves it.
    """
    weight: Any = module.score.weight  # pyright: ignore[reportAttributeAccessIssue]
    width = float(getattr(module.config.get_text_config(), "initializer_range", None) or 0.02)
    drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        weight.copy_(drawn * width)


def at_targets(each: pack.Pack) -> pack.Pack:
    """Return a pack whose edges are read where they end: a scalar takes in the row's own token."""
    order = each.edge_targets.argsort()
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    targets = each.edge_targets.index_select(0, order)
    return attrs.evolve(
        each,
        edge_nodes=targets,
        edge_tokens=each.edge_tokens.index_select(0, order),
        edge_targets=targets,
        term_edges=rank.index_select(0, each.term_edges),
    )


def score(
    module: transformers.PreTrainedModel, hidden: Float[Tensor, "edges hidden"]
) -> dict[str, Float[Tensor, " edges"]]:
    """Return the scalars, in float32 or better; log-probabilities, which nobody can tell, are NaN."""
    values = module.score(hidden)[:, 0]  # pyright: ignore[reportCallIssue]
    values = precision.widened(values)
    return {"logprobs": torch.full_like(values, torch.nan), "values": values}
