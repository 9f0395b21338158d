"""A small language model in plain tensor functions: what the properties of an algorithm are checked on.

One attention layer over learned embeddings and positions, float64, a few hundred numbers. It is a Model like
any other, so whatever holds here holds by the same road as in a run.
"""

import attrs
import torch
from jaxtyping import Float
from torch import Tensor

from core import attention, divergence, head, metrics, pack, ports

VOCAB, WIDTH, POSITIONS = 11, 6, 64
TEACHER = 1
"""Seed of the parameters that `divergences` are measured to."""


def params(seed: int = 0) -> dict[str, Tensor]:
    """Draw parameters: embeddings, positions, four projections, a head, a scalar head."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"tokens": (VOCAB, WIDTH), "positions": (POSITIONS, WIDTH), "head": (VOCAB, WIDTH)}
    shapes |= {name: (WIDTH, WIDTH) for name in ("query", "key", "value", "out")} | {"score": (WIDTH,)}
    return {n: torch.randn(s, generator=draw, dtype=torch.float64) * 0.7 for n, s in shapes.items()}


@attrs.frozen(kw_only=True)
class Reference:
    """The model; it has no state.

    Attributes:
        beta: of the divergence to the teacher, see `core.divergence`.
    """

    beta: float = 0.5

    def predict(self, params: ports.Params, pack: pack.Pack, key: int | None) -> pack.Scores:
        """Score every row of the pack, without gradients; see `core.ports.Model`."""
        with torch.no_grad():
            return _score(params, pack, self.beta)

    def pull_back(
        self, params: ports.Params, pack: pack.Pack, key: int, loss: ports.Loss
    ) -> tuple[Float[Tensor, ""], metrics.Metrics, dict[str, Tensor]]:
        """Run forward, loss and backward; see `core.ports.Model`."""
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        with torch.enable_grad():
            value, means = loss(_score(leaves, pack, self.beta))
        found = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True, allow_unused=True)
        return value.detach(), means, dict(zip(leaves, found, strict=True))


def _score(given: ports.Params, each: pack.Pack, beta: float) -> pack.Scores:
    """Run the forest through one layer and the heads that are asked for."""
    hidden = _hidden(given, each)
    parents = hidden.index_select(0, each.edge_nodes)
    fields = head.score(parents, given["head"], each.edge_tokens, needs=each.needs)
    if "values" in each.needs:
        fields["values"] = hidden.index_select(0, each.edge_targets) @ given["score"]
    if "divergences" in each.needs:
        teacher = params(seed=TEACHER)
        told = _hidden(teacher, each).index_select(0, each.edge_nodes)
        fields["divergences"] = divergence.divergences(
            parents, given["head"], told, teacher["head"], beta=beta
        )
    return pack.Scores(**{n: v.index_select(0, each.term_edges) for n, v in fields.items()})


def _hidden(params: ports.Params, each: pack.Pack) -> Float[Tensor, "nodes hidden"]:
    """Run the forest through one layer."""
    x = params["tokens"].index_select(0, each.tokens) + params["positions"].index_select(0, each.depths)
    query, key, value = (torch.tanh(x @ params[n])[None, None] for n in ("query", "key", "value"))
    mask = attention.ancestors(each.ends, each.depths)
    seen = attention.masked(query, key, value, mask, scale=WIDTH**-0.5)[0, 0]
    return x + seen @ params["out"]
