"""Completions from the command line: what is printed and written, and what is refused."""

import json
import pathlib

import pytest

import shell.main
from shell import sample
from tests.shell import runs

SHORT = ("--max_completion_length", "6")


def run(*words):
    return sample.main(["tiny", *words])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that was shown answers for a moment, with its template."""
    folder = tmp_path_factory.mktemp("trained") / "out"
    return runs.made(folder, dataset="task:letters", max_steps=30, batch_size=32, learning_rate="3e-3")


def test_one_completion_is_printed_as_it_is(capsys, tmp_path):
    assert run("--prompt", "abc", *SHORT, "--output", str(tmp_path / "said.jsonl")) == 0
    (one,) = lines(tmp_path / "said.jsonl")
    assert capsys.readouterr().out == one["completion"] + "\n"
    assert one.keys() == {"prompt", "completion", "logprob", "tokens", "ended"}
    assert one["prompt"] == [{"role": "user", "content": "abc"}]
    assert one["tokens"] <= 6
    assert one["logprob"] < 0


def test_several_are_told_apart_and_drawn_apart(capsys, tmp_path):
    words = ("--prompt", "abc", "def", "--num_generations", "3", *SHORT)
    assert run(*words, "--output", str(tmp_path / "said.jsonl")) == 0
    shown = capsys.readouterr().out
    assert "--- prompt 1: abc" in shown
    assert "--- prompt 2: def" in shown
    assert shown.count("of 3, log-probability -") == 6
    assert len({one["completion"] for one in lines(tmp_path / "said.jsonl")}) == 6


def test_the_seed_names_the_draws_and_the_likeliest_tokens_have_none(capsys, tmp_path):
    def said(name, *words):
        assert run("--prompt", "abc", *SHORT, "--output", str(tmp_path / name), *words) == 0
        return lines(tmp_path / name)[0]["completion"]

    assert said("a.jsonl") == said("b.jsonl") != said("c.jsonl", "--seed", "7")
    greedy = said("d.jsonl", "--temperature", "0")
    assert greedy == said("e.jsonl", "--temperature", "0", "--seed", "7")
    assert greedy == said("f.jsonl", "--top_k", "1")


def test_other_prompts_beside_one_change_nothing_of_it(tmp_path):
    (tmp_path / "prompts.txt").write_text("abc\n\nfed\n")
    for name, words in {
        "alone": ("--prompt", "abc"),
        "both": ("--prompts", str(tmp_path / "prompts.txt")),
    }.items():
        assert run(*words, *SHORT, "--output", str(tmp_path / f"{name}.jsonl")) == 0
    alone, both = (lines(tmp_path / f"{name}.jsonl") for name in ("alone", "both"))
    assert len(both) == 2
    assert both[0] == {**alone[0], "logprob": pytest.approx(alone[0]["logprob"], rel=1e-6)}


def test_a_raw_text_is_continued_without_the_template(tmp_path):
    assert run("--prompt", "abc", "--raw", *SHORT, "--output", str(tmp_path / "said.jsonl")) == 0
    assert lines(tmp_path / "said.jsonl")[0]["prompt"] == "abc"


def test_what_was_trained_answers_through_its_template(capsys, trained, tmp_path):
    greedy = ("--temperature", "0", *SHORT)
    answers = {"from the model": (str(trained / "model"),), "from a checkpoint": ("tiny", "--init_from")}
    answers["from a checkpoint"] += (str(trained / "checkpoint-30"),)
    said = {}
    for how, words in answers.items():
        path = tmp_path / f"{len(said)}.jsonl"
        assert sample.main([*words, "--prompt", "abc", *greedy, "--output", str(path)]) == 0
        said[how] = lines(path)[0]
    one, other = said.values()
    assert one == {**other, "logprob": pytest.approx(other["logprob"], rel=1e-6)}
    assert one["ended"]
    assert len(one["completion"]) == 3


def test_rows_of_a_task_are_completed_and_a_file_of_a_run_serves(capsys, trained, tmp_path):
    words = ("--config", str(trained / "config.yaml"), "--dataset_split", "test[:4]", *SHORT)
    assert sample.main([str(trained / "model"), *words, "--output", str(tmp_path / "said.jsonl")]) == 0
    assert len(lines(tmp_path / "said.jsonl")) == 4
    told = capsys.readouterr().err
    assert "sampling does not read" in told
    assert "learning_rate" in told


@pytest.mark.parametrize("more", [{}, {"use_peft": True, "lora_r": 2}], ids=["whole", "adapter"])
def test_the_file_of_a_run_that_began_from_other_weights_serves_those_that_it_left(
    trained, tmp_path, monkeypatch, more
):
    few = {"dataset": "task:letters", "max_steps": 1, "learning_rate": 1, **more}
    first = runs.made(tmp_path / "first", **few) if more else trained
    run = runs.made(tmp_path / "out", **few, init_from=first / "model")
    said, models = [], []
    monkeypatch.setattr("shell.completing.complete", lambda asked, folder: said.append(asked) or 0)
    for file in ((), ("--config", str(run / "config.yaml"))):
        words = (str(run / "model"), "--prompt", "abc", *file)
        assert sample.main([*words]) == 0
        chosen = said[-1].command.options
        models.append((chosen.model, chosen.init_from, chosen.use_peft, said[-1].texts))
        assert pathlib.Path(str(chosen.dataset)).name == "rows.jsonl"
    assert models[0] == models[1]
    started = str(run / "model")
    assert models[0][:2] == (str(run / "base"), started) if more else (started, None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no MODEL came first"),
        (["--prompt", "x"], "no MODEL came first"),
        (["tiny"], "nothing came; one of --prompt TEXT"),
        (["tiny", "--prompt", "x", "--dataset", "demo"], "--prompt and --dataset came"),
        (["tiny", "--prompt"], "--prompt: nothing came; a text was wanted"),
        (["tiny", "--prompts", "no/such.txt"], "no/such.txt cannot be read"),
        (["tiny", "--prompt", "x", "--temprature", "1"], "Did you mean temperature?"),
        (["tiny", "--prompt", "x", "--learning_rate", "1"], "sampling does not read learning_rate"),
        (["tiny", "--prompt", "x", "--temperature", "-1"], "at least 0.0001 was wanted"),
        (["tiny", "--prompt", "x", "--top_p", "2"], "at most 1 was wanted"),
        (["tiny", "--prompt", "x", "--num_generations", "0"], "at least 1 and at most 65536 was wanted"),
        (["tiny", "--prompt", "x", "--output", "out.txt"], "a .jsonl file was wanted"),
        (["tiny", "--prompt", "x", "--output", "no/such/out.jsonl"], "there is no folder no/such"),
        (["tiny", "--prompt", "x", "--raw", "perhaps"], "true or false was wanted"),
        (["tiny", "--prompt", "x", "--max_completion_length", "4000"], "have room for 2048 tokens"),
        (["tiny", "--dataset", "demo"], "wanted is prompt"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(capsys, words, told):
    assert sample.main(words) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_a_file_that_is_there_is_not_written_over(capsys, tmp_path):
    (tmp_path / "said.jsonl").write_text("mine")
    assert run("--prompt", "x", "--output", str(tmp_path / "said.jsonl")) == 2
    assert "it is there already" in capsys.readouterr().err
    assert (tmp_path / "said.jsonl").read_text() == "mine"


def test_a_mistake_is_told_before_torch_is_loaded():
    code = (
        "import sys; from shell import sample;"
        "assert sample.main(['tiny', '--prompt', 'x', '--seed', 'y']) == 2;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    status, _, err = runs.done(runs.start("-c", code))
    assert status == 0, err


def test_the_console_command_knows_it(capsys):
    assert shell.main.main(["sample", "--help"]) == 0
    assert "--temperature 0" in capsys.readouterr().out
