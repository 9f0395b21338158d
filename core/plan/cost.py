"""FLOPs of training on a forest, and what sharing saves: plain arithmetic on a model's shape."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import attrs
import numpy as np

from core.plan import prefix_tree
from core.plan import sample as samples_

Checkpointing: TypeAlias = Literal[False, True, "selective"]
"""What the backward makes again: nothing, layers, or layers but for their attention in blocks."""


@attrs.frozen(kw_only=True)
class ModelShape:
    """Sizes of a decoder-only language model, as far as its costs depend on them.

    Attributes:
        layers, hidden: number of blocks, width of the residual stream.
        heads, kv_heads, head_dim: query heads, key/value heads, width of one.
        intermediate: width inside the feed-forward part.
        vocab: rows of the output matrix.
        parameters: all parameters, a tied matrix counted once.
        gated: whether the feed-forward part has three matrices (gate, up, down) rather than two.
        tied: whether the output matrix is the embedding.
        element_bytes: bytes of a parameter and of an activation (4 float32, 2 bfloat16).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    parameters: int
    gated: bool = True
    tied: bool = True
    element_bytes: int = 4


@attrs.frozen(kw_only=True)
class Work:
    """What a forward pass has to do.

    Attributes:
        nodes: tokens that run through the model.
        pairs: (query, key) pairs that attention may look at, each node with itself included.
        edges: predictions that the head makes: trained nodes.
    """

    nodes: int = 0
    pairs: int = 0
    edges: int = 0


@attrs.frozen(kw_only=True)
class Summary:
    """What a plan promises.

    Attributes:
        samples: number of samples.
        packs: number of packs with something in them, over all ranks.
        rows: tokens of all samples, each alone.
        nodes: tokens that run through the model.
        packing_ratio: rows / nodes.
        flop_ratio: FLOPs of every sample alone / FLOPs of the plan.
        fill: nodes / room; room is the budget for each pack, or for each piece of a pack beyond the budget.
        imbalance: FLOPs of the busiest rank / mean over ranks.
        pad_share: padding / (nodes + padding), 0 where nothing is padded.
        flops: FLOPs of forward and backward over all packs.
        largest: nodes of the largest pack.
    """

    samples: int
    packs: int
    rows: int
    nodes: int
    packing_ratio: float
    flop_ratio: float
    fill: float
    imbalance: float
    pad_share: float
    flops: int
    largest: int


def pairs(tree: prefix_tree.PrefixTree) -> int:
    """Return the (query, key) pairs that attention may look at: sum over nodes of depth + 1."""
    return int(tree.depths.sum()) + len(tree.depths)


def layer_weights(shape: ModelShape) -> int:
    """Return the elements of a block's matrices: 2 h d (heads + kv_heads) + 3 h i, or 2 h i ungated."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    return attention + (3 if shape.gated else 2) * shape.hidden * shape.intermediate


def flops(
    shape: ModelShape, nodes: int, pairs: int, edges: int, *, checkpointing: Checkpointing = False
) -> int:
    """FLOPs of one forward and backward; a multiply and an add are two.

        forward  = layers (2 weights nodes + 4 heads head_dim pairs) + 2 hidden vocab edges
        backward = 2 times the matrices, 2.5 times attention, 3 times the head

    The backward makes scores and logits again. Checkpointing runs the blocks forward once more, of which
    `selective` leaves attention out. The same formula holds for rows alone: nodes are then their tokens.

    Args:
        shape: the model.
        nodes: tokens that run through it.
        pairs: (query, key) pairs, a node with itself included.
        edges: predictions that the head makes.
        checkpointing: what the backward makes again.
    """
    matrices = shape.layers * 2 * layer_weights(shape) * nodes * (3 + bool(checkpointing))
    again = 2 if checkpointing is True else 0
    attention = shape.layers * 4 * shape.heads * shape.head_dim * pairs * (7 + again) // 2
    return matrices + attention + 2 * shape.hidden * shape.vocab * edges * 4


def work(samples: Sequence[samples_.Sample], *, share: bool = True) -> Work:
    """Count exactly what one pack of samples has to do; `share=False` counts every sample alone."""
    if not share:
        lengths = [len(one.tokens) for one in samples]
        return Work(
            nodes=sum(lengths),
            pairs=sum(length * (length + 1) // 2 for length in lengths),
            edges=sum(int(np.count_nonzero(one.trained)) for one in samples),
        )
    if not samples:
        return Work()
    tree = prefix_tree.build([one.tokens for one in samples], keys=[one.share for one in samples])
    nodes, _ = prefix_tree.paths(tree)
    trained = np.zeros(len(tree.tokens), bool)
    trained[nodes[np.concatenate([one.trained for one in samples])]] = True
    return Work(nodes=len(tree.tokens), pairs=pairs(tree), edges=int(trained.sum()))


def summarize(
    samples: Sequence[samples_.Sample],
    assignment: Sequence[Sequence[Sequence[int]]],
    shape: ModelShape,
    *,
    budget: int,
    share: bool = True,
    size: Callable[[int], int] | None = None,
) -> Summary:
    """Say what a plan promises, counted exactly on the trees it makes.

    Args:
        samples: all samples of the plan.
        assignment: indices of samples, `[rank][pack]`, as `batching.assign` returns them.
        shape: the model.
        budget: most nodes in one forward.
        share: whether packs share prefixes.
        size: the planned length that a forward over so many nodes is padded to; None: nothing is padded.

    Returns:
        The summary.
    """
    ranks = [[work([samples[i] for i in pack], share=share) for pack in rank] for rank in assignment]
    packs = [done for rank in ranks for done in rank if done.nodes]
    alone = work([samples[i] for rank in assignment for pack in rank for i in pack], share=False)
    loads = [sum(flops(shape, w.nodes, w.pairs, w.edges) for w in rank) for rank in ranks]
    nodes, total = sum(w.nodes for w in packs), sum(loads)
    pieces = [min(budget, w.nodes - start) for w in packs for start in range(0, w.nodes, budget)]
    padded = sum(map(size, pieces)) if size else nodes
    return Summary(
        samples=sum(len(pack) for rank in assignment for pack in rank),
        packs=len(packs),
        rows=alone.nodes,
        nodes=nodes,
        packing_ratio=alone.nodes / nodes if nodes else 1.0,
        flop_ratio=flops(shape, alone.nodes, alone.pairs, alone.edges) / total if total else 1.0,
        fill=nodes / (budget * len(pieces)) if pieces else 0.0,
        imbalance=max(loads) * len(loads) / total if total else 1.0,
        pad_share=1 - nodes / padded if padded else 0.0,
        flops=total,
        largest=max((w.nodes for w in packs), default=0),
    )
