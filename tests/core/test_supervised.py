"""Supervised losses: right values, by hand."""

import math

import pytest
import torch

from core import reduce
from core.losses import supervised
from tests.core import tables


def test_a_token_of_four_and_nine_of_one_cost_thirteen_tenths():
    batch, scores = tables.batch([1, 9]), tables.scores([-4.0] + [-1.0] * 9)
    values, _ = supervised.nll(scores, batch)
    assert reduce.token_mean(values, batch).item() == pytest.approx(1.3)


def test_dynamic_fine_tuning_weighs_each_token_by_its_own_probability():
    logs = [math.log(0.5), math.log(0.25)]
    batch, scores = tables.batch([2]), tables.scores(logs)
    values, _ = supervised.dft(scores, batch)
    assert values.tolist() == pytest.approx([0.5 * -logs[0], 0.25 * -logs[1]])
    values.sum().backward()
    assert scores.logprobs.grad.tolist() == pytest.approx([-0.5, -0.25])  # the weight has no gradient


@pytest.mark.parametrize("loss", [supervised.nll, supervised.dft])
def test_hits_and_entropies_are_watched_where_they_are_known(loss):
    batch = tables.batch([2])
    bare = loss(tables.scores([-1.0, -2.0]), batch)[1]
    told = loss(tables.scores([-1.0, -2.0], entropies=[0.5, 1.5], top1=[1.0, 0.0]), batch)[1]
    assert set(told) - set(bare) == {"entropy", "mean_token_accuracy"}
    assert torch.equal(told["mean_token_accuracy"].detach(), torch.tensor([1.0, 0.0], dtype=torch.float64))
