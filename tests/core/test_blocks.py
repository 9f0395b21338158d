"""What is done with blocks: sinks merged, small ones run together, and the flash kernel of other devices.

That kernel runs on no machine of these tests. With a stand-in in its place what is around it is tested.
"""

import attrs
import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import overrides

from core import attention, blocks
from core.plan import prefix_tree, spans
from tests.core import flash
from tests.core import test_attention as common

CHEAP = spans.Rates(
    block=1000.0, pair=1.0, masked=0.0, mask=0.0, row=1.0, key=0.0, batch=1000.0, item=1000.0, moved=0.0
)
FREE = spans.Rates(
    block=0.0, pair=1.0, masked=0.0, mask=0.0, row=0.0, key=0.0, batch=0.0, item=1.0, moved=0.0
)
PRICES = st.builds(
    spans.Rates,
    block=st.sampled_from([0.0, 3.0, 30.0, 1000.0]),
    pair=st.just(1.0),
    masked=st.sampled_from([0.0, 5.0]),
    mask=st.sampled_from([0.0, 1.0]),
    row=st.sampled_from([0.0, 2.0]),
    key=st.sampled_from([0.0, 2.0]),
    batch=st.sampled_from([0.0, 10.0]),
    item=st.sampled_from([0.0, 1.0, 2000.0]),
    moved=st.sampled_from([0.0, 1.0]),
)


def sink(num=4):
    """A score a head."""
    return torch.tensor([0.3, -1.0, 2.0, 0.0, 5.0][:num], dtype=torch.float64, requires_grad=True)


def pulled(attend, tree, leaves, **options):
    """The output and the gradients by all leaves, the fourth of which are sinks."""
    out = attend(tree, leaves[:3], sinks=leaves[3] if len(leaves) > 3 else None, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return out, *torch.autograd.grad(out, leaves, weights)


def assert_equal(found, wanted):
    """Compare to 12 digits."""
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(common.ROWS, st.sampled_from([0, 1, 3, 9]), st.sampled_from([1, 2, 4]))
def test_sinks_on_blocks_equal_sinks_under_the_mask_in_value_and_gradient(rows, window, num_kv):
    tree = common.forest(rows)
    leaves = [*common.heads(tree, num_kv=num_kv), sink()]
    found, wanted = (pulled(f, tree, leaves, window=window) for f in (common.by_blocks, common.by_mask))
    assert_equal(found, wanted)


def test_a_sink_takes_what_a_loop_over_queries_says():
    tree = common.comb()
    q, k, v = common.heads(tree)
    sinks = sink()
    got = common.by_blocks(tree, (q, k, v), sinks=sinks)
    mask = attention.ancestors(*common.places(tree))
    for head in range(4):
        for node in range(len(tree.tokens)):
            e = (common.SCALE * k[0, head // 2, mask[node]] @ q[0, head, node]).exp()
            want = (e / (e.sum() + sinks[head].exp())) @ v[0, head // 2, mask[node]]
            torch.testing.assert_close(got[0, head, node], want, rtol=1e-12, atol=1e-12)


def covered(table, tree):
    """How often each pair of a query and a key is looked at."""
    seen = np.zeros((len(tree.tokens),) * 2, np.int64)
    mask = attention.ancestors(*common.places(tree)).numpy()
    for kind, a, b, x, y in table.tolist():
        if kind == spans.DENSE:
            seen[a:b, x:y] += 1
        elif kind == spans.CAUSAL or kind >= spans.BATCH:
            seen[a:b, x:y] += np.tril(np.ones((b - a, b - a), np.int64))
        else:
            seen[a:b, x:y] += mask[a:b, x:y]
    return seen, mask


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(common.ROWS, PRICES)
def test_fused_tables_cover_each_allowed_pair_exactly_once_and_no_other(rows, price):
    tree = common.forest(rows)
    table = common.blocks(tree).numpy()
    seen, mask = covered(spans.fused(table, price), tree)
    assert (seen == mask).all()


@st.composite
def long_rows(draw):
    """Rows that leave a trunk at several places, long enough to be cut."""
    trunk = draw(st.integers(1, 260))
    leaves = draw(st.lists(st.tuples(st.integers(0, trunk), st.integers(1, 90)), min_size=1, max_size=6))
    rows = [np.arange(n) for n in (trunk, draw(st.integers(1, 1200)))]
    return rows + [np.r_[:at, 2000 * (i + 1) : 2000 * (i + 1) + n] for i, (at, n) in enumerate(leaves)]


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(long_rows(), PRICES)
def test_long_blocks_are_cut_into_such_as_cover_each_allowed_pair_exactly_once(rows, price):
    tree = common.forest(rows)
    table = common.blocks(tree).numpy()
    found = spans.fused(table, price)
    seen, mask = covered(found, tree)
    assert (seen == mask).all()
    assert np.isclose(cost(found, price), spans.cost(found, price), rtol=1e-12)
    assert cost(found, price) <= cost(table, price) * (1 + 1e-12)
    assert (np.diff((found[:, 0] == spans.DENSE).astype(int)) >= 0).all()


@pytest.mark.parametrize("window", [0, 70])
def test_how_long_blocks_are_cut_changes_nothing(window):
    rows = [np.arange(200), *(np.r_[:at, 1000 * at : 1000 * at + 40] for at in (50, 90, 130, 170))]
    tree = common.forest(rows)
    leaves = [*common.heads(tree), sink()]
    table = spans.fused(common.blocks(tree).numpy(), FREE)
    assert len(table) > 2 * len(common.blocks(tree))
    found = pulled(common.by_blocks, tree, leaves, window=window, table=torch.from_numpy(table))
    assert_equal(found, pulled(common.by_mask, tree, leaves, window=window))


def test_a_causal_block_is_cut_where_what_a_kernel_sees_in_vain_costs_more_than_calls():
    one = np.array([[spans.CAUSAL, 0, 256, 0, 256]])
    # Cut once a kernel looks at three quarters of the pairs, for two calls more.
    rates = attrs.evolve(FREE, block=256 * 256 / 8 - 1.0, batch=9e9)
    whole = spans.fused(one, attrs.evolve(rates, block=256 * 256 / 8 + 1.0))
    assert whole.tolist() == one.tolist()
    assert spans.fused(one, rates).tolist() == [
        [spans.CAUSAL, 0, 128, 0, 128],
        [spans.CAUSAL, 128, 256, 128, 256],
        [spans.DENSE, 128, 256, 0, 128],
    ]


def test_stairs_are_cut_into_squares_where_keys_are_dear():
    stairs = np.array([[spans.DENSE, 100 + i, 101 + i, 0, 40 - 10 * i] for i in range(4)])
    assert spans.fused(stairs, FREE).tolist() == stairs.tolist()
    assert spans.fused(stairs, attrs.evolve(FREE, key=1.0)).tolist() == [
        [spans.DENSE, 100, 103, 0, 20],
        [spans.DENSE, 100, 102, 20, 30],
        [spans.DENSE, 100, 101, 30, 40],
        [spans.DENSE, 103, 104, 0, 10],
    ]


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(common.ROWS, PRICES, st.sampled_from([0, 1, 3, 9]))
def test_the_choice_of_blocks_changes_nothing(rows, price, window):
    tree = common.forest(rows)
    leaves = [*common.heads(tree), sink()]
    table = torch.from_numpy(spans.fused(common.blocks(tree).numpy(), price))
    found = pulled(common.by_blocks, tree, leaves, window=window, table=table)
    assert_equal(found, pulled(common.by_mask, tree, leaves, window=window))


def looked_at(size):
    """How many pairs a kernel looks at that takes keys by 512, each for all queries that see one of them."""
    return sum(min(size, 512 * (query // 512 + 1)) for query in range(size))


def cost(table, price):
    """What a table costs."""
    total, batches = 0.0, {}
    for kind, a, b, x, y in table.tolist():
        n, pairs = b - a, (b - a) * (y - x)
        if n and kind == spans.DENSE:
            total += price.block + pairs * price.pair + n * price.row + (y - x) * price.key
        elif n and kind == spans.CAUSAL:
            total += price.block + looked_at(n) * price.pair
        elif n and kind == spans.MASKED:
            total += price.block + price.masked + pairs * (price.pair + price.mask)
        elif n:
            batches.setdefault(kind, []).append(n)
    for held in batches.values():
        n = max(held)
        item = price.item + n * price.moved + looked_at(n) * price.pair
        total += price.batch + len(held) * item
    return total


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(common.ROWS, PRICES)
def test_a_fused_table_costs_no_more_than_blocks_apart_and_than_the_dense_mask(rows, price):
    tree = common.forest(rows)
    table = common.blocks(tree).numpy()
    fused = spans.fused(table, price)
    found = cost(fused, price)
    assert np.isclose(found, spans.cost(fused, price), rtol=1e-12)
    nodes = len(tree.tokens)
    assert found <= cost(table, price) + 1e-9
    whole = np.array([[spans.MASKED, 0, nodes, 0, nodes]])
    if len(tree.chains) > 1:
        assert found <= cost(whole, price) + 1e-9 or cost(whole, price) > cost(table, price)


def test_dear_blocks_are_run_as_one_mask_and_cheap_ones_apart():
    tree = common.comb()
    table = common.blocks(tree).numpy()
    one = spans.fused(table, CHEAP)
    assert one[one[:, 1] < one[:, 2]].tolist() == [[spans.MASKED, 0, len(tree.tokens), 0, len(tree.tokens)]]
    apart = spans.fused(table, FREE)
    assert (apart[:, 0] <= spans.CAUSAL).all()


def test_rows_that_share_nothing_are_run_together_by_their_size():
    rows = [np.arange(100 * i, 100 * i + n) for i, n in enumerate([4, 4, 4, 90, 4, 4])]
    tree = prefix_tree.build(rows, share=False)
    dear = attrs.evolve(FREE, block=100.0, pair=0.09, batch=100.0, item=100.0)
    found = spans.fused(common.blocks(tree).numpy(), dear)
    kept = found[found[:, 1] < found[:, 2]]
    assert kept[:, :3].tolist() == [[spans.MASKED, 0, 12], [spans.CAUSAL, 12, 102], [spans.MASKED, 102, 110]]


def test_blocks_of_like_lengths_are_one_call_each_length_filled_up():
    rows = [np.arange(100 * i, 100 * i + n) for i, n in enumerate([5, 60, 6, 7, 61, 5])]
    tree = prefix_tree.build(rows, share=False)
    rates = attrs.evolve(FREE, block=900.0, masked=9e9, batch=200.0, item=0.0)
    found = spans.fused(common.blocks(tree).numpy(), rates)
    kept = found[found[:, 1] < found[:, 2]]
    by_start = {start: kind for kind, start, *_ in kept.tolist()}
    first, second = by_start[0], by_start[5]
    assert first >= spans.BATCH
    assert second >= spans.BATCH
    assert first != second
    assert [by_start[n] for n in (0, 5, 65, 71, 78, 139)] == [first, second, first, first, second, first]


def test_a_batch_holds_no_more_places_than_its_bound():
    rows = [np.arange(100 * i, 100 * i + 50) for i in range(200)]
    table = common.blocks(prefix_tree.build(rows, share=False)).numpy()
    found = spans.fused(table, attrs.evolve(FREE, block=9e6, masked=9e9, batch=100.0, item=0.0))
    _, counts = np.unique(found[:, 0], return_counts=True)
    assert (found[:, 0] >= spans.BATCH).all()
    assert counts.max() == spans.PLACES // 50


def test_a_masked_block_without_the_sizes_of_subtrees_is_an_error():
    tree = common.comb()
    depths = common.places(tree)[1]
    table = torch.from_numpy(spans.fused(common.blocks(tree).numpy(), CHEAP))
    with pytest.raises(ValueError, match="sizes of the keys' subtrees are wanted"):
        attention.rectangles(*common.heads(tree), table, depths, depths, scale=1.0)


@pytest.fixture
def elsewhere(monkeypatch):
    """Run blocks on the CPU as a GPU would, with stand-ins for its kernels; how often they were called."""
    calls = []

    def counted(stand_in):
        return lambda *args, **kwargs: (calls.append(stand_in.__name__), stand_in(*args, **kwargs))[1]

    # The attributes of torch.ops are set: the code calls them by their names.
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", counted(flash.forward))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", counted(flash.backward))
    monkeypatch.setattr(blocks, "KERNELS", {"cpu": blocks.FLASH})
    return calls


def test_the_ends_of_runs_reach_the_device_in_one_copy_a_call(monkeypatch):
    sent = {flash.forward: [], flash.backward: []}

    def noted(stand_in, first):
        return lambda *args, **kwargs: (
            sent[stand_in].extend(args[first : first + 2]),
            stand_in(*args, **kwargs),
        )[1]

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", noted(flash.forward, 3))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", noted(flash.backward, 6))
    monkeypatch.setattr(blocks, "KERNELS", {"cpu": blocks.FLASH})
    tree = common.comb()
    pulled(common.by_blocks, tree, common.heads(tree))
    for ends in sent.values():
        assert len(ends) > 4
        assert len({each.untyped_storage().data_ptr() for each in ends}) == 1


@pytest.mark.parametrize("kernel", [blocks.HOST, blocks.FLASH])
def test_rows_of_padding_never_become_numbers_of_python(kernel):
    table = torch.zeros(4000, 5, dtype=torch.int64)
    table[0] = torch.tensor([spans.CAUSAL, 0, 9, 0, 9])
    depths, made = torch.arange(9), []

    class Looking(overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            made.extend([args[0].numel()] if func is torch.Tensor.tolist else [])
            return func(*args, **(kwargs or {}))

    with Looking():
        found = list(kernel.walk(blocks.Tables(table, depths, depths, None, 0), torch.zeros(1, 1, 9, 8)))
    assert [(block.queries, block.keys) for block in found] == [(slice(0, 9), slice(0, 9))]
    assert max(made, default=0) < 20


def test_a_device_that_has_no_kernel_is_told_with_those_that_have():
    assert blocks.takes("cpu", torch.float64)
    assert blocks.takes("cuda", torch.bfloat16)
    assert not blocks.takes("cuda", torch.float32)
    with pytest.raises(ValueError, match="came on the device xpu; kernels of it are there for cpu and cuda"):
        blocks.takes("xpu", torch.float32)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("width", [8, 5])
@pytest.mark.parametrize("num_kv", [1, 2, 4])
@pytest.mark.parametrize("window", [0, 1, 2, 3, 5, 9, 12, 50])
def test_blocks_on_the_flash_kernel_equal_the_mask(window, num_kv, width):
    draw = np.random.default_rng(window)
    for _ in range(6):
        rows = [draw.integers(0, 2, draw.integers(1, 14)).tolist() for _ in range(draw.integers(1, 7))]
        tree = common.forest(rows)
        leaves = [t.detach()[..., :width].clone().requires_grad_() for t in common.heads(tree, num_kv=num_kv)]
        leaves.append(sink())
        found, wanted = (pulled(f, tree, leaves, window=window) for f in (common.by_blocks, common.by_mask))
        assert_equal(found, wanted)


def test_all_causal_blocks_are_one_call_of_the_flash_kernel(elsewhere):
    rows = [np.arange(20 * i, 20 * i + 7) for i in range(9)]
    tree = prefix_tree.build(rows)
    pulled(common.by_blocks, tree, common.heads(tree))
    assert elsewhere == ["forward", "backward"]


@pytest.mark.usefixtures("elsewhere")
def test_the_flash_kernel_refuses_what_it_has_no_mask_for():
    tree = common.comb()
    table = torch.from_numpy(spans.fused(common.blocks(tree).numpy(), CHEAP))
    with pytest.raises(ValueError, match="takes no mask"):
        common.by_blocks(tree, common.heads(tree), table=table)
    two = [torch.cat([t, t]) for t in common.heads(tree)]
    with pytest.raises(ValueError, match="2 forests came at once"):
        common.by_blocks(tree, two)


def test_the_stand_ins_have_the_signature_of_the_kernels():
    for stand_in, name in ((flash.forward, "forward"), (flash.backward, "backward")):
        operator = getattr(torch.ops.aten, f"_flash_attention_{name}").default
        known = [argument.name for argument in operator._schema.arguments]
        own = stand_in.__code__.co_varnames[
            : stand_in.__code__.co_argcount + stand_in.__code__.co_kwonlyargcount
        ]
        assert own == tuple(known[: len(own)])


def test_the_kernels_shapes_are_those_that_pytorch_states():
    q, k = torch.empty(12, 4, 16, device="meta"), torch.empty(9, 2, 16, device="meta")
    cut = torch.empty(2, dtype=torch.int32, device="meta")
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, k, cut, cut, 12, 9, 0.0, False, False, scale=1.0
    )
    assert (out.shape, lse.shape, lse.dtype) == ((12, 4, 16), (4, 12), torch.float32)


def test_batches_in_bfloat16_are_close_to_the_mask_in_float32():
    rows = [np.arange(100 * i, 100 * i + n) for i, n in enumerate([5, 9, 6, 7, 61, 5])]
    tree = prefix_tree.build(rows, share=False)
    rates = attrs.evolve(FREE, block=900.0, masked=9e9, batch=200.0, item=0.0)
    table = torch.from_numpy(spans.fused(common.blocks(tree).numpy(), rates))
    leaves = [t.detach().float().requires_grad_() for t in common.heads(tree)]
    narrow = [t.detach().bfloat16().requires_grad_() for t in leaves]
    weights = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1))
    want = torch.autograd.grad(common.by_mask(tree, leaves), leaves, weights)
    out = common.by_blocks(tree, narrow, table=table)
    assert out.dtype == torch.bfloat16
    for got, wanted in zip(torch.autograd.grad(out, narrow, weights.bfloat16()), want, strict=True):
        torch.testing.assert_close(got.float(), wanted, rtol=0.05, atol=0.05)
