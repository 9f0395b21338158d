"""Planned sizes change nothing of a run but rounding, whatever is trained; what no size holds is refused."""

import json
import shutil

import attrs
import pytest
import torch

from adapters import cpu, pick, static_cache
from shell import choose, evaluate, feed, mistake, sample
from tests.benchmarks import graphs
from tests.shell import runs, words
from tests.shell.test_train_grpo import PROMPTS
from tests.shell.test_train_preference import asked, files  # noqa: F401 -- a fixture

# Steps whose packs are of several sizes, one of them over the budget.
SIZES = {"pad_to_multiple_of": 32, "max_shapes": 2}
# Where a gradient is next to nothing, Adam's quotient would make something of how it is rounded.
STEADY = {"adam_epsilon": 1e-3}
# The task's own rewards are all 0 for an untrained model, and nothing would be learned.
REWARDED = {**PROMPTS, "max_steps": 2, "reward_funcs": "tests.shell.words:spread"}
OPTIONS = {"sft": {"batch_size": 3, "max_steps": 3}, "grpo": REWARDED}
ROUNDED = 1e-5


def options(files, algorithm):  # noqa: F811
    """Return a small run of an algorithm."""
    return OPTIONS[algorithm] if algorithm in OPTIONS else asked(files, algorithm)


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto", "reward", "grpo"])
def test_a_run_at_planned_sizes_ends_with_the_weights_of_one_without(tmp_path, files, algorithm):  # noqa: F811
    chosen = options(files, algorithm)
    plain, padded = (
        runs.made(tmp_path / name, **chosen, **STEADY, **more)
        for name, more in (("plain", {}), ("padded", SIZES))
    )
    assert runs.apart(runs.weights(padded), runs.weights(plain)) < ROUNDED
    told = runs.facts(padded)["sizes_planned"]
    assert 1 <= len(told) <= 2
    assert all(one["tokens"] % 32 == 0 for one in told)
    assert any(line["batch/pad_frac"] > 0 for line in runs.metrics(padded))
    assert all(line["grad_norm"] > 0 for line in runs.metrics(padded))
    if algorithm == "grpo":  # the same was drawn, token by token
        assert (padded / "completions.jsonl").read_bytes() == (plain / "completions.jsonl").read_bytes()


def test_a_run_at_planned_sizes_goes_on_to_the_bit_and_evaluates_as_one_without(tmp_path, capsys):
    held = {"eval_dataset": "demo", "eval_split": "test[:4]", "eval_steps": 2, "save_steps": 2}
    whole = {**SIZES, **held, "batch_size": 3, "max_steps": 4}
    runs.made(tmp_path / "whole", **whole)
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    for name in ("checkpoint-4", "model"):
        shutil.rmtree(tmp_path / "out" / name)
    runs.made(tmp_path / "out", **whole)
    runs.same(tmp_path / "whole", tmp_path / "out", 4)
    capsys.readouterr()
    found = []
    for more in ((), ("--pad_to_multiple_of", "32")):
        asked_ = ("--dataset", "demo", "--dataset_split", "test[:4]", "--max_length", "64", *more)
        assert evaluate.main([str(tmp_path / "whole" / "model"), *asked_]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == {name: pytest.approx(value, rel=1e-5) for name, value in found[1].items()}
    last = runs.metrics(tmp_path / "whole")[-1]
    assert found[0]["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-5)


@pytest.fixture
def traced(monkeypatch):
    """Let a graph on the CPU be what was traced, which takes no compiler of C++, of a model of one layer."""
    monkeypatch.setattr(choose, "tiny_config", graphs.small(choose.tiny_config))
    made = attrs.evolve(cpu.DEVICE, compile={"backend": "aot_eager", "dynamic": False})
    monkeypatch.setattr(pick, "DEVICES", {**pick.DEVICES, "cpu": made})


ONE_SIZE = {**STEADY, "pad_to_multiple_of": 128, "max_shapes": 1}
COMPILED = {
    "an adapter beside its base": {"algorithm": "dpo", "use_peft": True, "lora_r": 2},
    "completions": {**REWARDED, "cache_implementation": "static"},
}


@pytest.mark.plain
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_run_ends_with_the_weights_of_one_that_is_not_and_its_graphs_are_counted(
    tmp_path,
    files,  # noqa: F811
    name,
):
    chosen = COMPILED[name]
    chosen = asked(files, **chosen) if chosen["algorithm"] == "dpo" else chosen
    plain, graph = (
        runs.made(tmp_path / str(compiles), **chosen, **ONE_SIZE, compile=compiles)
        for compiles in (False, True)
    )
    assert runs.apart(runs.weights(graph), runs.weights(plain)) < ROUNDED
    told = runs.facts(graph)
    modes = 2 if chosen.get("use_peft") else 1  # the reference is the base, without the adapter
    assert (told["graphs"]["forward"], told["graphs"]["most"]) == (modes, modes)
    assert told["graphs"]["backward"] == 1
    assert told["fallbacks"] == 0
    drawing = 2 if chosen["algorithm"] == "grpo" else 0
    assert told["graphs"]["drawing"] == drawing
    assert runs.metrics(graph)[-1].get("compile/drawing", 0) == drawing
    assert told["wall_seconds"]["compiling"] == pytest.approx(told["compile_seconds"])


@pytest.mark.plain
@pytest.mark.usefixtures("traced")
def test_a_compiled_run_under_autocast_is_as_near_to_float32_as_one_that_is_not(tmp_path):
    ways = {"exact": {}, "plain": {"bf16": True}, "graph": {"bf16": True, "compile": True}}
    few = {"batch_size": 3, "max_steps": 2, **ONE_SIZE}
    ended = {name: runs.weights(runs.made(tmp_path / name, **few, **more)) for name, more in ways.items()}
    plain, graph = (runs.apart(ended[name], ended["exact"]) for name in ("plain", "graph"))
    assert 0 < graph <= 2 * plain
    told = runs.facts(tmp_path / "graph")
    assert (told["graphs"]["forward"], told["graphs"]["backward"], told["fallbacks"]) == (1, 1, 0)


LONG = {"token_budget": 20, "pad_to_multiple_of": 8}


@pytest.mark.parametrize("more", [{}, {"dry_run": True}, {"algorithm": "grpo", **PROMPTS}])
def test_a_sample_over_the_budget_is_refused_before_the_model_loads(tmp_path, capsys, monkeypatch, more):
    monkeypatch.setattr("shell.choose.model", None)
    options_ = {**more, **LONG} | ({"token_budget": 4} if more.get("algorithm") == "grpo" else {})
    assert runs.run(tmp_path / "out", **options_) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"error: token_budget is {options_['token_budget']}, and a sample has ")
    assert "max_length" in told


def test_a_sample_over_the_budget_that_a_stream_brings_late_keeps_the_steps_before_it(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("shell.forecast.MAX_TOKENS", 1)
    monkeypatch.setattr("shell.plan.MAX_STEPS", 1)
    rows = [{"text": "ab"}] * 3 + [{"text": "ab" * 30}]
    file = words.write(tmp_path / "rows.jsonl", rows)
    few = {"dataset": file, "dataset_split": "train", "shuffle_dataset": False, "streaming": True}
    assert runs.run(tmp_path / "out", **few, **LONG, batch_size=1, max_steps=4) == 2
    assert "token_budget is 20, and a sample has 6" in capsys.readouterr().err.splitlines()[-1]
    assert runs.steps(tmp_path / "out") == [3]


def test_lengths_are_checked_against_the_budget():
    feed.check_lengths(20, 20)
    with pytest.raises(mistake.Mistake, match="Raise token_budget to 21"):
        feed.check_lengths(21, 20)


def test_the_memory_of_a_static_cache_is_promised(tmp_path, capsys):
    asked_ = {**PROMPTS, "cache_implementation": "static", "dry_run": True}
    assert runs.run(tmp_path / "out", **asked_) == 0
    shown = capsys.readouterr().out
    # Two prompts a step with two completions each; a prompt and its completion fit a chunk of 128 tokens.
    assert "static cache        4 rows of 128 tokens, 0.00 GiB" in shown


def test_static_shapes_draw_what_growing_ones_do_on_the_command_line(tmp_path):
    few = ("--prompt", "abc", "a longer one", "--num_generations", "2", "--max_completion_length", "5")
    said = []
    for name in ("static", "dynamic"):
        file = tmp_path / f"{name}.jsonl"
        assert sample.main(["tiny", *few, "--cache_implementation", name, "--output", str(file)]) == 0
        said.append([json.loads(line)["completion"] for line in file.read_text().splitlines()])
    assert said[0] == said[1]


@pytest.mark.plain
@pytest.mark.usefixtures("traced")
def test_what_cannot_be_drawn_as_a_graph_is_told_in_a_line(tmp_path, capsys, monkeypatch):
    def broken(model, *inputs):
        torch._dynamo.graph_break()

    monkeypatch.setattr(static_cache, "_prefill", broken)
    words_ = ["tiny", "--prompt", "abc", "--cache_implementation", "static", "--compile"]
    assert sample.main(words_) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: compile: model tiny: drawing from a llama model cannot be compiled")
