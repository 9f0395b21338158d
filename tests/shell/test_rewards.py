"""Reward functions: those by name, people's own, and what is refused."""

import asyncio
import math
import sys

import numpy as np
import pytest

from shell import mistake, named_rewards, rewards

STATE = rewards.State(global_step=3, max_steps=10, epoch=0.5)


def answers(*completions, ids=None, **columns):
    return rewards.Answers(
        prompts=["p"] * len(completions),
        completions=list(completions),
        completion_ids=ids or [[1]] * len(completions),
        columns=columns,
    )


def scored(names, of, **more):
    return rewards.score(rewards.find(names, **more), of, STATE).parts


def reward_len(completions, **kwargs):
    return [-abs(200 - len(completion)) / 100 for completion in completions]


def test_a_function_that_prefers_completions_of_200_characters_runs_unchanged():
    texts = ["a" * 200, "a" * 150, ""]
    found = scored([reward_len, "length"], answers(*texts))
    np.testing.assert_array_equal(found, [[0, 0], [-0.5, -0.5], [-2, -2]])


def test_a_function_is_given_everything_that_it_names_and_nothing_else():
    seen = {}

    def picky(completions, answer, trainer_state, completion_ids):
        seen.update(
            answer=answer, step=trainer_state.global_step, ids=completion_ids, of=trainer_state.max_steps
        )
        return [1] * len(completions)

    scored([picky], answers("a", "b", ids=[[1, 2], [3]], answer=["x", "y"], other=[0, 0]))
    assert seen == {"answer": ["x", "y"], "step": 3, "ids": [[1, 2], [3]], "of": 10}


def test_a_function_that_takes_all_by_keyword_gets_all():
    seen = {}

    def all_of_it(**given):
        seen.update(given)
        return [0.0]

    scored([all_of_it], answers("a", solution=["s"]))
    assert set(seen) == {*rewards.OFFERED, "solution"}


def test_async_functions_run_together_and_beside_others():
    meeting = []

    async def first(completions):
        meeting.append("first waits")
        while len(meeting) < 2:
            await asyncio.sleep(0)
        return [1.0 for _ in completions]

    async def second(completions):
        meeting.append("second came")
        return [2.0 for _ in completions]

    found = scored([first, lambda completions: [3.0], second], answers("a"))
    np.testing.assert_array_equal(found, [[1, 3, 2]])


def test_an_async_function_also_runs_where_a_loop_runs_already():
    async def one(completions):
        return [1.0]

    async def notebook():
        return scored([one], answers("a"))

    assert asyncio.run(notebook()).item() == 1.0


def test_none_abstains_and_becomes_not_a_number():
    found = scored(
        [lambda completions: [1, None], lambda completions: [None, np.float32(2)]], answers("a", "b")
    )
    assert found[0, 0] == 1
    assert found[1, 1] == 2
    assert math.isnan(found[0, 1])
    assert math.isnan(found[1, 0])


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0, "high"], "returned 'high' for completion 1"),
        ([1.0, math.inf], "returned inf for completion 1"),
        ([1.0, 1e308], "returned 1e.308 for completion 1; a finite number of at most 1e.30"),
        ([1.0, 10**400], "for completion 1; a finite number"),
        ([1.0, np.ones(2)], "for completion 1; a finite number"),
        (np.ones((2, 1)), "for completion 0; a finite number"),
        (3.0, "a list of 2 numbers was wanted"),
        ({0: 1.0, 1: 0.0}, "a list of 2 numbers was wanted"),
        ({0.5, 1.0}, "a list of 2 numbers was wanted"),
        ("10", "a list of 2 numbers was wanted"),
        (b"10", "a list of 2 numbers was wanted"),
    ],
)
def test_a_function_that_returns_something_else_is_named(returned, told):
    def odd(completions):
        return returned

    with pytest.raises(mistake.Mistake, match=f"reward odd .*{told}"):
        scored([odd], answers("a", "b"))


def test_a_function_that_fails_is_named_with_the_line_it_failed_in():
    def broken(completions):
        return [1 / 0 for _ in completions]

    with pytest.raises(
        mistake.Mistake, match=r"reward broken failed: ZeroDivisionError: .*test_rewards.py, line"
    ):
        scored([broken], answers("a"))


def test_a_parameter_that_no_column_has_is_told_with_the_nearest():
    def wants(completions, answr):
        return [0.0]

    with pytest.raises(mistake.Mistake, match=r"takes 'answr', .* \(answer\). Did you mean answer?"):
        scored([wants], answers("a", answer=["x"]))


def test_functions_log_columns_and_metrics():
    def logs(completions, log_extra, log_metric):
        log_extra("size", [len(each) for each in completions])
        log_metric("share", 0.25)
        log_metric("share", 0.75)
        return [0.0, 0.0]

    found = rewards.score(rewards.find([logs]), answers("a", "bb"), STATE)
    assert found.extras == {"size": [1, 2]}
    assert rewards.metrics.values(found.means) == {"share": 0.5}


def test_a_function_of_a_module_is_found_and_weighed(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_here.py").write_text("def one(completions, **kwargs):\n    return [1.0]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    first, second = rewards.find(["my_rewards_here:one", "my_rewards_here:one"], weights=[0.5, 2.0])
    assert (first.name, first.weight, second.name, second.weight) == ("one", 0.5, "one_2", 2.0)


@pytest.mark.parametrize(
    ("names", "weights", "told"),
    [
        (["exact_anwser"], None, "Did you mean exact_answer?"),
        ([], None, "at least one reward function was wanted"),
        (["length"], [1.0, 2.0], "2 came for 1 reward_funcs"),
        (["r.py:short"], None, "'r.py:short' came; module:function was wanted: write r:short."),
        (["../a/r.py"], None, "write r:FUNCTION and start in ../a, or have it in PYTHONPATH."),
        (["my.rewards.short"], None, "Write my.rewards:short."),
        (["accuracy_reward"], None, "Did you mean reasoning_accuracy?"),
        (["get_soft_overlong_punishment"], None, "Did you mean overlong?"),
        (["/"], None, "/ is a folder: a model scores by a function that loads it."),
        (["no_such_module:f"], None, "no_such_module:f cannot be imported: ModuleNotFoundError"),
        (["math:pi"], None, "math:pi is a float; a function was wanted"),
    ],
)
def test_a_function_that_cannot_be_had_is_refused(names, weights, told):
    with pytest.raises(mistake.Mistake) as caught:
        rewards.find(names, weights=weights)
    assert told in str(caught.value)


def test_a_checker_that_is_not_installed_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(named_rewards.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(mistake.Mistake, match="pip install math-verify"):
        rewards.find(["reasoning_accuracy"])


def test_reasoning_accuracy_reads_what_stands_after_the_thinking():
    pytest.importorskip("math_verify")
    completions = [
        r"<think>\boxed{3}</think> so \boxed{\frac{1}{2}}",
        r"<think>a</think>\boxed{3}",
        r"<think>\boxed{0.5}",
        "x",
    ]
    found = scored(
        ["reasoning_accuracy"], answers(*completions, solution=[r"$\frac{1}{2}$"] * 3 + ["no idea"])
    )
    np.testing.assert_array_equal(found[:, 0], [1, 0, 0, np.nan])


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        ("First 3, then 1,234.0.", "1234", 1.0),
        ("12", "-12", 0.0),
        (r"\boxed{\frac{1}{2}} and 7", r"so it is \boxed{\frac{1}{2}}", 1.0),
        ("5 apples", "2 + 3 = 5 #### 5", 1.0),
        ("yes", "yes", 1.0),
        ("yes, I think", "yes", 0.0),
        ("", "4", 0.0),
        ([{"role": "assistant", "content": "It is 4"}], 4, 1.0),
    ],
)
def test_the_exact_answer_is_the_last_number_or_the_box(said, answer, right):
    assert scored(["exact_answer"], answers(said, answer=[answer])).item() == right


def test_formats_are_told_apart():
    texts = ["<think>a</think>b", "<think>a</think>\n<answer>b</answer>", "b", "<think>a<think></think>b"]
    found = scored(["think_format", "format"], answers(*texts))
    np.testing.assert_array_equal(found, [[1, 0], [1, 1], [0, 0], [0, 0]])


def test_repetition_is_the_share_of_word_triples_said_before():
    found = scored(["repetition"], answers("a b c a b c", "a b", "one two three four"))
    np.testing.assert_allclose(found[:, 0], [-0.25, 0, 0])


def test_overlong_falls_in_a_line_over_the_last_fifth():
    found = scored(["overlong"], answers("", "", "", "", ids=[[0] * n for n in (10, 80, 90, 100)]), limit=100)
    np.testing.assert_allclose(found[:, 0], [0, 0, -0.5, -1])
