"""FlexAttention over a forest: its block mask is analytic, and its numbers are those of the dense mask.

On a CPU PyTorch runs its plain form, backward included once the check of the device is passed by; no compiled
kernel runs here.
"""

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

from core import attention, flex
from core.plan import prefix_tree
from tests.core import test_attention as blocks_

SIZES = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 200)), min_size=1, max_size=5)


def grown(cuts, trunk=500):
    """Merge rows that leave a trunk at several depths."""
    stem = np.arange(trunk)
    rows = [np.concatenate([stem[:at], 1000 * (i + 1) + np.arange(n)]) for i, (at, n) in enumerate(cuts)]
    return prefix_tree.build([stem, *rows])


def masks(tree, window):
    """The block mask of a forest, and the dense one."""
    ends, depths = blocks_.places(tree)
    nodes = torch.arange(len(ends))
    made = flex.block_mask(nodes, nodes, ends, depths, depths, window=window)
    return made, attention.ancestors(ends, depths, window=window)


def spread(counts, indices, num_blocks):
    """Turn lists of blocks into a table of them."""
    table = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)
    for row in range(num_blocks):
        table[row, indices[0, 0, row, : counts[0, 0, row]].long()] = True
    return table


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(SIZES, st.sampled_from([0, 1, 40, 128, 300]))
def test_blocks_that_are_passed_over_hide_every_pair_and_full_ones_none(cuts, window):
    tree = grown(cuts)
    made, dense = masks(tree, window)
    size = flex.BLOCK
    num_blocks = made.kv_num_blocks.shape[-1]
    padded = torch.zeros(num_blocks * size, num_blocks * size, dtype=torch.bool)
    padded[: len(dense), : len(dense)] = dense
    tiles = padded.view(num_blocks, size, num_blocks, size).transpose(1, 2).flatten(2)
    partly = spread(made.kv_num_blocks, made.kv_indices, num_blocks)
    every = spread(made.full_kv_num_blocks, made.full_kv_indices, num_blocks)
    assert not (partly & every).any()
    assert not tiles[~(partly | every)].any()
    real = len(dense) - torch.arange(num_blocks) * size  # rows of padding at the end repeat the last query
    for row, column in every.nonzero().tolist():
        assert tiles[row, column].view(size, size)[: min(size, int(real[row]))].all()
    # A window's bounds are those of depths in a block: a few blocks too many may be looked at, not many.
    wasted = int((partly & ~tiles.any(-1)).sum())
    assert wasted == 0 or (window and wasted <= num_blocks * len(tree.chains))


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(SIZES, st.sampled_from([0, 1, 40, 300]))
def test_the_rule_for_pairs_is_the_dense_mask(cuts, window):
    made, dense = masks(grown(cuts, trunk=60), window)
    place = torch.arange(len(dense))
    nobody = torch.tensor(0)
    assert torch.equal(made.mask_mod(nobody, nobody, place[:, None], place), dense)


def by_flex(tree, qkv, window=0, **options):
    """Attend by FlexAttention's plain form."""
    made, _ = masks(tree, window)
    return flex.attend(*qkv, made, scale=blocks_.SCALE, kernel=flex.plain, **options)


@pytest.fixture
def anywhere(monkeypatch):
    """Let FlexAttention's plain form run backward on a CPU."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 4, 150])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_values_and_gradients_are_those_of_the_dense_mask(softcap, window, with_sinks):
    tree = grown([(3, 40), (90, 70), (90, 3), (120, 20)], trunk=140)
    qkv = blocks_.heads(tree)
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    options = {"window": window, "softcap": softcap, "sinks": sinks if with_sinks else None}
    leaves = [*qkv, sinks] if with_sinks else qkv
    found = []
    for attend in (by_flex, blocks_.by_mask):
        out = attend(tree, qkv, **options)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        found.append((out, *torch.autograd.grad(out, leaves, weights)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_piece_attends_to_its_ancestors_and_itself():
    tree = grown([(3, 40), (90, 70)], trunk=140)
    ends, depths = blocks_.places(tree)
    nodes = torch.arange(len(ends))
    own = nodes[150:230]
    keys = torch.cat([nodes[:150][ends[:150] > 150], own])
    looks = (own, keys, ends[keys], depths[own], depths[keys])
    made = flex.block_mask(*looks, window=70)
    q, k, v = (t.detach() for t in blocks_.heads(tree))
    q, k, v = q[:, :, own], k[:, :, keys], v[:, :, keys]
    got = flex.attend(q, k, v, made, scale=0.4, kernel=flex.plain)
    want = attention.masked(q, k, v, attention.between(*looks, window=70), scale=0.4)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
