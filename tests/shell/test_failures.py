"""A failing batch in a file: written, read, tried again."""

import numpy as np
import pytest

import espalier as es
from core import algorithms, check
from shell import failures, mistake


def mean_of_rows(values, batch):
    """A planted fault: divides by what happens to be in the pack."""
    return values.mean()


def found(name="sft"):
    failure = check.find(getattr(algorithms, name).evolve(reduce=mean_of_rows))
    assert failure is not None
    return failure


@pytest.mark.parametrize("name", ["sft", "grpo", "apo_zero_unpaired"])
def test_a_failure_comes_back_from_its_file_to_the_bit(tmp_path, name):
    failure = found(name)
    es.failures.save(failure, tmp_path / "failing.safetensors")
    read = failures.load(tmp_path / "failing.safetensors")
    assert (read.name, read.problem, read.seed) == (failure.name, failure.problem, failure.seed)
    for one, other in zip(read.samples, failure.samples, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.trained, other.trained)
        assert (one.group, one.unit, one.columns.keys()) == (other.group, other.unit, other.columns.keys())
        for column in one.columns:
            np.testing.assert_array_equal(one.columns[column], other.columns[column])


def test_it_is_tried_again_on_the_algorithm_as_it_is_now(tmp_path):
    failures.save(found(), tmp_path / "failing.safetensors")
    read = failures.load(tmp_path / "failing.safetensors")
    assert failures.again(algorithms.sft.evolve(reduce=mean_of_rows), read) == read.problem
    assert failures.again(algorithms.sft, read) == ""


def test_the_error_of_a_check_carries_what_can_be_saved(tmp_path):
    with pytest.raises(es.Broken) as caught:
        es.check(algorithms.sft.evolve(reduce=mean_of_rows))
    failures.save(caught.value.failure, tmp_path / "failing.safetensors")
    assert failures.load(tmp_path / "failing.safetensors").name in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\x10\0\0\0\0\0\0\0" + b'{"a":1}         '])
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "failing.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(mistake.Mistake, match="holds no failing batch"):
        failures.load(path)


def test_weights_of_a_model_are_no_failing_batch(tmp_path):
    import safetensors.torch
    import torch

    safetensors.torch.save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(mistake.Mistake, match="holds no failing batch"):
        failures.load(tmp_path / "model.safetensors")
