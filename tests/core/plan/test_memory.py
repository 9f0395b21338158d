import attrs
import hypothesis
import pytest
from hypothesis import strategies as st

from core.plan import cost, memory

SHAPE = cost.ModelShape(
    layers=3, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=20, vocab=50, parameters=10_000
)
ANY = st.builds(
    memory.Levers,
    adapter=st.sampled_from([None, 100]),
    head_columns=st.sampled_from([0, 3]),
    checkpointing=st.sampled_from([False, True, "selective"]),
    chunk=st.sampled_from([0, 3]),
    offloaded=st.booleans(),
    num_shards=st.integers(1, 4),
    one_pack=st.booleans(),
    clipped=st.booleans(),
    beside=st.sampled_from([0, 999]),
    tile_bytes=st.sampled_from([1, 3000]),
)


@hypothesis.given(st.integers(0, 10**6), st.sampled_from([2, 4]), ANY)
def test_the_budget_is_the_largest_that_fits(available, element_bytes, levers):
    shape = attrs.evolve(SHAPE, element_bytes=element_bytes)
    budget = memory.budget(shape, available, levers, reserve=0.0)
    assert memory.peak(shape, budget + 1, levers) > available
    assert budget == 0 or memory.peak(shape, budget, levers) <= available


@hypothesis.given(st.integers(1, 1000), ANY)
def test_more_tokens_take_no_less_at_any_moment(nodes, levers):
    few, more = (memory.plan(SHAPE, number, levers) for number in (nodes, nodes + 7))
    # Below a chunk nothing runs in chunks.
    hypothesis.assume(not levers.chunk or nodes > levers.chunk)
    for moment in few:
        assert sum(few[moment].values()) <= sum(more[moment].values())


@hypothesis.given(st.integers(10, 1000), ANY)
def test_every_lever_takes_something_away_where_there_is_enough_of_it(nodes, levers):
    # Enough layers that what these keep is more than what one of them takes when it is made again.
    shape = attrs.evolve(SHAPE, layers=30)
    plain = attrs.evolve(levers, checkpointing=False, chunk=0, offloaded=False, num_shards=1, tile_bytes=1)
    whole = sum(memory.plan(shape, nodes, plain)["head"].values())
    for taken in ({"checkpointing": True}, {"checkpointing": "selective"}, {"chunk": 3}, {"offloaded": True}):
        assert sum(memory.plan(shape, nodes, attrs.evolve(plain, **taken))["head"].values()) < whole


def test_the_state_is_split_and_has_masters_only_over_narrow_weights_that_train():
    def state(shape, **levers):
        parts = memory.plan(shape, 10, memory.Levers(**levers))["update"]
        return [parts[name] for name in memory.STATE]

    narrow = attrs.evolve(SHAPE, element_bytes=2)
    assert state(SHAPE) == [40_000, 0, 80_000, 0]
    assert state(SHAPE, num_shards=2, beside=7) == [20_000, 0, 40_000, 7]
    assert state(narrow) == [20_000, 40_000, 80_000, 0]
    assert state(narrow, adapter=100) == [20_400, 0, 800, 0]
    assert state(attrs.evolve(SHAPE, element_bytes=8)) == [80_000, 0, 160_000, 0]


def test_gradients_are_those_of_earlier_packs_and_of_this_one_and_clipped_ones_beside():
    def made(**levers):
        plan = memory.plan(SHAPE, 10, memory.Levers(**levers))
        return [plan[moment]["gradients"] for moment in memory.MOMENTS]

    matrix, layer = 4 * 50 * 8, 4 * cost.layer_weights(SHAPE)
    assert made(one_pack=True) == [0, matrix + layer, 40_000, 40_000 + matrix, 80_000]
    assert made() == [40_000 + n for n in (0, matrix + layer, 40_000, 40_000 + matrix, 40_000)]
    assert made(one_pack=True, clipped=False)[-1] == 40_000
    assert made(one_pack=True, clipped=False, summed=True)[-1] == 80_000
    assert made(one_pack=True, adapter=100) == [0, 0, 400, 400, 800]


def test_of_the_head_only_the_columns_that_train_have_gradients_and_a_wide_sum():
    assert SHAPE.tied
    narrow = attrs.evolve(SHAPE, element_bytes=2, tied=False)

    def head(shape, **levers):
        plan = memory.plan(shape, 10, memory.Levers(adapter=100, one_pack=True, **levers))
        return [plan["head"]["head"], plan["last layer"]["gradients"], plan["embedding"]["gradients"]]

    frozen, beside, whole = (
        [head(shape, head_columns=columns) for shape in (SHAPE, narrow)] for columns in (0, 3, 8)
    )

    def more(found):
        return [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(found, frozen, strict=True)]

    states = 10 * 2 * 3
    # Narrow: the sum is rounded, and what was multiplied with is a narrow copy of a wide matrix.
    assert more(beside) == [[4 * 50 * 3 + 4 * states, 600, 0], [(4 + 2 + 2) * 50 * 3 + 2 * states, 600, 0]]
    # Tied and trained whole, it has two gradients before these are one.
    assert more(whole) == [[4 * 50 * 8, 1600, 1600], [(4 + 2) * 50 * 8, 1600, 0]]


def test_keeping_what_attention_gave_costs_its_output_and_log_sum_exps():
    shape = attrs.evolve(SHAPE, element_bytes=2, layers=30)
    none, full, kept = (
        memory.plan(shape, 1000, memory.Levers(checkpointing=mode))["head"]["activations"]
        for mode in (False, True, "selective")
    )
    assert full < kept < none
    assert kept - full == 1000 * shape.layers * (2 * shape.heads * shape.head_dim + 4 * shape.heads)


def test_what_leaves_the_device_is_what_the_host_holds():
    kept, moved = (memory.Levers(offloaded=way) for way in (False, True))
    here, there = (memory.plan(SHAPE, 100, levers, shared=9)["head"] for levers in (kept, moved))
    gone = sum(here[name] - there[name] for name in ("activations", "keys_values"))
    assert memory.hosted(SHAPE, 100, moved, shared=9) == gone > 0
    assert memory.hosted(SHAPE, 100, kept, shared=9) == 0
    # What attention gave is kept where it is.
    selective = memory.Levers(offloaded=True, checkpointing="selective")
    assert memory.plan(SHAPE, 100, selective)["head"]["activations"] == 3 * 100 * (4 * 2 + 4) * 4


def test_what_pieces_share_is_keys_values_and_their_wide_gradients():
    for size, bytes_ in ((2, 6), (4, 8), (8, 16)):
        shape = attrs.evolve(SHAPE, element_bytes=size)
        numbers = shape.layers * 10 * 2 * shape.kv_heads * shape.head_dim
        assert memory.dormant(shape, 10) == numbers * bytes_


@pytest.mark.parametrize("num_shards", [1, 2])
def test_completions_hold_keys_and_values_and_need_the_weights_whole(num_shards):
    plan = memory.plan(SHAPE, 10, memory.Levers(num_shards=num_shards), drawn=100)
    parts = plan["drawing"]
    assert parts["keys_values"] == 3 * 100 * 2 * 2 * 2 * 4
    assert parts["gathered"] == (0 if num_shards == 1 else 40_000)
    assert "drawing" not in memory.plan(SHAPE, 10, memory.Levers())


def test_weights_are_laid_out_once_more_to_draw_with_as_far_as_there_is_room_for_them():
    def packed(**levers):
        plan = memory.plan(SHAPE, 10, memory.Levers(**levers), drawn=1)
        return {moment: parts["packed"] for moment, parts in plan.items() if parts["packed"]}

    assert packed() == {}
    assert packed(packed=100) == {"drawing": 100}
    assert packed(packed=1 << 30) == {"drawing": 4 * (3 * cost.layer_weights(SHAPE) + 50 * 8)}
