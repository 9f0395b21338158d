"""Groups that teach nothing are left out and replaced: how often, by what, and again after a stop."""

import attrs
import numpy as np
import pytest
import torch

from core import metrics, ports
from shell import answers, prompts, refill


def answered(rewards, first=0):
    """Answers with these rewards, two a prompt, the prompts numbered from a first one."""
    groups = torch.arange(first, first + len(rewards) // 2).repeat_interleave(2)
    total = torch.tensor(rewards, dtype=torch.float64)
    end = np.zeros(1, np.int64)
    drawn = ports.Completion(
        tokens=end, logprobs=end.astype(np.float32), kept=np.ones(1, np.float32), ended=True
    )
    return answers.Answered(
        prompts=[prompts.Prompt(tokens=end, columns={"prompt": str(n)}) for n in groups.tolist()],
        completions=[drawn] * len(rewards),
        texts=[f"{n}" for n in groups.tolist()],
        parts=total[:, None],
        rewards=total,
        groups=groups,
        extras={"first": [first] * len(rewards)},
        means={"seen": metrics.Sum(total=float(len(rewards)))},
    )


def unlike(given):
    """Say whose group of two has two rewards."""
    pairs = given.rewards.view(-1, 2)
    return (pairs[:, 0] != pairs[:, 1]).repeat_interleave(2)


def filled(first, more, tries):
    """Fill up from a list of what comes next, and return what was asked for, too."""
    asked, left = [], list(more)

    def draw(used, count):
        asked.append((used, count))
        return answered(left.pop(0), first=used)

    return refill.fill(answered(first), draw, tries=tries, teaches=unlike), asked


def test_nothing_is_looked_at_where_no_try_is_allowed():
    made, asked = filled([1, 1, 0, 1], [], 0)
    assert made.teaches.all()
    assert made.chosen is made.drawn
    assert (asked, made.more, made.means) == ([], 0, {})


def test_a_full_round_draws_nothing_more():
    made, asked = filled([1, 0, 0, 1], [], 3)
    assert asked == []
    assert made.chosen.texts == ["0", "0", "1", "1"]
    assert metrics.values(made.means) == {"dynamic_sampling/left_out": 0.0, "dynamic_sampling/missing": 0.0}


def test_as_many_prompts_are_drawn_as_groups_are_missing_until_none_is():
    made, asked = filled([1, 1, 0, 0, 0, 1], [[1, 1, 1, 0], [0, 1]], 5)
    assert asked == [(3, 2), (5, 1)]
    assert made.chosen.texts == ["2", "2", "4", "4", "5", "5"]
    assert made.teaches.all()
    assert made.more == 3
    assert metrics.values(made.means)["dynamic_sampling/left_out"] == 3
    assert metrics.values(made.drawn.means)["seen"] == 12
    assert made.chosen.extras["first"] == [0, 0, 3, 3, 5, 5]


def test_after_the_last_try_groups_that_teach_nothing_stand_behind_and_are_left_out():
    made, asked = filled([1, 1, 0, 1], [[1, 1], [0, 0]], 2)
    assert asked == [(2, 1), (3, 1)]
    assert made.chosen.texts == ["1", "1", "0", "0"]
    assert made.teaches.tolist() == [True, True, False, False]
    assert metrics.values(made.means) == {"dynamic_sampling/left_out": 3.0, "dynamic_sampling/missing": 1.0}


def test_a_column_that_one_visit_lacks_is_none_there():
    one, other = answered([1, 0]), attrs.evolve(answered([1, 0], first=1), extras={"more": ["a", "b"]})
    both = answers.joined([one, other])
    assert both.extras == {"first": [0, 0, None, None], "more": [None, None, "a", "b"]}
    assert answers.taken(both, [3, 0]).extras == {"first": [None, 0], "more": ["b", None]}
    assert answers.taken(both, [3, 0]).groups.tolist() == [1, 0]
    assert answers.taken(both, [3]).parts.tolist() == [[pytest.approx(0.0)]]
