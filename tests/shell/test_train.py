"""A run from end to end: what it leaves and what that says."""

import io
import json
import os

import numpy as np
import pytest
import torch
import transformers

from core import algorithms
from shell import api, config, evaluate, loop, progress, tiny
from tests.shell import runs

EVERY = {
    "step", "loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "entropy", "mean_token_accuracy",
    "step_time", "perf/trained_tok_s", "perf/forwarded_tok_s", "batch/packing_ratio", "batch/flop_ratio",
    "batch/row_fill_frac", "batch/row_imbalance", "batch/pad_frac", "peak_memory_gb",
}  # fmt: skip
PLAN = {
    "max_steps": 4, "eval_dataset": "demo", "eval_split": "test[:5]", "save_steps": 2, "price_per_hour": 2
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps over 24 rows, evaluated on 5."""
    return runs.made(tmp_path_factory.mktemp("run") / "out", **PLAN)


@pytest.mark.parametrize("filled", [True, False])
def test_operators_are_deterministic_for_the_run_alone_and_unwritten_memory_is_not_filled(
    filled, monkeypatch
):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", filled)

    def now():
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )

    before = now()
    with loop.deterministic():
        assert now() == (True, False)
    assert now() == before == (False, filled)


def test_the_output_folder_holds_what_is_promised_and_nothing_half_done(run):
    assert sorted(path.name for path in run.iterdir()) == [
        ".lock", "checkpoint-2", "checkpoint-4", "config.yaml", "metrics.jsonl", "model", "prepared",
        "run.json",
    ]  # fmt: skip


def test_every_logged_step_has_the_metrics_of_the_dashboards(run):
    lines = runs.log.read(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line.keys() >= EVERY for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["epoch"] == 1.0
    assert {"eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"} <= lines[-1].keys()


def test_run_json_says_what_was_read_promised_and_reached(run):
    facts = runs.facts(run)
    rows = facts["rows"]["train"]
    assert (rows["read"], rows["used"], rows["samples"], rows["cut_rows"]) == (24, 24, 24, 1)
    assert facts["rows"]["eval"]["used"] == 5
    assert facts["environment"]["packages"]["torch"] == torch.__version__
    promised, reached = facts["promised"], facts["reached"]
    assert promised["steps"] == reached["steps"] == 4
    assert promised["flops"] == reached["flops"]
    assert promised["trained_tokens"] == reached["trained_tokens"] == rows["trained"]
    for name in ("packing_ratio", "flop_ratio", "row_fill_frac", "row_imbalance", "pad_frac"):
        assert promised[name] == pytest.approx(reached[f"batch/{name}"]), name
    assert set(facts["wall_seconds"]) == {"preparing", "loading", "steps", "evaluating", "saving"}
    assert reached["cost_per_million_trained_tokens"] > 0
    assert (facts["finished"], facts["step"]) == (True, 4)


def test_a_token_is_trained_as_often_as_the_rows_say(run):
    assert runs.metrics(run)[-1]["num_tokens"] == runs.facts(run)["rows"]["train"]["tokens"]


def test_the_model_loads_in_transformers_with_the_same_tokenizer_and_tied_weights_once(run):
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    words, ours = transformers.AutoTokenizer.from_pretrained(run / "model"), tiny.tokenizer()
    assert words.chat_template == ours.chat_template
    assert words.special_tokens_map == ours.special_tokens_map
    assert words.get_vocab() == ours.get_vocab()
    talk = [{"role": "user", "content": "Ünïcödé 🙂?\n"}, {"role": "assistant", "content": "1"}]
    assert words.apply_chat_template(talk)["input_ids"] == ours.apply_chat_template(talk)["input_ids"]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    stored = runs.weights(run)
    assert "lm_head.weight" not in stored
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in model.parameters())
    assert model.generation_config.eos_token_id == ours.eos_token_id
    others = [path for path in (run / "model").iterdir() if not os.stat(path).st_mode & 0o004]
    assert not others


def test_the_model_that_is_saved_is_the_one_that_was_evaluated(run, capsys):
    code = evaluate.main(
        [str(run / "model"), "--dataset", "demo", "--dataset_split", "test[:5]", "--max_length", "64"]
    )
    found = json.loads(capsys.readouterr().out)
    last = runs.metrics(run)[-1]
    assert code == 0
    assert found == {name: pytest.approx(last[name], rel=1e-6) for name in found}
    assert {"eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"} == found.keys()


def test_config_yaml_read_back_gives_the_same_options(run):
    written = config.parse(["sft", "--config", str(run / "config.yaml")])
    asked = config.parse(
        runs.words(
            run, max_steps=4, eval_dataset="demo", eval_split="test[:5]", save_steps=2, price_per_hour=2
        )
    )
    assert written.options == asked.options


def test_a_dry_run_prints_the_figures_of_run_json_and_writes_nothing(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert runs.run(tmp_path / "out", max_steps=4, dry_run=True, price_per_hour=2) == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if " " in line)
    promised = runs.facts(run)["promised"]
    assert list(tmp_path.iterdir()) == []
    assert printed["steps"] == str(promised["steps"])
    assert printed["trained"] == f"tokens      {promised['trained_tokens']}"
    assert printed["largest"] == f"pack        {promised['largest_pack']} unique tokens"
    assert printed["packing"].startswith(f"ratio       {promised['packing_ratio']:.2f}")
    assert "a million trained tokens" in printed["cost"]


def test_a_dry_run_needs_no_output_folder_and_loads_no_model(monkeypatch, capsys):
    def never(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("shell.choose.model", never)
    assert runs.train.main(["sft", *runs.SMALL, "--dry_run"]) == 0
    assert "peak memory" in capsys.readouterr().out


def test_from_python_and_from_a_module_the_same_algorithm_gives_the_same_weights(tmp_path, monkeypatch):
    (tmp_path / "my_rules.py").write_text("from core import algorithms\n\nmine = algorithms.sft.evolve()\n")
    monkeypatch.chdir(tmp_path)
    first = runs.weights(runs.made(tmp_path / "named", max_steps=2))
    command = runs.words(tmp_path / "module", max_steps=2)
    assert runs.train.main(["my_rules:mine", *command[1:]]) == 0
    options = dict(zip(runs.SMALL[::2], runs.SMALL[1::2], strict=True))
    given = {name.removeprefix("--"): value for name, value in options.items()}
    folder = api.train(algorithms.sft, **given, max_steps=2, output_dir=str(tmp_path / "python"))
    for other in (tmp_path / "module", folder):
        assert runs.apart(runs.weights(other), first) == 0.0


def test_the_data_seed_changes_the_order_alone_and_the_seed_the_weights_alone(tmp_path):
    def first(name, **options):
        folder = runs.made(tmp_path / name, max_steps=1, **options)
        place = [int(n) for n in np.load(next((folder / "prepared").glob("*/starts.npy")))]
        tokens = np.fromfile(next((folder / "prepared").glob("*/tokens.bin")), np.int32)
        return folder, (place, tokens.tolist())

    base, prepared = first("base", seed=1, data_seed=1)
    order, also = first("order", seed=1, data_seed=2)
    drawn, again = first("drawn", seed=2, data_seed=1)
    tokens = [runs.metrics(folder)[0]["num_tokens"] for folder in (base, order, drawn)]
    assert prepared == also == again
    assert tokens[0] == tokens[2] != tokens[1]
    start = runs.words(tmp_path, max_steps=1)
    assert [_drawn(seed, data, start) for seed, data in ((1, 1), (1, 2))] == [_drawn(1, 1, start)] * 2
    assert _drawn(2, 1, start) != _drawn(1, 1, start)


def _drawn(seed, data, start):
    """Return the first weight that the model begins with."""
    from adapters import pick
    from shell import choose

    chosen = config.parse([*start, "--seed", str(seed), "--data_seed", str(data)]).options
    _, params = choose.model(chosen, pick.device("cpu"))
    return float(next(iter(params.values())).flatten()[0])


def test_rows_longer_than_the_model_are_told_and_nothing_of_a_libraries_noise_is_shown(tmp_path):
    runs.made(tmp_path / "first", max_steps=1)
    command = runs.words(tmp_path / "out", max_steps=1, model=tmp_path / "first" / "model")
    code, out, err = runs.done(runs.start("-m", "shell.train", *command))
    lines = err.splitlines()
    assert (code, out) == (0, "")
    assert [line.partition(" ")[0] for line in lines] == ["1", "sft", "step", "done:"], err


def test_a_long_tokenization_says_how_far_it_is_now_and_then():
    seconds = iter([1.0, 6.0, 7.0, 11.5])
    shown = io.StringIO()
    display = progress.Display(stream=shown, clock=lambda: next(seconds))
    for read in (1000, 2000, 3000, 4000):
        display.rows(read)
    assert shown.getvalue() == "2,000 rows tokenized\n4,000 rows tokenized\n"


def test_a_run_tells_of_its_tokenization(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shell.progress.EVERY", 0.0)
    runs.made(tmp_path / "out", max_steps=1)
    assert "24 rows tokenized" in capsys.readouterr().err
