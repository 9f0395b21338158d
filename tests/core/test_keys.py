"""Keys are derived, never advanced."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from core import keys

WORDS = st.lists(st.one_of(st.integers(0, 99), st.text(max_size=3)), max_size=3)


@hypothesis.given(WORDS, WORDS)
def test_different_uses_have_different_keys_and_the_same_use_the_same(one, other):
    assert (keys.fold_in(7, *one) == keys.fold_in(7, *other)) == (one == other)


@hypothesis.given(st.integers(0, 2**63 - 1))
def test_a_key_fits_a_seed_of_torch(parent):
    assert 0 <= keys.fold_in(parent, "use") < 2**63


def plain(number):
    """Return a step of SplitMix64 in whole numbers, as its authors write it."""
    mask = 2**64 - 1
    z = (number + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@hypothesis.given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5))
def test_many_numbers_are_hashed_as_one_is(numbers):
    assert keys.mixed(np.array(numbers, np.uint64)).tolist() == [plain(number) for number in numbers]


def test_the_hash_is_the_published_one():
    # The first output of SplitMix64 seeded with 0, as in the reference implementation's own test.
    assert keys.mixed(np.array([0], np.uint64)).tolist() == [0xE220A8397B1DCDAF]


def test_a_number_from_numpy_is_a_number():
    assert keys.fold_in(1, np.int64(3)) == keys.fold_in(1, 3) != keys.fold_in(1, "3")
