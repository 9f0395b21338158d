import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from core.plan import prefix_order
from tests.core.plan import forests


def common(one, two):
    count = 0
    while count < min(len(one), len(two)) and one[count] == two[count]:
        count += 1
    return count


@hypothesis.given(forests.sequences(), st.sampled_from([1, 3, 256]), st.sampled_from([1, 8192]))
def test_sequences_are_sorted_and_neighbors_common_prefixes_known_however_they_are_compared(
    rows, short, stride
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_order, "SHORT", short)
        patch.setattr(prefix_order, "STRIDE", stride)
        places = prefix_order.sort(forests.arrays(rows))
    ordered = [rows[i] for i in places.order]
    assert ordered == sorted(rows)
    assert sorted(places.order.tolist()) == list(range(len(rows)))
    assert places.lengths.tolist() == [len(row) for row in ordered]
    shared = [common(one, two) for one, two in itertools.pairwise([[], *ordered])]
    assert places.shared.tolist() == shared


@hypothesis.given(forests.sequences(max_length=6), st.data())
def test_with_keys_a_token_is_the_same_only_where_its_key_is(rows, data):
    keys = [data.draw(st.lists(st.integers(-1, 1), min_size=len(row), max_size=len(row))) for row in rows]
    places = prefix_order.sort(forests.arrays(rows), keys=forests.arrays(keys))
    pairs = [list(zip(rows[i], keys[i], strict=True)) for i in places.order]
    shared = [common(one, two) for one, two in itertools.pairwise([[], *pairs])]
    assert places.shared.tolist() == shared
    distinct = {tuple(pair[:stop]) for pair in pairs for stop in range(1, len(pair) + 1)}
    assert (places.lengths - places.shared).sum() == len(distinct)


def test_ids_beyond_32_bits_stay_apart():
    rows = [np.array([1, 2**32 + 5]), np.array([1, 5]), np.array([1, 2**32 - 1])]
    places = prefix_order.sort(rows)
    assert places.order.tolist() == [1, 2, 0]
    assert places.shared.tolist() == [0, 1, 1]


def test_small_and_unsigned_integers_are_taken_as_they_are():
    places = prefix_order.sort([np.array([7, 8], np.int32), np.array([7, 9], np.uint16)])
    assert places.shared.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("sequences", "keys", "told"),
    [
        ([np.array([1.5, 2.0])], None, "integers are wanted"),
        ([np.zeros((2, 2), np.int64)], None, "sequence 0 has 2 axes"),
        ([np.array([1, 2])], [np.array([1])], "key of sequence 0"),
        ([np.array([1, 2])], [np.array([0, 0])] * 2, "2 keys came with 1 sequences"),
    ],
)
def test_what_is_no_row_of_ids_is_refused_by_name(sequences, keys, told):
    with pytest.raises(ValueError, match=told):
        prefix_order.words(sequences, keys)
