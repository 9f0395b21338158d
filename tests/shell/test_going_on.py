"""What a run that goes on keeps though the machine has changed, and what it may be told to look for."""

import shutil

from tests.shell import runs, words


def test_a_run_goes_on_with_the_token_budget_that_it_began_with(tmp_path, monkeypatch, capsys):
    def fits(tokens):
        monkeypatch.setattr("core.plan.memory.budget", lambda *args, **more: tokens)

    plan = {"pad_to_multiple_of": 32, "save_steps": 1, "batch_size": 12}
    fits(150)
    whole = runs.made(tmp_path / "whole", **plan, max_steps=2)
    begun = runs.facts(whole)
    shutil.copytree(whole, tmp_path / "out")
    for name in ("checkpoint-2", "model"):
        shutil.rmtree(tmp_path / "out" / name)
    capsys.readouterr()
    fits(100)
    runs.made(tmp_path / "out", **plan, max_steps=2)
    told = capsys.readouterr().err
    assert "token_budget is 128, as the run began with, and by the estimate 100 fit" in told
    facts = runs.facts(tmp_path / "out")
    assert facts["promised"]["token_budget"] == begun["promised"]["token_budget"] == 128
    assert facts["sizes_planned"] == begun["sizes_planned"]
    runs.same(whole, tmp_path / "out", 2)
    runs.made(tmp_path / "out", **plan, max_steps=3, token_budget=100, resume="force")
    assert runs.facts(tmp_path / "out")["promised"]["token_budget"] == 100
    fits(150)  # 100 was asked for, not planned
    runs.made(tmp_path / "out", **plan, max_steps=4, resume="force")
    assert runs.facts(tmp_path / "out")["promised"]["token_budget"] == 128


def test_a_metric_that_the_first_row_does_not_show_may_be_the_best_ones(tmp_path):
    rows = [{"prompt": f"q{n} ", "completion": f"a{n}", "label": n % 2 == 0} for n in range(4)]
    file = words.write(tmp_path / "kto.jsonl", rows)
    plan = {"eval_steps": 1, "max_steps": 1, "batch_size": 4, "save_total_limit": 1}
    bad = {"algorithm": "kto", "dataset": file, "dataset_split": "train", "eval_dataset": file}
    # One answer of four ends within two tokens, and it is not the first.
    ended = {"algorithm": "grpo", "dataset": "task:letters", "dataset_split": "train[:4]"}
    ended |= {"num_generations": 2, "eval_dataset": "task:letters", "eval_split": "test[:40]"}
    ended |= {"max_completion_length": 4, "max_length": "null", "reward_funcs": "length"}
    for name, metric, more in (
        ("bad", "rewards/rejected", bad), ("ended", "completions/mean_terminated_length", ended),
    ):  # fmt: skip
        out = runs.made(tmp_path / name, **plan, **more, metric_for_best_model=metric)
        assert f"eval_{metric}" in runs.metrics(out)[-1]
        assert runs.run(tmp_path / "no", **plan, **more, metric_for_best_model=f"{metric}s") == 2
