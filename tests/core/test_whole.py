"""A number of things is a whole one, and not below the least."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from core import whole


@hypothesis.given(st.integers(-5, 5), st.integers(-5, 5), st.sampled_from([int, np.int64, np.int8]))
def test_an_integer_of_any_kind_comes_back_as_an_int_unless_it_is_below_the_least(value, least, kind):
    if value >= least:
        found = whole.number("ranks", kind(value), least=least)
        assert found == value
        assert type(found) is int
        return
    with pytest.raises(ValueError, match=f"ranks is {value}; a whole number of at least {least} is wanted"):
        whole.number("ranks", kind(value), least=least)


@pytest.mark.parametrize("value", [2.0, float("nan"), "3", None])
def test_what_is_no_integer_is_refused_rather_than_cut(value):
    with pytest.raises(ValueError, match=f"epoch is {value!r}; a whole number"):
        whole.number("epoch", value)
