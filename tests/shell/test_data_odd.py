"""Rows that a careful reader would send back: each is refused in one line that says where and what."""

import itertools
import json
import pathlib

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell import data, encode, feed, mistake, prompts, readers, shares, sources, stream
from tests.shell import words

WORDS = "a b c d e f g h"
HALF = "a \ud800 b"
TALK = [words.user("a"), words.assistant("b")]


def tokenizer():
    made = words.word_tokenizer(WORDS)
    made.chat_template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content or m.tool_calls }} E {% endfor %}"
    )
    return made


def refused(path, row, *told, kind="text", good=None):
    """Assert that a row is refused in one line that names it."""
    prepare = _prompts if kind == "prompts" else words.prepare
    named = {} if kind == "prompts" else {"kind": kind}
    with pytest.raises(mistake.Mistake) as caught:
        prepare(path, [*(good or []), row], tokenizer(), **named)
    line = str(caught.value)
    for part in (*told, f"row {len(good or [])}"):
        assert part in line
    assert "\n" not in line
    assert ".." not in line.replace(str(path), "")


def lines(path, *texts):
    path.write_text("\n".join(texts), encoding="utf-8")
    return [row for source in sources.find(str(path)) for _, row in source.read(0)]


@pytest.mark.parametrize(
    ("kind", "good", "row"),
    [
        ("text", {"text": "a"}, {"text": HALF}),
        ("text", {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": HALF}),
        ("text", {"prompt": "a", "completion": "b"}, {"prompt": "a \ud83d", "completion": "\ude00"}),
        ("text", {"messages": TALK}, {"messages": [words.user(HALF), words.assistant("b")]}),
        ("text", {"messages": TALK, "tools": []}, {"messages": TALK, "tools": [{"name": HALF}]}),
        ("text", {"messages": TALK, "tools": []}, {"messages": TALK, "tools": json.dumps([{"n": HALF}])}),
        ("pairs", {"chosen": "a", "rejected": "b"}, {"chosen": "a", "rejected": HALF}),
        (
            "pairs",
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": HALF, "chosen": "b", "rejected": "c"},
        ),
        (
            "unpaired",
            {"prompt": "a", "completion": "b", "label": 1},
            {"prompt": "a", "completion": HALF, "label": 1},
        ),
        ("prompts", {"prompt": "a"}, {"prompt": HALF}),
        ("prompts", {"prompt": TALK[:1]}, {"prompt": [words.user(HALF)]}),
    ],
)
def test_half_a_surrogate_pair_is_refused_by_row_in_every_format(tmp_path, kind, good, row):
    refused(tmp_path, row, "half of a surrogate pair", "remove it", kind=kind, good=[good])


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0xD800, 0xDFFF), st.text(max_size=5))
def test_a_text_is_encodable_exactly_when_utf_8_can_hold_it(before, half, after):
    assert encode.encodable(before, "row 0") == before
    with pytest.raises(mistake.Mistake, match="row 0: the text holds"):
        encode.encodable(before + chr(half) + after, "row 0")


@given(
    st.recursive(st.none() | st.text(st.sampled_from('[]{}"\\a')), lambda inner: st.lists(inner, max_size=3)),
    st.integers(0, 2 * readers.DEEPEST),
)
def test_rows_nested_deeper_than_the_limit_are_refused_and_others_read(value, depth):
    text = '{"x":' * depth + json.dumps(value) + "}" * depth
    if depth + _levels(value) > readers.DEEPEST:
        with pytest.raises(mistake.Mistake, match="here nests lists and objects more than 100 deep"):
            readers.parsed(text, "here")
    else:
        assert readers.parsed(text, "here") == json.loads(text)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_row_nested_without_measure_is_told_and_not_a_failure_of_the_parser(tmp_path, name):
    deep = '{"text": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    with pytest.raises(mistake.Mistake, match="more than 100 deep"):
        lines(tmp_path / name, '{"text": "a"}', deep)
    with pytest.raises(mistake.Mistake, match=r"row 1 .*column tools nests"):
        words.prepare(
            tmp_path, [{"messages": TALK}, {"messages": TALK, "tools": "[" * 9999 + "]" * 9999}], tokenizer()
        )


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("rows.jsonl", '{"text": "a"}\n\n{"text": "b", "text": "c"}', "line 3: an object has 'text' twice"),
        ("rows.jsonl", '{"text": "a", "m": [{"x": 1, "x": 2}]}', "line 1: an object has 'x' twice"),
        ("rows.json", '[{"text": "a"}, {"m": [{"x": 1, "x": 2}]}]', "row 1 of .*: an object has 'x' twice"),
        ("rows.json", '{"data": [{"text": "a"}], "data": []}', "json: an object has 'data' twice"),
        ("rows.csv", "text,b,text\na,b,c", "line 1: the column 'text' stands twice"),
    ],
)
def test_a_name_that_stands_twice_is_refused_with_its_line_or_row(tmp_path, name, text, told):
    with pytest.raises(mistake.Mistake, match=told):
        lines(tmp_path / name, text)


def test_a_column_of_parquet_that_stands_twice_is_refused(tmp_path):
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(mistake.Mistake, match=r"rows.parquet: the column 'text' stands twice"):
        next(sources.find(str(tmp_path / "rows.parquet"))[0].read(0))


def test_a_damaged_page_of_parquet_is_told_in_one_line(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a b c"] * 100}), path, compression="gzip")
    content = bytearray(path.read_bytes())
    content[4:60] = bytes(56)
    path.write_bytes(content)
    with pytest.raises(mistake.Mistake, match=r"rows.parquet cannot be read as parquet") as caught:
        list(sources.find(str(path))[0].read(0))
    assert not str(caught.value).endswith("..")


def test_a_long_field_of_a_table_is_read_whole(tmp_path):
    (row,) = lines(tmp_path / "rows.csv", "text", "a" * 200_000)
    assert len(row["text"]) == 200_000


@pytest.mark.parametrize("column", ["position_ids", "seq_lengths", "cu_seqlens"])
def test_rows_that_hold_several_sequences_are_refused_by_the_column_that_says_so(tmp_path, column):
    row = {"input_ids": [3, 4, 5], column: [0, 1, 0]}
    refused(tmp_path, row, f"column {column}", "several sequences", good=[{"input_ids": [3, 4]}])


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input_ids": [3, 4, 5], "attention_mask": [1, 0, 1]}, "column attention_mask: zeros stand among"),
        ({"input_ids": [3, 4, 5], "attention_mask": [1, 2, 2]}, "column attention_mask: 2 came; 0 or 1"),
        ({"input_ids": [3, 4, 5], "completion_mask": [0, 0, 7]}, "column completion_mask: 7 came"),
        ({"input_ids": [True, False]}, "column input_ids: true or false came"),
        ({"input_ids": [3, True]}, "column input_ids: true or false came"),
        ({"input_ids": [1, 1], "labels": [1, True]}, "column labels: true or false came"),
    ],
)
def test_ids_and_masks_that_mean_something_else_are_refused(tmp_path, row, told):
    refused(tmp_path, row, told, good=[{"input_ids": [3, 4]}])


@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_padding_at_either_end_is_left_out(left, real, right, boolean):
    mask = [0] * left + [1] * real + [0] * right
    row = {
        "input_ids": list(range(len(mask))),
        "attention_mask": [bool(m) for m in mask] if boolean else mask,
    }
    made = encode.formats.parse(row, "input_ids", where="row 0")
    assert isinstance(made, encode.formats.Ids)
    assert made.tokens.tolist() == list(range(left, left + real))


@pytest.mark.parametrize(
    ("kind", "row", "column"),
    [
        ("text", {"prompt": "a", "completion": None}, "completion"),
        ("text", {"prompt": None, "completion": "b"}, "prompt"),
        ("text", {"prompt": 3, "completion": "b"}, "prompt"),
        ("pairs", {"prompt": "a", "chosen": None, "rejected": "b"}, "chosen"),
        ("pairs", {"chosen": "a", "rejected": None}, "rejected"),
        ("unpaired", {"prompt": "a", "completion": None, "label": 1}, "completion"),
        ("prompts", {"prompt": None}, "prompt"),
    ],
)
def test_a_first_row_without_a_value_is_told_by_its_column_and_not_as_a_conversation(
    tmp_path, kind, row, column
):
    refused(tmp_path, row, f"column {column}", "text or a list of messages", kind=kind)


@pytest.mark.parametrize("margin", [float("nan"), float("inf"), 10**400])
def test_a_margin_that_is_no_finite_number_is_refused(tmp_path, margin):
    row = {"chosen": "a", "rejected": "b", "margin": margin}
    refused(tmp_path, row, "column margin", "finite", kind="pairs")


def test_messages_held_as_lists_of_different_lengths_are_refused(tmp_path):
    row = {"messages": {"role": ["user", "assistant"], "content": ["a"]}}
    refused(tmp_path, row, "column messages: a dict came", good=[{"messages": TALK}])


def test_a_role_that_is_no_text_is_refused(tmp_path):
    refused(tmp_path, {"messages": [{"role": ["user"], "content": "a"}]}, "role ['user'] is unknown")


@given(st.lists(st.floats(1e-300, 1.7e308), min_size=1, max_size=5))
def test_weights_are_parts_of_one_however_large(weights):
    parts = shares.fractions(weights)
    assert np.isfinite(parts).all()
    assert parts.sum() == pytest.approx(1)


@pytest.mark.parametrize("streaming", [False, True])
def test_weights_whose_sum_is_no_number_share_an_epoch(tmp_path, streaming):
    files = [words.write(tmp_path / f"{name}.jsonl", [{"text": name}] * 4) for name in "ab"]
    found = sources.find([{"path": file, "weight": 1.5e308} for file in files], streaming=streaming)
    opened = data.look(found)
    rules = data.rules(opened, tokenizer=tokenizer())
    if streaming:
        drawn = [one.samples[0] for one in itertools.islice(stream.draw(opened, rules, seed=None), 4)]
    else:
        drawn = words.flat(data.prepare(opened, rules, folder=tmp_path / "prepared"))
    assert {int(one.tokens[0]) for one in drawn} == {3, 4}


@pytest.mark.parametrize("weight", [10**400, True, float("nan"), 0])
def test_a_weight_that_is_no_number_above_zero_is_refused(tmp_path, weight):
    file = words.write(tmp_path / "rows.jsonl", [{"text": "a"}])
    with pytest.raises(mistake.Mistake, match=r"weight of .* a number above 0"):
        sources.find([{"path": file, "weight": weight}])


def test_a_dataset_that_the_system_refuses_is_told(tmp_path, monkeypatch):
    with pytest.raises(mistake.Mistake, match=r"dataset: aaa.*\(5006 characters\) cannot be read"):
        sources.find("a" * 5000 + ".jsonl")
    file = words.write(tmp_path / "rows.jsonl", [{"text": "a"}])
    (source,) = sources.find(file)

    def denied(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(pathlib.Path, "open", denied)
    for read in (lambda: sources.find(file), lambda: list(source.read(0))):
        with pytest.raises(mistake.Mistake, match=r"rows.jsonl cannot be read .*Permission denied"):
            read()


def test_a_file_or_saved_dataset_has_no_other_split_than_train(tmp_path):
    file = words.write(tmp_path / "rows.jsonl", [{"text": "a"}] * 3)
    for split in ("test", "test[:2]", "validation"):
        with pytest.raises(mistake.Mistake, match="is a file without splits, and the split"):
            sources.find(file, split=split)
        with pytest.raises(mistake.Mistake, match="without splits"):
            sources.find([{"path": file, "split": split}])
    assert len(list(sources.find(file, split="train[:2]")[0].read(0))) == 2
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(mistake.Mistake, match="is a saved dataset without splits"):
        sources.find(str(tmp_path / "saved"), split="test")


@pytest.mark.parametrize("name", ["test", "test-0", "validation_1", "valid", "dev", "eval", "Test"])
def test_a_folder_leaves_out_what_is_named_as_kept_aside(tmp_path, name):
    words.write(tmp_path / f"{name}.jsonl", [{"text": "z"}])
    with pytest.raises(mistake.Mistake, match=f"no file for the split 'train'; there are {name}.jsonl"):
        sources.find(str(tmp_path))
    words.write(tmp_path / "data.jsonl", [{"text": "a"}])
    words.write(tmp_path / "testimonials.jsonl", [{"text": "b"}])
    (source,) = sources.find(str(tmp_path))
    assert [row["text"] for _, row in source.read(0)] == ["a", "b"]


def test_a_stream_is_known_by_what_is_in_its_files(tmp_path):
    def digest(*rows, name="rows"):
        opened = data.look(sources.find(words.write(tmp_path / f"{name}.jsonl", rows), streaming=True))
        rules = data.rules(opened, tokenizer=tokenizer())
        return feed.Streamed(opened, rules, batch_size=1, seed=None).digest

    first = digest({"text": "a"})
    assert digest({"text": "a"}) == digest({"text": "a"}, name="moved") == first
    assert digest({"text": "b"}) != first


def _prompts(path, rows, tokenizer):
    """Prepare rows as prompts."""
    opened = prompts.look(sources.find(words.write(path / "rows.jsonl", rows)))
    return prompts.prepare(opened, prompts.rules(opened, tokenizer=tokenizer), folder=path / "prepared")


def _levels(value):
    """Return how many lists lie in one another."""
    return 1 + max(map(_levels, value), default=0) if isinstance(value, list) else 0
