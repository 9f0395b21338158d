"""A call with arguments of the wrong kind is told in one line, where nothing checks shapes and types."""

import numpy as np
import pytest
import torch

from core import advantages, algorithms, optimizers, pack, reference, schedules, steps
from core.plan import batching, prefix_tree, sample

pytestmark = pytest.mark.plain

EVERY = [
    advantages.group_normalized,
    advantages.batch_normalized,
    advantages.centered,
    advantages.leave_one_out,
    advantages.group_mean,
    advantages.without_variance,
    advantages.normalize_then_sum,
]


@pytest.mark.parametrize("function", EVERY)
@pytest.mark.parametrize(
    ("rewards", "groups", "told"),
    [
        (torch.tensor([1, 2, 3, 4]), torch.tensor([0, 0, 1, 1]), "rewards are torch.int64 .*floating point"),
        (torch.ones(2, 2, 2), torch.zeros(2, dtype=torch.int64), r"\[2, 2, 2\]; floating point"),
        ([1.0, 2.0], torch.zeros(2, dtype=torch.int64), "rewards are a list; a tensor is wanted"),
        (torch.ones(2), [0, 0], "groups are a list; a tensor is wanted"),
        (torch.ones(4), torch.zeros(2, dtype=torch.int64), r"groups are torch.int64 \[2\] for rewards of 4"),
        (torch.ones(2), torch.zeros(4, dtype=torch.int64), r"integers \[2\] are wanted, the group of each"),
        (torch.ones(2), torch.zeros(2), "groups are torch.float32"),
    ],
)
def test_what_is_no_table_of_rewards_with_a_group_each_is_refused(function, rewards, groups, told):
    if function is advantages.normalize_then_sum and getattr(rewards, "ndim", 0) == 1:
        rewards = rewards[:, None]
    with pytest.raises(ValueError, match=told):
        function(rewards, groups)


def test_rewards_of_no_number_of_functions_and_values_of_integers_are_refused():
    with pytest.raises(ValueError, match=r"float32 \[3\]; floating point \[samples, functions\] is wanted"):
        advantages.weighted_sum(torch.ones(3))
    with pytest.raises(ValueError, match=r"rewards are torch\.int64"):
        advantages.standardized(torch.tensor([1, 2]))


ROW = np.arange(3)
ONE = sample.Sample(tokens=ROW, trained=ROW > 0)
LINE = schedules.linear(num_updates=3, num_warmup=1)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: batching.order(-1, seed=1, epoch=0), "num_rows is -1; a whole number of at least 0"),
        (lambda: batching.order(3, seed=1, epoch=-1), "epoch is -1; a whole number of at least 0"),
        (lambda: batching.order(3, seed=None, epoch=-1), "epoch is -1"),
        (lambda: batching.order(3, seed=1.5, epoch=0), "seed is 1.5; a whole number is wanted"),
        (lambda: batching.assign([ONE], budget=float("nan")), "budget is nan; a whole number of at least 1"),
        (lambda: batching.assign([ONE], budget=0), "budget is 0; a whole number of at least 1"),
        (lambda: batching.assign([ONE], budget=9, num_ranks=2.5), "num_ranks is 2.5; a whole number"),
        (
            lambda: prefix_tree.build([np.array([2**63 + 1], np.uint64)]),
            "9223372036854775809; int64 is wanted",
        ),
        (lambda: schedules.linear(num_updates=0), "num_updates is 0; a whole number of at least 1"),
        (lambda: schedules.cosine(num_updates=-5), "num_updates is -5"),
        (lambda: schedules.constant(num_warmup=-3), "num_warmup is -3; a whole number of at least 0"),
        (lambda: schedules.linear(num_updates=3, num_warmup=0.5), "num_warmup is 0.5"),
        (lambda: schedules.cosine(num_updates=3, floor=2.0), "floor is 2.0; a fraction of the base rate"),
        (lambda: schedules.cosine(num_updates=3, floor=float("nan")), "floor is nan"),
        (lambda: LINE(-1), "-1 updates are done; the number of the next one is wanted, 0 for the first"),
        (lambda: schedules.cosine(num_updates=3)(-1), "-1 updates are done"),
    ],
)
def test_a_number_with_which_a_plan_cannot_work_is_refused_by_its_name(call, told):
    with pytest.raises(ValueError, match=told):
        call()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tokens": [1, 2, 3]}, r"Sample\.tokens is a list; an array is wanted: numpy\.asarray"),
        ({"tokens": torch.arange(3)}, r"Sample\.tokens is a Tensor; an array is wanted"),
        ({"tokens": np.ma.masked_array(ROW, ROW > 1)}, r"Sample\.tokens is a MaskedArray"),
        ({"tokens": np.array([1, -2, 3])}, r"Sample\.tokens holds -2; ids of 0 and more are wanted"),
        ({"trained": [False, True, True]}, r"Sample\.trained is a list"),
        ({"share": [0, 0, 0]}, r"Sample\.share is a list"),
        ({"share": np.zeros(2, np.int64)}, r"Sample\.share is int64 \(2,\); int64 \(3,\) is wanted"),
        ({"share": np.zeros(3)}, r"Sample\.share is float64"),
        ({"columns": {"x": None}}, "column 'x' is a NoneType; an array"),
        ({"columns": {"x": "abc"}}, "column 'x' is a str"),
        ({"columns": {"x": [1, 2, 3]}}, "column 'x' is a list"),
        ({"columns": {"x": torch.ones(3)}}, "column 'x' is a Tensor"),
        ({"columns": {"x": 1j}}, "column 'x' is a complex"),
        ({"columns": {"x": ROW * 1j}}, "column 'x' is complex128; an array of real numbers"),
        ({"columns": {"x": np.array([1, None, 2], object)}}, "column 'x' is object; an array of real"),
        ({"columns": {"x": np.ma.masked_array(ROW, ROW > 1)}}, "column 'x' is MaskedArray"),
    ],
)
def test_a_sample_of_anything_but_arrays_and_numbers_is_refused_by_its_field(fields, told):
    with pytest.raises(ValueError, match=told):
        sample.Sample(**{"tokens": ROW, "trained": ROW > 0, **fields})


@pytest.mark.parametrize("number", [1, 1.5, True, np.float32(2), np.int64(3), np.bool_(True), float("nan")])
def test_a_number_of_any_kind_is_a_column(number):
    sample.Sample(tokens=ROW, trained=ROW > 0, columns={"x": number})


def of(**columns):
    """A sample with some columns."""
    return sample.Sample(tokens=ROW, trained=ROW > 0, columns=columns)


@pytest.mark.parametrize(
    ("samples", "options", "told"),
    [
        ([of(x=1.0), of()], {}, "column 'x': sample 0 has one number and sample 1 has none"),
        ([of(), of(), of(x=ROW)], {}, "sample 0 has none and sample 2 has a number a token"),
        ([of(x=ROW), of(x=1.0)], {}, "sample 0 has a number a token and sample 1 has one number"),
        ([of()], {"dtype": torch.int64}, r"columns of torch\.int64 were asked for; a floating point dtype"),
        ([of()], {"budget": 1.5}, "a budget .None: no limit. is 1.5; a whole number of at least 1 is wanted"),
        ([of()], {"budget": 0}, "a budget .None: no limit. is 0; a whole number of at least 1 is wanted"),
    ],
)
def test_a_pack_that_cannot_be_built_is_refused_by_what_stands_in_the_way(samples, options, told):
    counts = pack.count(samples)
    with pytest.raises(ValueError, match=told):
        pack.build(samples, counts, **options)


@pytest.mark.parametrize("counted", [[], [of(mismatched=1.0)], [of()]])
def test_counts_of_another_step_are_refused(counted):
    samples = [of(), of()]
    with pytest.raises(ValueError, match="trained tokens in the whole step, and this pack alone has 4"):
        pack.build(samples, pack.count(counted))
    pack.build(samples, pack.count(samples * 2))


def test_a_mark_of_a_mismatched_sample_is_yes_or_no():
    with pytest.raises(ValueError, match=r"sample 1 of the step has mismatched 0\.5; 1 \(yes\) or 0 \(no\)"):
        pack.count([of(mismatched=0.0), of(mismatched=0.5)])


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({"epsilon": 0.0}, "epsilon is 0.0; a number above 0"),
        ({"epsilon": float("nan")}, "epsilon is nan"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; a number of at least 0"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"max_norm": -1.0}, "max_norm is -1.0; a number of at least 0 is wanted, 0 for no clipping"),
        ({"max_norm": float("nan")}, "max_norm is nan"),
    ],
)
def test_a_rule_with_which_no_update_can_be_made_is_refused_by_its_number(rule, told):
    with pytest.raises(ValueError, match=told):
        optimizers.adamw(rate=lambda done: 1e-3, **rule)


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_a_rate_that_is_not_finite_is_refused_before_a_parameter_moves(rate):
    rule, params = optimizers.sgd(rate=lambda done: rate), reference.params()
    state = steps.init(params, rule, algorithms.sft, key=0)
    with pytest.raises(ValueError, match=f"the learning rate of update 0 is {rate}; a finite number"):
        steps.update(rule, state, dict(params), donate=True)


def test_a_step_without_packs_is_refused():
    rule = optimizers.sgd(rate=lambda done: 1e-3)
    state = steps.init(reference.params(), rule, algorithms.sft, key=0)
    with pytest.raises(ValueError, match="no packs came; at least one is wanted"):
        steps.train_step(reference.Reference(), algorithms.sft, rule, state, [])
