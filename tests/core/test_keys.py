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


def test_a_number_from_numpy_is_a_number():
    assert keys.fold_in(1, np.int64(3)) == keys.fold_in(1, 3) != keys.fold_in(1, "3")
