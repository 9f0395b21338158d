import pytest

from tests.benchmarks import masters

# Rows and steps enough that what bfloat16 rounds away is several times the tolerance.
SHORT = {"dataset_split": "train[:100]", "eval_split": "train[:12]", "max_length": 64, "batch_size": 6}


def test_bfloat16_comes_within_2_percent_of_float32_with_masters_and_not_without():
    start, wide = masters.losses("float32", 3e-4, 16, **SHORT)
    assert wide < 0.8 * start
    assert masters.losses("bfloat16, masters", 3e-4, 16, **SHORT)[1] == pytest.approx(wide, rel=0.02)
    assert masters.losses("bfloat16 alone", 3e-4, 16, **SHORT)[1] > 1.05 * wide
