"""Packs at planned sizes: what the device sees is padded, and nothing else is.

The table of a batch, its losses, metrics and reductions stay on the host at their true sizes; only forests
go to the device, each filled up to a planned size. So a loss cannot see padding, and no shape on the device
depends on data. Padding nodes are a chain of their own that no edge leads from but edges of padding, whose
scores nobody reads and whose gradient is 0.

Axes: nodes, edges, blocks.
"""

import itertools
from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from core import pack
from core.plan import batching, sample, sizes, spans


def build(
    samples: Sequence[sample.Sample],
    counts: pack.Counts,
    *,
    planned: sizes.Sizes,
    budget: int,
    share: bool = True,
    needs: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> pack.Pack:
    """Merge samples into a pack on the host whose forests, padded, are on the device.

    A pack over the budget is run in several forests, each within it, and prefixes that these share are
    repeated: pieces that attend to each other's keys would have shapes that nobody planned.

    Args:
        samples, counts, share, needs, dtype: as of `pack.build`.
        planned: sizes of forests; the smallest that fits is taken.
        budget: most true nodes of a forest.
        device: where the forests go.

    Raises:
        ValueError: one sample alone is over the budget, or a forest is larger than every planned size.
    """
    options = {"needs": needs, "share": share, "dtype": dtype}
    whole = pack.build(samples, counts, **options)
    parts = [whole]
    if len(whole.tokens) > budget:
        longest = max(len(s.tokens) for s in samples)
        if longest > budget:
            raise ValueError(
                f"a sample has {longest} tokens; at planned sizes one forward holds {budget}. Raise "
                "token_budget to it, cut samples with max_length, or train without planned sizes "
                "(pad_to_multiple_of none)."
            )
        split = batching.assign(samples, budget=budget, couples="token", share=share)[0]
        parts = [pack.build([samples[i] for i in members], counts, **options) for members in split]
        whole = _side_by_side(parts, whole, samples, split)
    return attrs.evolve(whole, padded=tuple(_padded(part, planned, device) for part in parts))


def num_nodes(each: pack.Pack) -> int:
    """Return how many nodes run through the model for a pack, padding among them."""
    return sum(len(part.tokens) for part in each.padded) if each.padded else len(each.tokens)


def _side_by_side(
    parts: Sequence[pack.Pack],
    whole: pack.Pack,
    samples: Sequence[sample.Sample],
    split: Sequence[Sequence[int]],
) -> pack.Pack:
    """Put forests beside each other under the table of all their samples."""
    nodes = np.cumsum([0, *(len(part.tokens) for part in parts)]).tolist()
    edges = np.cumsum([0, *(len(part.edge_nodes) for part in parts)]).tolist()
    rows = np.cumsum([0, *(int(s.trained.sum()) for s in samples)]).tolist()
    order = np.concatenate([np.arange(rows[i], rows[i + 1]) for members in split for i in members])
    found = torch.cat([part.term_edges + shift for part, shift in zip(parts, edges, strict=False)])
    places = torch.from_numpy(order)

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) + shift for part, shift in zip(parts, nodes, strict=False)])

    # Blocks of nodes, not their kinds, move with the nodes; the chains of all come first.
    table = joined("table")
    table[:, 0] = torch.cat([part.table[:, 0] for part in parts])

    return attrs.evolve(
        whole,
        tokens=torch.cat([part.tokens for part in parts]),
        depths=torch.cat([part.depths for part in parts]),
        ends=joined("ends"),
        table=table[table[:, 0].argsort(descending=True, stable=True)],
        edge_nodes=joined("edge_nodes"),
        edge_tokens=torch.cat([part.edge_tokens for part in parts]),
        edge_targets=joined("edge_targets"),
        term_edges=torch.empty_like(found).index_copy(0, places, found),
        pieces=tuple(itertools.pairwise(nodes)),
    )


def _padded(each: pack.Pack, planned: sizes.Sizes, device: torch.device | str) -> pack.Pack:
    """Fill a forest up to its planned size; `pieces` then is the span of what is no padding."""
    nodes, edges = len(each.tokens), len(each.edge_nodes)
    room, head = sizes.fitting(planned, nodes, edges)

    def filled(values: Tensor, size: int, value: int = 0) -> Tensor:
        return torch.cat([values, values.new_full((size - len(values),), value)]).to(device)

    # A deeper chain than the true ones might leave the positions that the model holds.
    depths = torch.arange(room - nodes).clamp(max=each.max_depth)
    table = each.table.new_zeros(2 * room, each.table.shape[1])
    own = torch.tensor([[spans.CAUSAL, nodes, room, nodes, room]], dtype=table.dtype)
    blocks = torch.cat([own, each.table]) if nodes < room else each.table
    table[: len(blocks)] = blocks
    return attrs.evolve(
        each,
        tokens=filled(each.tokens, room),
        depths=torch.cat([each.depths, depths]).to(device),
        ends=filled(each.ends, room, room),
        table=table,
        edge_nodes=filled(each.edge_nodes, head, room - 1),
        edge_tokens=filled(each.edge_tokens, head),
        edge_targets=filled(each.edge_targets, head, room - 1),
        term_edges=torch.arange(edges),
        pieces=((0, nodes),),
    )
