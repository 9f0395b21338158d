"""Blocks and mask agree, both are what the definition says, and branches do not see each other."""

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from core import attention
from core.plan import prefix_tree

SCALE = 0.4


# A few short sequences over few tokens, so that much is shared.
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6)


def forest(rows):
    """Merge lists of tokens."""
    return prefix_tree.build([np.array(row) for row in rows])


def comb(depth=12, branches=4):
    """A trunk from which branches leave at several depths, one of them twice."""
    trunk = np.arange(depth)
    rows = [np.concatenate([trunk[: depth - 3 * i], np.full(2 + i, 50 + i)]) for i in range(branches)]
    return prefix_tree.build([trunk, *rows, np.append(rows[1], [7, 7, 7])])


def blocks(tree):
    """The attention table of a tree: its chains, then its rectangles."""
    chains = [(1, a, b, a, b) for a, b in tree.chains.tolist()]
    return torch.tensor([*chains, *((0, *r) for r in tree.rectangles.tolist())], dtype=torch.int64)


def places(tree):
    """Ends and depths as tensors."""
    return torch.from_numpy(tree.ends), torch.from_numpy(tree.depths)


def heads(tree, num_heads=4, num_kv=2, dtype=torch.float64, seed=0):
    """Draw queries, keys and values."""
    source = torch.Generator().manual_seed(seed)
    shapes = ((1, num, len(tree.tokens), 8) for num in (num_heads, num_kv, num_kv))
    return [torch.randn(s, generator=source, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def by_blocks(tree, qkv, window=0, table=None, sinks=None):
    """Attend by blocks."""
    table = blocks(tree) if table is None else table
    ends, depths = places(tree)
    looks = {"window": window, "sizes": ends - torch.arange(len(ends)), "sinks": sinks}
    return attention.rectangles(*qkv, table, depths, depths, scale=SCALE, **looks)


def by_mask(tree, qkv, window=0, **options):
    """Attend under the dense mask."""
    ends, depths = places(tree)
    mask = attention.ancestors(ends, depths, window=window)
    return attention.masked(*qkv, mask, scale=SCALE, **options)


def with_grads(function, tree, qkv, **options):
    """Return the output and the gradients of a weighted sum of it."""
    out = function(tree, qkv, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return out, *torch.autograd.grad(out, qkv, weights.to(out.dtype))


@hypothesis.settings(max_examples=40)
@hypothesis.given(ROWS, st.sampled_from([0, 1, 2, 3, 5, 9, 50]), st.sampled_from([1, 2, 4]))
def test_blocks_equal_the_mask_in_value_and_gradient(rows, window, num_kv):
    tree = forest(rows)
    qkv = heads(tree, num_kv=num_kv)
    got, want = (with_grads(f, tree, qkv, window=window) for f in (by_blocks, by_mask))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@hypothesis.settings(max_examples=40)
@hypothesis.given(ROWS, st.integers(0, 10))
def test_a_token_sees_its_ancestors_and_itself_as_far_back_as_the_window(rows, window):
    tree = forest(rows)
    ends, depths = places(tree)
    mask = attention.ancestors(ends, depths, window=window)
    for node in range(len(tree.tokens)):
        line, above = [], node
        while above >= 0:
            line.append(above)
            above = int(tree.parents[above])
        assert mask[node].nonzero().flatten().tolist() == sorted(line[:window] if window else line)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_mask_equals_a_loop_over_queries_with_cap_and_sinks(softcap, with_sinks):
    tree = comb()
    q, k, v = heads(tree)
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64) if with_sinks else None
    got = by_mask(tree, (q, k, v), window=4, softcap=softcap, sinks=sinks)
    mask = attention.ancestors(*places(tree), window=4)
    for head in range(4):
        for node in range(len(tree.tokens)):
            s = SCALE * k[0, head // 2, mask[node]] @ q[0, head, node]
            e = (softcap * (s / softcap).tanh() if softcap else s).exp()
            rest = sinks[head].exp() if with_sinks else 0.0
            want = (e / (e.sum() + rest)) @ v[0, head // 2, mask[node]]
            torch.testing.assert_close(got[0, head, node], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [0, 1, 3, 11, 12, 40])
def test_single_precision_agrees_to_2e_5(window):
    tree = comb()
    qkv = heads(tree, dtype=torch.float32)
    got, want = (with_grads(f, tree, qkv, window=window) for f in (by_blocks, by_mask))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [0, 3])
def test_bfloat16_follows_double_precision(window):
    tree = comb()
    qkv = heads(tree, dtype=torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    got, want = (
        with_grads(by_blocks, tree, qkv, window=window),
        with_grads(by_mask, tree, wide, window=window),
    )
    for x, y in zip(got, want, strict=True):
        assert x.dtype == torch.bfloat16
        assert (x.double() - y).norm() < 2e-2 * y.norm()


def test_rows_of_no_queries_in_the_table_are_padding():
    tree = comb()
    qkv = heads(tree)
    table = blocks(tree)
    padded = torch.cat([table, torch.zeros(5, 5, dtype=torch.int64)])
    assert torch.equal(by_blocks(tree, qkv, table=padded), by_blocks(tree, qkv))


@pytest.mark.parametrize("attend", [by_blocks, by_mask])
@pytest.mark.parametrize("window", [0, 4])
def test_a_change_in_one_branch_leaves_the_others_as_they_were_to_the_bit(attend, window):
    tree = comb()
    node = int(tree.leaves[2])
    q, k, v = (x.detach() for x in heads(tree))
    before = attend(tree, (q, k, v), window=window)
    others = ~attention.ancestors(*places(tree))[:, node]
    q[:, :, node], k[:, :, node], v[:, :, node] = 3.0, -5.0, 7.0
    after = attend(tree, (q, k, v), window=window)
    assert torch.equal(after[:, :, others], before[:, :, others])
    assert not torch.equal(after[:, :, node], before[:, :, node])


def test_the_operator_passes_opcheck():
    tree = comb()
    depths = places(tree)[1]
    for window in (0, 3):
        sinks = torch.zeros(4, dtype=torch.float64, requires_grad=True) if window else None
        arguments = (*heads(tree), sinks, blocks(tree), depths, depths, None, SCALE, window)
        torch.library.opcheck(torch.ops.espalier.attention_blocks.default, arguments)


def test_nothing_is_gathered():
    tree = comb()
    qkv = heads(tree)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        with_grads(by_blocks, tree, qkv)
    names = {event.key for event in seen.key_averages()}
    assert any("flash_attention_for_cpu_backward" in name for name in names)
    assert not {n for n in names if "gather" in n or n in ("aten::index", "aten::index_select", "aten::take")}


@pytest.mark.plain
def test_one_compiled_graph_serves_every_forest_of_a_size():
    graphs = []

    def count(module, _):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(attention.rectangles, backend=count, fullgraph=True, dynamic=False)
    for cut in (2, 5, 7):
        rows = [np.arange(10), np.append(np.arange(cut), np.arange(20, 32 - cut))]
        tree = prefix_tree.build(rows)
        table = torch.zeros(8, 5, dtype=torch.int64)
        table[: len(blocks(tree))] = blocks(tree)
        depths = torch.zeros(22, dtype=torch.int64)
        depths[: len(tree.depths)] = torch.from_numpy(tree.depths)
        qkv = [torch.randn(1, 2, 22, 8, dtype=torch.float64) for _ in range(3)]
        got = compiled(*qkv, table, depths, depths, scale=SCALE)
        used = len(tree.tokens)
        want = by_mask(tree, [x[:, :, :used] for x in qkv])
        torch.testing.assert_close(got[:, :, :used], want, rtol=1e-12, atol=1e-12)
    assert len(graphs) == 1
