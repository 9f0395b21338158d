"""What callers bring: their losses and columns, and what is said, and kept, when their code fails."""

import json

import pytest

from core import algorithms, check, reduce
from shell import api, carried, log, mistake, own
from tests.shell import runs, words

HERE = __name__
ROWS = [{"text": f"row number {place}", "weight": place % 3, "note": "n"} for place in range(12)]
calls = []


def weighted_nll(scores, batch):
    return -batch.weight * scores.logprobs, {"weight": batch.samples.weight}


def failing(scores, batch):
    if len(calls) == 2:
        raise ValueError("the third call\nis one too many.")
    calls.append(1)
    return -scores.logprobs, {}


def misspelled(scores, batch):
    return -batch.wieght * scores.logprobs, {}


def summed(scores, batch):
    return -scores.logprobs.sum(), {}


def one_sided(scores, batch):
    return batch.pairs.chosen.to(scores.logprobs.dtype) * 0 + scores.logprobs.sum() * batch.samples.weight[
        0
    ], {}


def forgetful(carry, means):
    raise KeyError("nothing is remembered")


weighted = algorithms.sft.evolve(loss=weighted_nll, needs=("weight",), watches=())
late = algorithms.sft.evolve(loss=failing, watches=())
lacking = weighted.evolve(loss=misspelled, needs=())
strange = weighted.evolve(needs=("wieght",))
wrong = algorithms.sft.evolve(loss=summed, watches=())
pairs = algorithms.dpo.evolve(loss=one_sided, needs=("weight",), watches=())
remembering = algorithms.sft.evolve(next_carry=forgetful)
answering = algorithms.grpo.evolve(
    loss=lambda scores, batch: (-batch.weight * batch.advantage * scores.logprobs, {"weight": batch.weight}),
    needs=("weight",),
)


@pytest.fixture
def file(tmp_path):
    return words.write(tmp_path / "rows.jsonl", ROWS)


def asked(file, name, **more):
    few = {
        "dataset": file,
        "dataset_split": "train",
        "batch_size": 4,
        "max_steps": 3,
        "shuffle_dataset": False,
    }
    return {"algorithm": f"{HERE}:{name}", **few, **more}


def said(capsys):
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_of_the_rows_reaches_the_loss_that_needs_it(tmp_path, file, streaming):
    folder = runs.made(tmp_path / "out", **asked(file, "weighted", streaming=streaming))
    lines = log.read(folder / "metrics.jsonl")
    assert [line["weight"] for line in lines] == pytest.approx([3 / 4, 4 / 4, 5 / 4])
    same = [{**row, "weight": 0.0} for row in ROWS]
    flat = asked(words.write(tmp_path / "flat.jsonl", same), "weighted", max_steps=1)
    assert log.read(runs.made(tmp_path / "flat", **flat) / "metrics.jsonl")[0]["loss"] == 0.0


def test_a_column_is_carried_by_both_sides_of_a_pair_and_by_pieces_of_a_text(tmp_path):
    pair = {"prompt": "q", "chosen": "yes", "rejected": "no", "weight": True, "margin": 0.5}
    (tmp_path / "pairs").mkdir()
    sides = words.prepare(
        tmp_path / "pairs", [pair], words.word_tokenizer("q yes no"), "pairs", columns=("weight",)
    )
    assert [s.columns for s in sides.samples(0)] == [{"weight": 1.0, "margin": 0.5}] * 2
    text = {"text": "q yes no q yes no", "weight": 2.5}
    split = {"max_length": 3, "truncation": "split", "columns": ("weight",)}
    pieces = words.prepare(tmp_path, [text], words.word_tokenizer("q yes no"), **split)
    assert len(pieces) > 1
    assert {s.columns["weight"] for row in range(len(pieces)) for s in pieces.samples(row)} == {2.5}


def test_a_column_of_a_prompt_reaches_the_loss_of_its_completions(tmp_path):
    rows = [{"prompt": f"say {place}", "weight": place} for place in range(4)]
    few = {"batch_size": 4, "num_generations": 2, "max_completion_length": 3, "reward_funcs": "length"}
    chosen = asked(words.write(tmp_path / "prompts.jsonl", rows), "answering", max_length="null", **few)
    folder = runs.made(tmp_path / "out", **(chosen | {"max_steps": 2}))
    found = [line["weight"] for line in log.read(folder / "metrics.jsonl")]
    assert 0 < found[0] < 1
    assert 2 < found[1] < 3


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"text": "a", "weight": "much"}, "column weight: the text 'much' came; a number is wanted"),
        ({"text": "a"}, "column weight: nothing (null or no such column) came; a number is wanted"),
        ({"text": "a", "weight": 10**400}, "a finite number is wanted"),
    ],
)
def test_a_row_without_its_number_is_named(tmp_path, capsys, row, told):
    file = words.write(tmp_path / "rows.jsonl", [*ROWS[:3], row])
    assert runs.run(tmp_path / "out", **asked(file, "weighted")) == 2
    line = said(capsys)[-1]
    assert told in line
    assert "row 3" in line


def test_a_column_that_is_not_there_is_refused_with_the_nearest_that_is(tmp_path, capsys, file):
    assert runs.run(tmp_path / "out", **asked(file, "strange")) == 2
    line = said(capsys)[-1]
    assert "the algorithm needs 'wieght', which is no column there (text, weight, note)" in line
    assert "Did you mean weight?" in line
    with pytest.raises(mistake.Mistake, match=r"Did you mean entropies\?"):
        carried.check(["entropie"], ["text"], "text", where="rows.jsonl")
    carried.check(["label"], ["messages"], "unpaired", where="rows.jsonl")
    carried.check(["margin"], ["chosen", "rejected"], "pairs", where="rows.jsonl")


def test_properties_are_checked_with_a_number_a_sample_for_such_a_column():
    check.check(weighted, seeds=range(2))
    assert {s.columns["weight"] for s in check.draw(weighted, 0)} != {0.0}


def test_a_loss_that_fails_ends_the_run_in_a_line_and_keeps_the_steps_before_it(tmp_path, capsys, file):
    calls.clear()
    assert runs.run(tmp_path / "out", **asked(file, "late", logging_steps=10)) == 2
    lines = said(capsys)
    assert lines[-1].startswith(
        "error: loss failing failed: ValueError: the third call is one too many (test_own.py"
    )
    assert "checkpoint-2 holds the steps until here" in lines
    assert runs.steps(tmp_path / "out") == [2]
    calls.clear()
    runs.made(tmp_path / "out", **asked(file, "late", max_steps=3, logging_steps=10))
    calls.clear()
    calls.append(-1)
    runs.made(tmp_path / "half", **asked(file, "late", max_steps=1))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("lacking", "loss misspelled failed: AttributeError: the batch has no column 'wieght'; it has"),
        ("wrong", f"algorithm {HERE}:wrong: the loss returned values of shape ()"),
        ("remembering", "next_carry forgetful failed: KeyError: 'nothing is remembered' (test_own.py, line"),
    ],
)
def test_what_is_wrong_with_an_algorithm_is_told_in_a_line(tmp_path, capsys, file, name, told):
    assert runs.run(tmp_path / "out", **asked(file, name)) == 2
    line = said(capsys)[-1]
    assert line.startswith(f"error: {told}")
    assert runs.steps(tmp_path / "out") == []


def test_a_failure_of_ours_stays_a_failure(tmp_path, monkeypatch):
    def broken(*args, **more):
        raise ValueError("ours")

    monkeypatch.setattr("core.steps.loss_and_grad", broken)
    with pytest.raises(ValueError, match="ours"):
        runs.run(tmp_path / "out", max_steps=1)


def test_an_algorithm_from_python_is_told_alike(tmp_path, file):
    few = {"model": "tiny", "dataset": file, "max_steps": 1, "output_dir": tmp_path / "out"}
    with pytest.raises(mistake.Mistake, match="loss misspelled failed"):
        api.train(lacking, **few)


def test_the_place_is_the_callers_own_line_though_a_library_raised():
    def loss(scores, batch):
        return json.loads("{")

    guarded = own.guarded("loss mine", loss)
    with pytest.raises(mistake.Mistake, match=r"JSONDecodeError: Expecting .* \(test_own.py, line \d+\)"):
        guarded(None, None)
    assert own.guarded("loss mine", loss).__wrapped__ is loss


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rows": "images"}, "rows is images; text or pairs or unpaired or prompts was wanted"),
        ({"watches": ("entropie",)}, "watches is entropie; of logprobs, entropies"),
        ({"columns": lambda rewards, groups: {}}, "columns is a function; None was wanted"),
        ({"needs": ("values", "entropies")}, "values alone were wanted"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_its_field(changes, told):
    with pytest.raises(mistake.Mistake) as caught:
        own.checked(algorithms.sft.evolve(**{"watches": (), **changes}), "my:own")
    assert told in str(caught.value)


def test_groups_that_do_not_fit_a_step_are_refused_though_nobody_asked_for_groups(tmp_path, capsys):
    few = {"dataset": "task:letters", "dataset_split": "train[:4]", "max_length": "null", "batch_size": 4}
    assert runs.run(tmp_path / "out", algorithm=f"{HERE}:answering", **few) == 2
    assert "batch_size: 4 completions a step came, and 8 of a prompt (num_generations)" in said(capsys)[-1]


def test_what_is_known_of_an_algorithm_stays_known():
    plain = own.checked(algorithms.sft)
    assert plain.linear
    assert plain.reduce.__wrapped__ is reduce.token_mean
    assert own.columns(weighted) == ("weight",)
    assert own.columns(algorithms.kto) == ()
    for name in ("sft", "dpo", "kto", "reward", "grpo"):
        assert own.kin(getattr(algorithms, name)) == name
