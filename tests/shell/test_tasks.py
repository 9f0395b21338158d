"""Tasks by name, and prompts prepared from rows."""

import json

import numpy as np
import pytest

from shell import mistake, prompts, rewards, sources, tasks, tiny


def prepared(tmp_path, rows, *, limit=None):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    opened = prompts.look(sources.find(str(path)))
    return prompts.prepare(
        opened, prompts.rules(opened, tokenizer=tiny.tokenizer(), limit=limit), folder=tmp_path / "kept"
    )


@pytest.mark.parametrize("path", ["task:letters", "reasoning_gym:chain_sum"])
def test_no_prompt_of_a_task_is_in_both_splits_whatever_the_seed(path):
    if path.startswith("reasoning_gym"):
        pytest.importorskip("reasoning_gym")
    texts = {
        split: {
            row["prompt"][0]["content"]
            for seed in (0, 1)
            for row in tasks.rows(path, split, {"size": 300, "seed": seed})
        }
        for split in tasks.SPLITS
    }
    assert texts["train"]
    assert texts["test"]
    assert not texts["train"] & texts["test"]


def test_a_task_gives_no_prompt_twice_and_the_same_prompts_again():
    made = tasks.rows("task:letters", "train", {"size": 2000})
    texts = [row["prompt"][0]["content"] for row in made]
    assert len(set(texts)) == len(texts)
    assert made == tasks.rows("task:letters", "train", {"size": 2000})


def test_the_score_of_a_built_in_task_is_1_for_its_answer():
    made = tasks.rows("task:letters", "test", {"size": 500})
    score = tasks.scores(["task:letters"])["letters"]
    answers = rewards.Answers(
        prompts=[row["prompt"] for row in made],
        completions=[row["completion"] for row in made],
        completion_ids=[[]] * len(made),
        columns={"answer": [row["answer"] for row in made]},
    )
    found = rewards.score(rewards.find([score]), answers, rewards.State(global_step=0, max_steps=1))
    assert (found.parts == 1).all()


def test_a_task_of_the_package_is_scored_by_the_package():
    pytest.importorskip("reasoning_gym")
    row = tasks.rows("reasoning_gym:chain_sum", "train", {"size": 20, "min_terms": 2, "max_terms": 2})[0]
    said = [row["answer"], f"<think>1</think><answer> {row['answer']} </answer>", "no idea"]
    columns = [[row[name]] * 3 for name in ("question", "answer", "metadata")]
    assert tasks.gym_score(said, *columns) == [1.0, 1.0, 0.0]


def test_the_package_is_asked_for_by_name_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(mistake.Mistake, match="pip install reasoning-gym"):
        sources.find("reasoning_gym:chain_sum")


@pytest.mark.parametrize(
    ("path", "split", "settings", "told"),
    [
        ("task:leters", "train", None, "Did you mean letters?"),
        ("task:letters", "dev", None, "no split 'dev'; it has train and test"),
        ("task:letters", "train", {"digits": 3}, "'digits' came; task:letters takes size and seed"),
        ("task:letters", "train", {"size": "many"}, "size is 'many'; a whole number was wanted"),
    ],
)
def test_a_task_that_does_not_exist_is_refused(path, split, settings, told):
    with pytest.raises(mistake.Mistake) as caught:
        sources.find(path, split=split, task_options=settings)
    assert told in str(caught.value)


def test_settings_that_a_task_of_the_package_does_not_take_are_told():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(mistake.Mistake, match="unexpected keyword argument 'min_tems'"):
        tasks.rows("reasoning_gym:chain_sum", "train", {"min_tems": 2})
    with pytest.raises(mistake.Mistake, match="Did you mean reasoning_gym:chain_sum"):
        tasks.rows("reasoning_gym:chain_sums", "train")


def test_prompts_of_messages_end_where_the_assistant_begins_and_keep_their_columns(tmp_path):
    row = {"prompt": [{"role": "user", "content": "Hi"}], "answer": "é", "more": {"a": [1, None]}}
    kept = prepared(tmp_path, [row, {**row, "answer": None}])
    tokenizer = tiny.tokenizer()
    assert tokenizer.decode(kept.row(0).tokens) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert kept.row(0).columns == row
    assert kept.row(1).columns["answer"] is None
    assert len(kept) == 2
    assert kept.counts.used == 2


def test_prompts_of_text_are_encoded_as_they_are(tmp_path):
    kept = prepared(tmp_path, [{"prompt": "2 + 2 ="}])
    np.testing.assert_array_equal(kept.row(0).tokens, list(b"2 + 2 ="))


def test_long_and_empty_prompts_are_left_out_and_counted(tmp_path):
    kept = prepared(tmp_path, [{"prompt": "abcdef"}, {"prompt": ""}, {"prompt": "ab"}], limit=5)
    assert len(kept) == 1
    assert kept.counts.read == 3
    assert sum(kept.counts.dropped.values()) == 2
    assert kept.row(0).columns == {"prompt": "ab"}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"question": "a"}], "the columns are question; wanted is prompt"),
        ([{"prompt": []}], "row 0 .*column prompt: the list of messages is empty"),
        ([{"prompt": "abcdef"}], "leaves no prompt .1 rows: the prompt has more than 5 tokens"),
        (
            [{"prompt": [{"role": "assistant", "content": "a"}]}],
            "row 0 .*the last message is the assistant's",
        ),
        ([{"prompt": [{"role": "user", "content": "a"}]}, {"prompt": "a"}], "row 1 .*text came"),
    ],
)
def test_rows_that_are_no_prompts_are_named(tmp_path, rows, told):
    with pytest.raises(mistake.Mistake, match=told):
        prepared(tmp_path, rows, limit=5)
