"""Reward functions that do more than score: what they change, log or end is theirs, and no work is lost."""

import asyncio
import json
import sys

import pytest

from adapters import sampling
from shell import evaluate, mistake, rewards
from tests.shell import runs

STATE = rewards.State(global_step=0, max_steps=2)
SMALL = {
    "algorithm": "grpo", "dataset": "task:letters", "dataset_split": "train[:6]", "batch_size": 4,
    "num_generations": 2, "max_completion_length": 4, "max_length": "null", "max_steps": 3,
    "logging_steps": 1,
}  # fmt: skip


def answers(**columns):
    """Return two completions of one conversation."""
    prompt = [{"role": "user", "content": "2 + 2?"}]
    return rewards.Answers(
        prompts=[prompt, prompt],
        completions=[[{"role": "assistant", "content": text}] for text in ("4", "5")],
        completion_ids=[[1], [2]],
        columns=columns,
    )


def spoiling(completions, prompts, completion_ids, answer, **kwargs):
    completions[0][0]["content"] = "spoiled"
    prompts[0][0]["content"] = "spoiled"
    answer[0].append("spoiled")
    for each in (completions, prompts, completion_ids, answer):
        each.clear()
    return [0.0, 0.0]


def exiting(completions, trainer_state, **kwargs):
    if trainer_state.global_step:
        sys.exit(0)
    return [float(place) for place, _ in enumerate(completions)]


def hinted(completions, hint, **kwargs):
    return [0.0 for _ in completions]


def at_once(completions, **kwargs):
    raise SystemExit


def test_what_a_function_changes_no_other_and_no_row_sees():
    seen = {}

    def second(completions, prompts, completion_ids, answer):
        seen.update(completions=completions, prompts=prompts, ids=completion_ids, answer=answer)
        return [1.0, 1.0]

    given = answers(answer=[["x"], ["y"]])
    rewards.score(rewards.find([spoiling, second]), given, STATE)
    whole = answers(answer=[["x"], ["y"]])
    assert seen["completions"] == whole.completions == given.completions
    assert seen["prompts"] == whole.prompts == given.prompts
    assert seen["ids"] == whole.completion_ids == given.completion_ids
    assert seen["answer"] == whole.columns["answer"] == given.columns["answer"]


@pytest.mark.parametrize("end", [SystemExit(0), SystemExit("bye"), GeneratorExit(), asyncio.CancelledError()])
@pytest.mark.parametrize("waits", [False, True])
def test_a_function_that_would_end_the_program_fails_like_any_other(end, waits):
    def now(completions):
        raise end

    async def later(completions):
        raise end

    with pytest.raises(mistake.Mistake, match=rf"reward \w+ failed: {type(end).__name__}: .*line \d+"):
        rewards.score(rewards.find([later if waits else now]), answers(), STATE)


@pytest.mark.parametrize("name", ["loss", "step", "eval_loss", "rewards/mine", "perf/trained_tok_s"])
@pytest.mark.parametrize("log", ["log_metric", "log_extra"])
def test_a_name_of_the_runs_own_numbers_is_not_logged_over(name, log):
    def logs(completions, **given):
        given[log](name, 1.0 if log == "log_metric" else [1, 2])
        return [0.0, 0.0]

    with pytest.raises(mistake.Mistake, match=rf"{name} is a name of the run's own numbers"):
        rewards.score(rewards.find([logs]), answers(), STATE)


def test_a_run_whose_function_exits_keeps_its_steps_and_none_of_its_names_is_free(tmp_path, capsys):
    assert runs.run(tmp_path / "out", **SMALL, reward_funcs=f"{__name__}:exiting") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: reward exiting failed: SystemExit: 0")
    assert runs.steps(tmp_path / "out") == [1]
    line = runs.log.read(tmp_path / "out" / "metrics.jsonl")[0]
    row = json.loads((tmp_path / "out" / "completions.jsonl").read_text().splitlines()[0])
    free = {name for name in {*line, *row} if name not in rewards.OF_RUNS}
    assert {name for name in free if not name.startswith(rewards.OF_RUNS_BELOW)} == set()


def test_an_evaluation_whose_function_exits_says_so(capsys):
    few = ["tiny", "--algorithm", "grpo", "--dataset", "task:letters", "--dataset_split", "test[:2]"]
    few += ["--max_completion_length", "2", "--reward_funcs", f"{__name__}:at_once"]
    assert evaluate.main(few) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[-1].startswith("error: reward at_once failed: SystemExit")


def test_a_column_that_only_the_training_rows_have_is_told_before_the_model_loads(
    tmp_path, capsys, monkeypatch
):
    for name, more in (("train", {"hint": "x"}), ("test", {})):
        rows = [{"prompt": "2 + 2?", "answer": "4", **more}] * 4
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("shell.choose.model", None)
    of = {
        "dataset": tmp_path / "train.jsonl",
        "dataset_split": "train",
        "eval_dataset": tmp_path / "test.jsonl",
    }
    assert runs.run(tmp_path / "out", **{**SMALL, **of}, reward_funcs=f"{__name__}:hinted") == 2
    assert "takes 'hint', which is no column of the eval_dataset" in capsys.readouterr().err.splitlines()[-1]


def test_a_policy_that_broke_ends_in_a_line_with_its_steps_kept(tmp_path, capsys, monkeypatch):
    def broken(*args, **named):
        raise ValueError("prompt 0: the model's logits are not finite")

    generate = sampling.Sampler.generate
    calls = iter([generate, broken])
    monkeypatch.setattr(sampling.Sampler, "generate", lambda *args, **named: next(calls)(*args, **named))
    assert runs.run(tmp_path / "out", **SMALL, save_steps=3) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: prompt 0: the model's logits are not finite"
    assert runs.steps(tmp_path / "out") == [1]


def test_a_module_that_exits_when_it_is_imported_is_refused(tmp_path, monkeypatch):
    (tmp_path / "exits_at_once.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mistake.Mistake, match="exits_at_once:f cannot be imported: SystemExit"):
        rewards.find(["exits_at_once:f"])
