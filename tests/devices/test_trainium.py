"""The plan of sizes on real lengths, at the prices of a published pair of runs."""

import itertools

import numpy as np
import pytest

from tests import paths
from tests.benchmarks import trainium


@pytest.fixture(scope="module")
def found():
    """Return what each policy costs, by distribution, steps and policy."""
    paths.shared("data", "tau_airline", "trajectories_tasks_0_24.jsonl")
    lengths = {"gsm8k": trainium.gsm8k(), "tau": trainium.tau()}
    rows = {(name, num): trainium.batches(lengths[name], num) for name in lengths for num in trainium.STEPS}
    chosen = itertools.product(lengths, trainium.STEPS, trainium.POLICIES)
    return {key: trainium.entry(key[0], key[2], rows[key[:2]]) for key in chosen}


@pytest.mark.parametrize("num_steps", trainium.STEPS)
@pytest.mark.parametrize("name", ["gsm8k", "tau"])
def test_the_plan_is_never_worse_than_multiples_of_128_by_more_than_a_hundredth(found, name, num_steps):
    ours, theirs = (found[name, num_steps, policy]["seconds"] for policy in ("plan", "128"))
    assert ours <= 1.01 * theirs


def test_on_agents_the_plan_takes_two_thirds_of_the_time_or_less_at_500_steps(found):
    assert found["tau", 500, "128"]["seconds"] >= 1.5 * found["tau", 500, "plan"]["seconds"]


def test_lengths_are_those_of_real_conversations():
    paths.shared("data", "tau_airline", "trajectories_tasks_0_24.jsonl")
    gsm8k, tau = trainium.gsm8k(), trainium.tau()
    assert len(gsm8k) == 2000
    assert 100 < np.median(gsm8k) < 400
    assert len(tau) > 1000
    assert tau.min() > 3000  # policy and tools stand in every prompt
    assert 15_000 < tau.max() < 16_000


def test_every_step_is_padded_to_a_size_that_holds_it():
    rows = np.array([[3, 700, 5, 9], [100, 20, 30, 40]])
    for policy, wanted in {"plan": [1024, 1024], "128": [768, 128], "unpadded": [700, 100]}.items():
        sizes = trainium.padded(policy, rows.max(1))
        assert sizes == wanted
        told = trainium.entry("x", policy, rows)
        assert told["graphs"] == 2 * len({*wanted})
        assert told["padded_tokens"] == 4 * sum(wanted) - rows.sum()
