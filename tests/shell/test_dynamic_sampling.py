"""Dynamic sampling, masks and the adaptive coefficient in rounds and in runs that stop and go on."""

import json
import signal

import pytest

from core import algorithms, metrics, steps
from shell import feed, rollout
from tests import warm
from tests.shell import runs
from tests.shell.test_rollout import Parrot, kept, model, planned, rolls, state  # noqa: F401 -- a fixture

LETTERS = {
    "algorithm": "grpo", "dataset": "task:letters", "dataset_split": "train[:6]", "batch_size": 4,
    "num_generations": 2, "max_completion_length": 4, "max_length": "null", "max_steps": 3,
    "logging_steps": 1,
}  # fmt: skip
# A warm model is far away: the first letter of a completion says whether it is rewarded.
REWARD = "tests.shell.test_dynamic_sampling:first_letter"


def first_letter(completions, **columns):
    """Reward what an untrained model does about every eighth time, so that most groups are alike."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(ord(text[0]) % 8 == 0) if text else 0.0 for text in texts]


# Prompts 1 and 4 are answered alike, 0, 2, 3, 5 teach.
SAID = {n: (["x", "x"] if n in (1, 4) else [str(n), "x"]) for n in range(12)}
SAID |= {n: [str(n), "x"] for n in range(6, 12)}


def test_a_group_that_is_alike_is_replaced_by_the_next_prompt_and_the_place_says_so(tmp_path, model):  # noqa: F811
    plan = planned(kept(tmp_path), batch_size=4, num_generations=2)
    rolling = rolls(plan, model, Parrot(SAID), tries=2)
    first = rolling.draw(state(model))
    assert [one.group for one in first.samples] == [0, 0, 2, 2]
    assert first.place == (3, 0)
    assert len(first.table) == 6
    assert metrics.values(first.means)["dynamic_sampling/left_out"] == 1
    second = rolling.draw(state(model, first.place))
    assert [one.group for one in second.samples] == [3, 3, 5, 5]
    assert second.place == (6, 0)
    assert plan.epoch(second.place) == 0.5


def test_replacements_go_on_over_the_end_of_an_epoch(tmp_path, model):  # noqa: F811
    rows = [{"prompt": f"{n} ", "answer": str(n)} for n in range(3)]
    said = {0: ["0", "x"], 1: ["x", "x"], 2: ["2", "x"]}
    plan = planned(kept(tmp_path, rows), batch_size=4, num_generations=2)
    rolling = rolls(plan, model, Parrot(said), tries=1)
    first = rolling.draw(state(model))
    assert ([one.group for one in first.samples], first.place) == ([0, 0, 2, 2], (3, 0))
    second = rolling.draw(state(model, (1, 0)))
    # Prompts 1 and 2 are left of this epoch; for 1 the first of the next one comes.
    assert ([one.group for one in second.samples], second.place) == ([2, 2, 3, 3], (4, 0))


def test_what_no_try_replaced_is_left_out_of_loss_and_counts(tmp_path, model):  # noqa: F811
    alike = {n: ["x", "x"] for n in range(12)} | {0: ["0", "x"]}
    plan = planned(kept(tmp_path), batch_size=4, num_generations=2)
    drawn = rolls(plan, model, Parrot(alike), tries=3).draw(state(model))
    assert [one.group for one in drawn.samples] == [0, 0]
    assert drawn.place == (5, 0)
    said = metrics.values(drawn.means)
    assert (said["dynamic_sampling/left_out"], said["dynamic_sampling/missing"]) == (4, 1)
    assert "empty_steps" not in said


def test_a_step_in_which_nothing_teaches_is_0_and_counted_as_empty(tmp_path, model):  # noqa: F811
    made, params, packing, _ = model
    alike = {n: ["x", "x"] for n in range(12)}
    plan = planned(kept(tmp_path), batch_size=4, num_generations=2)
    drawn = rolls(plan, model, Parrot(alike), tries=1).draw(state(model))
    assert metrics.values(drawn.means)["empty_steps"] == 1
    packs = feed.packs(drawn.samples, algorithms.grpo, needs=(), **packing)
    value, _, grads = steps.loss_and_grad(made, algorithms.grpo, params, packs, 0)
    assert float(value) == 0
    assert not any(grad.any() for grad in grads.values())


def test_a_round_goes_on_from_a_checkpoint_with_what_it_used_up(tmp_path, model):  # noqa: F811
    plan = planned(kept(tmp_path), batch_size=4, num_generations=2, visits=(2, 2))
    rolling = rolls(plan, model, Parrot(SAID), tries=4)
    place, seen = (0, 0), []
    for made in range(4):
        drawn = rolling.draw(state(model, place))
        seen.append([one.group for one in drawn.samples])
        place = drawn.place
        assert place == ((0, made + 1, 6) if made < 3 else (6, 0))
        again = rolls(plan, model, Parrot({0: ["never", "asked"]}), tries=4)
        again.join(*rolling.split(place))
        rolling = again if made < 3 else rolling
    assert seen == [[0, 0, 2, 2], [3, 3, 5, 5]] * 2


@pytest.mark.parametrize("keep", [False, True])
def test_masked_answers_are_in_the_baseline_of_others_only_when_asked(tmp_path, model, keep):  # noqa: F811
    plan = planned(kept(tmp_path), batch_size=4)
    found = []
    for cut in ("x.", "000."):
        drawn = rolls(
            plan, model, Parrot({0: ["0", "x", "0", cut]}), functions=["exact_answer", "length"], mask=True,
            keep_masked=keep, algorithm=algorithms.dr_grpo,
        ).draw(state(model))  # fmt: skip
        assert len(drawn.samples) == 3
        found.append([one.columns["advantage"] for one in drawn.samples])
    assert (found[0] == found[1]) is not keep
    assert (abs(sum(found[0])) < 1e-9) is not keep


def options(**more):
    return {**LETTERS, "reward_funcs": REWARD, "dynamic_sampling": 3, **more}


def test_two_runs_leave_the_same_and_count_what_was_left_out(tmp_path):
    first, second = (runs.made(tmp_path / name, **options()) for name in ("one", "two"))
    runs.same(first, second, 3)
    counted = runs.facts(first)["counted"]
    logged = runs.metrics(first)
    assert counted["dynamic_sampling/left_out"] > 0
    assert counted["dynamic_sampling/left_out"] == sum(line["dynamic_sampling/left_out"] for line in logged)
    assert counted == runs.facts(second)["counted"]
    told = f"dynamic_sampling/left_out {counted['dynamic_sampling/left_out']:g}"
    assert any("counted over the run" in note and told in note for note in runs.facts(first)["notes"])


def test_a_run_stopped_inside_a_round_of_replaced_prompts_ends_like_one_that_was_not(tmp_path, monkeypatch):
    more = {"max_steps": 6, "save_steps": 1, "steps_per_generation": 2, "num_iterations": 2}
    whole = runs.made(tmp_path / "whole", **options(**more))
    draw, visits = rollout.Rollouts.draw, []

    def stopped(self, state, reference=None):
        if state.step in (1, 3, 5) and state.step not in visits:
            visits.append(state.step)
            signal.raise_signal(signal.SIGTERM)
        return draw(self, state, reference)

    monkeypatch.setattr(rollout.Rollouts, "draw", stopped)
    for _ in range(3):
        assert runs.run(tmp_path / "cut", **options(**more)) == 143
    runs.made(tmp_path / "cut", **options(**more))
    runs.same(whole, tmp_path / "cut", 6)
    assert runs.facts(whole)["counted"] == runs.facts(tmp_path / "cut")["counted"]
    assert (whole / "completions.jsonl").read_bytes() == (tmp_path / "cut" / "completions.jsonl").read_bytes()


def test_the_coefficient_of_entropy_moves_and_goes_on_after_a_stop(tmp_path):
    adaptive = {
        "use_adaptive_entropy": True, "entropy_target": 100.0, "entropy_coef_delta": 0.25,
        "entropy_coef_max": 0.6, "save_steps": 1,
    }  # fmt: skip
    whole = runs.made(tmp_path / "whole", **{**LETTERS, **adaptive, "max_steps": 4})
    assert [line["entropy_coef"] for line in runs.metrics(whole)] == [0, 0.25, 0.5, 0.6]
    runs.made(tmp_path / "cut", **{**LETTERS, **adaptive, "max_steps": 2, "lr_scheduler_type": "constant"})
    runs.made(tmp_path / "cut", **{**LETTERS, **adaptive, "max_steps": 4, "lr_scheduler_type": "constant"})
    assert [line["entropy_coef"] for line in runs.metrics(tmp_path / "cut")] == [0, 0.25, 0.5, 0.6]


def test_two_ranks_leave_out_the_same_groups_as_one_process(tmp_path):
    chosen = options(max_steps=2, batch_size=6)
    alone = runs.made(tmp_path / "alone", **chosen)
    (tmp_path / "plan.json").write_text(json.dumps({str(tmp_path / "together"): chosen}))
    code, _, err = warm.program("tests.shell.ranked", str(tmp_path / "plan.json"), ranks=2)
    assert code == 0, err
    drawn = [(tmp_path / name / "completions.jsonl").read_text() for name in ("alone", "together")]
    assert drawn[0] == drawn[1]
    assert runs.apart(runs.weights(tmp_path / "together"), runs.weights(alone)) < 1e-5


@pytest.mark.parametrize(
    "more",
    [
        {"use_adaptive_entropy": True, "entropy_target": 100.0, "entropy_coef_max": 0.02, "beta": 0.1},
        {"algorithm": "rloo", "mask_truncated_completions": True, "keep_masked_in_baseline": True},
    ],
    ids=["grpo", "rloo"],
)
def test_a_run_with_all_of_it_that_is_killed_while_it_draws_ends_like_one_that_is_not(tmp_path, more):
    everything = {
        "max_steps": 8, "logging_steps": 3, "steps_per_generation": 2, "num_iterations": 2,
        "reward_funcs": f"[letters, length, {REWARD}]", "reward_weights": "[1, 0.01, 2]",
        "dynamic_sampling": 2, "max_completion_length": 6,
    }  # fmt: skip
    chosen = json.dumps({**LETTERS, **everything, **more})
    code, out, err = warm.program(
        "tests.shell.killed", str(tmp_path), "5", "draws=4", "lines=2", OPTIONS=chosen
    )
    assert code == 0, err
    assert out.split() == ["draws", "4", "lines", "2"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"keep_masked_in_baseline": True}, "set mask_truncated_completions, too"),
        ({"entropy_target": 0.5}, "set use_adaptive_entropy"),
        ({"use_adaptive_entropy": True, "entropy_coef_min": 2.0}, "above entropy_coef_max"),
        ({"use_adaptive_entropy": True, "entropy_coef": 3.0}, "entropy_coef: 3 came, above entropy_coef_max"),
        ({"dynamic_sampling": -1}, "at least 0 was wanted"),
        ({"dynamic_sampling": 2, "num_generations": 1, "scale_rewards": "none"}, "at least 2 were wanted"),
    ],
)
def test_numbers_that_do_nothing_or_exclude_each_other_are_refused(tmp_path, capsys, more, told):
    assert runs.run(tmp_path / "out", **{**LETTERS, **more}) == 2
    assert told in capsys.readouterr().err
