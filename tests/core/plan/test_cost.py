import attrs
import hypothesis
import pytest
from hypothesis import strategies as st

from core.plan import batching, cost, prefix_tree
from tests.core.plan import forests

SHAPE = cost.ModelShape(
    layers=3, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=20, vocab=50, parameters=10_000
)


@hypothesis.given(forests.sequences())
def test_pairs_are_the_allowed_ones(rows):
    tree = prefix_tree.build(forests.arrays(rows))
    assert cost.pairs(tree) == forests.ancestors(tree).sum()


@hypothesis.given(forests.samples(), st.booleans())
def test_work_is_counted_as_by_hand(samples, share):
    rows = [one.tokens.tolist() for one in samples]
    edges = [
        tuple(row[: i + 1]) for row, one in zip(rows, samples, strict=True) for i in one.trained.nonzero()[0]
    ]
    every = [tuple(row[:stop]) for row in rows for stop in range(1, len(row) + 1)]
    if share:
        edges, every = list(set(edges)), list(set(every))
    done = cost.work(samples, share=share)
    assert done == cost.Work(nodes=len(every), pairs=sum(map(len, every)), edges=len(edges))


def test_flops_are_those_of_the_formula():
    # A block: q and o 8 x 8, k and v 8 x 4, gate, up and down 8 x 20.
    weights = 2 * 64 + 2 * 32 + 3 * 160
    assert cost.layer_weights(SHAPE) == weights
    assert cost.flops(SHAPE, 1, 0, 0) == 3 * 2 * 3 * weights
    assert cost.flops(SHAPE, 0, 2, 0) == 2 * 3 * 4 * 8 * 7 // 2
    assert cost.flops(SHAPE, 0, 0, 1) == 4 * 2 * 8 * 50
    assert cost.flops(SHAPE, 1, 0, 0, checkpointing=True) == 3 * 2 * 4 * weights
    assert cost.flops(attrs.evolve(SHAPE, gated=False), 1, 0, 0) == 3 * 2 * 3 * (weights - 160)


@hypothesis.given(forests.samples(), st.integers(1, 40), st.integers(1, 3), st.booleans())
def test_the_summary_agrees_with_the_trees(samples, budget, num_ranks, share):
    assignment = batching.assign(samples, budget=budget, num_ranks=num_ranks, share=share)
    told = cost.summarize(samples, assignment, SHAPE, budget=budget, share=share, size=lambda n: n + 1)
    packs = [pack for rank in assignment for pack in rank if pack]
    sizes = [len(prefix_tree.build([samples[i].tokens for i in pack], share=share).tokens) for pack in packs]
    assert (told.samples, told.packs, told.nodes) == (len(samples), len(packs), sum(sizes))
    assert told.rows == sum(len(one.tokens) for one in samples)
    assert told.largest == max(sizes, default=0)
    assert told.packing_ratio >= 1
    assert told.flop_ratio >= 1
    assert told.imbalance >= 1
    pieces = sum(-(-size // budget) for size in sizes)
    if samples:
        assert told.fill == pytest.approx(sum(sizes) / (budget * pieces))
        assert told.pad_share == pytest.approx(pieces / (sum(sizes) + pieces))
    if not share:
        assert (told.packing_ratio, told.flop_ratio) == (1, 1)


def test_a_fan_saves_what_its_prompt_costs():
    samples = [forests.of([0] * 90 + [i + 1] * 10, first=90) for i in range(4)]
    told = cost.summarize(samples, (((0, 1, 2, 3),),), SHAPE, budget=200)
    assert told.packing_ratio == pytest.approx(400 / 130)
    alone = cost.flops(SHAPE, 400, 4 * 5_050, 40)
    shared = cost.flops(SHAPE, 130, 90 * 91 // 2 + 4 * (5_050 - 90 * 91 // 2), 40)
    assert told.flop_ratio == pytest.approx(alone / shared)
    assert (told.imbalance, told.pad_share, told.fill) == (1, 0, 0.65)


def test_keeping_what_attention_gave_saves_its_forward():
    work = {
        mode: cost.flops(SHAPE, 1000, 50_000, 900, checkpointing=mode) for mode in (False, True, "selective")
    }
    again = SHAPE.layers * 4 * SHAPE.heads * SHAPE.head_dim * 50_000
    assert work[True] - work["selective"] == again
    assert work["selective"] - work[False] == SHAPE.layers * 2 * cost.layer_weights(SHAPE) * 1000
