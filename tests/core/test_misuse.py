"""What is put together wrongly is told, rather than trained on."""

import numpy as np
import pytest
import torch

from core import algorithms, pack, reduce, reference, steps
from core.plan import sample
from tests.core import tables

BY_ROW = [
    reduce.token_mean,
    reduce.sequence_mean,
    reduce.sequence_sum,
    reduce.prompt_mean,
    lambda values, batch: reduce.constant(values, batch, length=4),
]


@pytest.mark.parametrize("by", BY_ROW)
def test_a_reduction_of_rows_takes_no_other_axis(by):
    batch = tables.batch([3, 2])
    for shape in ((2,), (1,), (6,)):
        with pytest.raises(ValueError, match=r"wants one a trained token, [(]5,[)]"):
            by(torch.ones(shape, dtype=torch.float64), batch)


def test_a_mean_over_samples_takes_no_rows():
    with pytest.raises(ValueError, match=r"one a sample, [(]2,[)]"):
        reduce.sample_mean(torch.ones(5, dtype=torch.float64), tables.batch([3, 2]))


@pytest.mark.parametrize("units", [[0] * 5, [0, 0, 0], [0, 0, 1], [0, 1, 2]])
def test_a_mean_over_pairs_wants_each_sample_in_a_pair(units):
    row = np.arange(3)
    samples = [sample.Sample(tokens=row, trained=row > 0, unit=unit) for unit in units]
    batch = pack.build(samples, pack.count(samples)).batch
    values = torch.ones(len(batch.pairs.chosen))
    with pytest.raises(
        ValueError, match=f"{len(units)} samples make . pairs; a pair is two samples of one unit"
    ):
        reduce.pair_mean(values, batch)


@pytest.mark.parametrize("algorithm", [algorithms.kto, algorithms.apo_zero_unpaired])
@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"label": -1.0}, "sample 1 of the batch has label -1; 1 .yes. or 0"),
        ({"label": 2.0}, "has label 2"),
        ({"label": 0.5}, "has label 0.5"),
        ({"label": np.nan}, "has label nan"),
    ],
)
def test_a_label_that_is_neither_yes_nor_no_is_refused_in_training_and_evaluation(algorithm, columns, told):
    row = np.arange(3)
    good = {"label": True, "mismatched": 0.0, "reference_logprobs": np.zeros(3)}
    samples = [
        sample.Sample(tokens=row, trained=row > 0, unit=unit, columns=each)
        for unit, each in enumerate((good, {**good, **columns}))
    ]
    packs = [pack.build(samples, pack.count(samples), dtype=torch.float64)]
    model, params = reference.Reference(), reference.params()
    for verb in (
        lambda: steps.loss_and_grad(model, algorithm, params, packs, 0),
        lambda: steps.evaluate(model, algorithm, params, packs),
    ):
        with pytest.raises(ValueError, match=told):
            verb()


def test_a_column_called_label_means_nothing_to_an_algorithm_that_trains_on_text():
    row = np.arange(3)
    samples = [sample.Sample(tokens=row, trained=row > 0, columns={"label": 4.0})]
    packs = [pack.build(samples, pack.count(samples), dtype=torch.float64)]
    value, _ = steps.evaluate(reference.Reference(), algorithms.sft, reference.params(), packs)
    assert value.isfinite()


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_of_no_nodes_is_refused_rather_than_taken_for_no_limit(budget):
    row = np.arange(3)
    samples = [sample.Sample(tokens=row, trained=row > 0)]
    with pytest.raises(ValueError, match=f"a budget .* is {budget}; a whole number of at least 1 is wanted"):
        pack.build(samples, pack.count(samples), budget=budget)


@pytest.mark.parametrize("name", sorted(sample.OWN))
@pytest.mark.parametrize("value", [1.0, np.ones(3)])
def test_a_column_cannot_take_the_name_of_one_that_the_table_makes(name, value):
    row = np.arange(3)
    with pytest.raises(ValueError, match=f"column '{name}' is one that the table makes itself"):
        sample.Sample(tokens=row, trained=row > 0, columns={name: value})
