"""What is told of completions: lengths, ends, abstentions, the best checkpoint; rewards of other people."""

import json

import numpy as np
import pytest
import transformers

from core import algorithms, metrics, ports, steps
from shell import checkpoint, checks, counts, feed, generate, prompts, sources, tiny
from tests.shell import runs
from tests.shell.test_log_trackers import Fake, fake  # noqa: F401 -- a fixture
from tests.shell.test_rollout import END, Parrot, kept, model, planned, rolls, state  # noqa: F401 -- a fixture

OPTIONS = {
    "algorithm": "grpo", "dataset": "task:letters", "dataset_split": "train[:6]", "batch_size": 4,
    "num_generations": 2, "max_completion_length": 4, "max_length": "null", "max_steps": 4,
    "logging_steps": 1,
}  # fmt: skip


def reward_len(completions, **kwargs):
    return [-abs(200 - len(c)) for c in completions]


def test_lengths_are_those_of_the_tokens_that_were_drawn(tmp_path, model):  # noqa: F811
    made, params, packing, _ = model
    plan = planned(kept(tmp_path), batch_size=2, num_generations=2)
    drawn = rolls(plan, model, Parrot({0: ["0", "xxxx"]})).draw(state(model))
    told = metrics.values(drawn.means)
    assert (told["completions/min_length"], told["completions/max_length"]) == (2, 5)
    assert told["completions/mean_length"] == 3.5
    assert [int(one.trained.sum()) for one in drawn.samples] == [2, 5]
    packs = feed.packs(drawn.samples, algorithms.dapo, needs=(), **packing)
    value, _, grads = steps.loss_and_grad(made, algorithms.dapo, params, packs, 0)
    assert float(value) != 0
    assert any(grad.any() for grad in grads.values())


LOSSES = (
    "grpo",
    "dapo",
    "bnpo",
    "dr_grpo",
    "gspo",
    "luspo",
    "cispo",
    "sapo",
    "vespo",
    "gmpo",
    "gdpo",
    "rloo",
)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_that_is_cut_off_whole_is_0_and_told_as_empty_with_its_lengths(tmp_path, model, loss):  # noqa: F811
    made, params, packing, _ = model
    algorithm = getattr(algorithms, loss)
    plan = planned(kept(tmp_path), batch_size=2, num_generations=2)
    rolling = rolls(plan, model, Parrot({0: ["00.", "xxxx."]}), mask=True, algorithm=algorithm)
    drawn = rolling.draw(state(model))
    told = metrics.values(drawn.means)
    assert (told["empty_steps"], told["completions/masked"], told["completions/clipped_ratio"]) == (1, 2, 1)
    assert told["completions/mean_length"] == 3
    packs = feed.packs(drawn.samples, algorithm, needs=(), **packing)
    value, _, grads = steps.loss_and_grad(made, algorithm, params, packs, 0)
    assert float(value) == 0
    assert all(grad.isfinite().all() and not grad.any() for grad in grads.values())


def test_every_end_id_that_the_model_knows_ends_a_completion(model, monkeypatch):  # noqa: F811
    made, _, _, chosen = model
    ends = transformers.GenerationConfig(eos_token_id=[7, 9])
    monkeypatch.setattr(made.module, "generation_config", ends, raising=False)
    asking = generate.asking(made, tiny.tokenizer(), (), chosen, ports.ALONE)
    assert {7, 9} <= set(asking.sampling.stop_ids)
    assert END in asking.sampling.stop_ids


def test_prompts_that_leave_no_room_are_left_out_and_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * size}) + "\n" for size in (3, 20, 16)))
    opened = prompts.look(sources.find(str(path)))
    bound = prompts.rules(opened, tokenizer=tiny.tokenizer(), limit=16)
    rows = prompts.prepare(opened, bound, folder=tmp_path / "kept")
    assert len(rows) == 2
    assert counts.notes(rows.counts) == (
        "1 of 3 rows dropped: the prompt has more than 16 tokens, so its completion may not fit",
    )


def test_abstentions_poison_no_advantage_where_each_function_is_normalized(tmp_path, model):  # noqa: F811
    plan = planned(kept(tmp_path), batch_size=2, num_generations=2)
    functions = [lambda completions: [1.0, None], lambda completions: [None, 2.0]]
    for algorithm in (algorithms.gdpo, algorithms.grpo, algorithms.rloo):
        rolling = rolls(plan, model, Parrot({0: ["a", "b"]}), functions=functions, algorithm=algorithm)
        drawn = rolling.draw(state(model))
        assert [row["reward"] for row in drawn.table] == [1.0, 2.0]
        assert all(np.isfinite(one.columns["advantage"]) for one in drawn.samples)


def test_a_reward_that_prefers_200_characters_runs_as_it_is_documented_elsewhere(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n} is "}) + "\n" for n in range(6)))
    words = {**OPTIONS, "dataset": str(tmp_path / "rows.jsonl"), "dataset_split": "train", "max_steps": 1}
    folder = runs.made(tmp_path / "out", **words, reward_funcs="tests.shell.test_told:reward_len")
    (line,) = runs.metrics(folder)
    drawn = [json.loads(row) for row in (folder / "completions.jsonl").read_text().splitlines()]
    assert [row["rewards/reward_len"] for row in drawn] == [
        -abs(200 - len(row["completion"])) for row in drawn
    ]
    assert line["reward"] == pytest.approx(sum(row["reward"] for row in drawn) / 4)


def test_the_best_checkpoint_by_reward_is_kept_and_found_again_after_a_stop(tmp_path):
    words = {
        **OPTIONS, "eval_dataset": "task:letters", "eval_split": "test[:4]", "eval_steps": 1, "save_steps": 1,
        "metric_for_best_model": "rewards/length/mean", "reward_funcs": "length", "save_total_limit": 1,
        "learning_rate": "3e-2",
    }  # fmt: skip
    whole = runs.made(tmp_path / "whole", **words)
    evals = {line["step"]: line["eval_reward"] for line in runs.metrics(whole) if "eval_reward" in line}
    assert sorted(evals) == [1, 2, 3, 4]
    best = max(evals, key=lambda step: (evals[step], -step))
    assert runs.steps(whole) == sorted({best, 4})
    runs.made(tmp_path / "cut", **{**words, "max_steps": 2, "lr_scheduler_type": "constant"})
    cut = runs.made(tmp_path / "cut", **{**words, "lr_scheduler_type": "constant"})
    again = runs.made(tmp_path / "again", **{**words, "lr_scheduler_type": "constant"})
    assert runs.metrics(cut) == runs.metrics(again)
    assert runs.steps(cut) == runs.steps(again)
    scores = [checkpoint.load(folder / "checkpoint-4").values["scores"] for folder in (cut, again)]
    assert scores[0] == scores[1]


def test_a_tracker_hears_of_each_step_once_though_the_run_was_stopped(tmp_path, fake, monkeypatch):  # noqa: F811
    heard = []
    monkeypatch.setattr(checks, "_trackers", lambda chosen, given: None)  # it need not be installed here
    monkeypatch.setattr(Fake, "log", lambda self, values, step=None, **more: heard.append((step, values)))
    words = {
        **OPTIONS, "eval_dataset": "task:letters", "eval_split": "test[:2]", "eval_steps": 2,
        "report_to": "trackio", "lr_scheduler_type": "constant",
    }  # fmt: skip
    runs.made(tmp_path / "out", **{**words, "max_steps": 2})
    runs.made(tmp_path / "out", **words)
    assert [step for step, values in heard if "train/reward" in values] == [1, 2, 3, 4]
    assert [step for step, values in heard if "eval/reward" in values] == [2, 4]
    rows = [json.loads(line) for line in (tmp_path / "out" / "completions.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
