"""Where rows come from, and what is said when they cannot be read."""

import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from datasets import config, exceptions

from shell import data, demo, mistake, sources, tiny
from tests.shell import words

ROWS = [{"text": "a b"}, {"text": "c"}, {"text": "d e f"}]


def read(dataset, **options):
    return [dict(row) for source in sources.find(dataset, **options) for _, row in source.read(0)]


@pytest.fixture(
    params=["jsonl", "json", "json lines", "data field", "parquet", "csv", "folder", "saved", "saved splits"]
)
def dataset(request, tmp_path):
    """The same rows, in each way in which they may lie on a disk."""
    kind, path = request.param, tmp_path / "rows"
    if kind == "jsonl":
        return words.write(path.with_suffix(".jsonl"), ROWS)
    if kind.startswith("saved"):
        made = datasets.Dataset.from_list(ROWS)
        whole = datasets.DatasetDict({"train": made}) if kind == "saved splits" else made
        whole.save_to_disk(str(path))
        return str(path)
    if kind == "folder":
        path.mkdir()
        words.write(path / "train-0.jsonl", ROWS[:1])
        words.write(path / "train-1.jsonl", ROWS[1:])
        words.write(path / "test.jsonl", [{"text": "z"}])
        return str(path)
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path.with_suffix(".parquet"))
        return str(path.with_suffix(".parquet"))
    texts = {
        "json": json.dumps(ROWS, indent=1),
        "json lines": "\n\n".join(map(json.dumps, ROWS)),
        "data field": json.dumps({"data": ROWS}),
        "csv": "text\na b\nc\n" + '"d e f"\n',
    }
    path = path.with_suffix(".csv" if kind == "csv" else ".json")
    path.write_text(texts[kind], encoding="utf-8-sig")
    return str(path)


def test_rows_are_the_same_however_they_are_kept(dataset):
    assert read(dataset) == ROWS
    (source,) = sources.find(dataset)
    assert [row for _, row in source.read(2)] == ROWS[2:]
    assert [row for _, row in source.read(3)] == []
    assert source.fingerprint == sources.find(dataset)[0].fingerprint


def test_a_slice_of_a_split_takes_those_rows(dataset):
    assert read(dataset, split="train[1:]") == ROWS[1:]
    assert read(dataset, split="train[:2]") == ROWS[:2]
    (source,) = sources.find(dataset, split="train[1:2]")
    assert [row for _, row in source.read(1)] == []
    assert source.fingerprint != sources.find(dataset)[0].fingerprint
    with pytest.raises(mistake.Mistake, match="train\\[10:20\\]"):
        sources.find(dataset, split="train[:a]")


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        ("train[:50%]", ROWS[:2]),  # 1.5 rows: to the nearest even one, as in datasets
        ("train[:10%]", []),
        ("train[34%:]", ROWS[1:]),
        ("train[33%:67%]", ROWS[1:2]),
        ("train[-1:]", ROWS[2:]),
        ("train[:-1]", ROWS[:2]),
        ("train[-34%:]", ROWS[2:]),
        ("train[-9:2]", ROWS[:2]),
    ],
)
def test_a_slice_of_a_split_may_be_in_percent_and_count_from_the_end(dataset, split, wanted):
    assert read(dataset, split=split) == wanted
    made = datasets.Dataset.from_list(ROWS)
    if "%" in split:
        instruction = datasets.ReadInstruction.from_spec(split)
        (found,) = instruction.to_absolute({"train": len(made)})
        assert ROWS[found.from_ : found.to] == wanted


def test_the_split_of_a_folder_is_told_by_the_names_of_its_files(tmp_path):
    words.write(tmp_path / "train.jsonl", ROWS)
    words.write(tmp_path / "test_0.jsonl", ROWS[:1])
    assert read(str(tmp_path), split="test") == ROWS[:1]
    with pytest.raises(
        mistake.Mistake, match=r"no file .* begins with the split's name 'dev'; there are test_0.jsonl"
    ):
        sources.find(str(tmp_path), split="dev")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("rows.jsonl", b'{"text": "a"}\n' * 16 + b'{"text": \n', "rows.jsonl, line 17 is not JSON"),
        ("rows.jsonl", b'{"text": "a"}\n\n{"text": "\xff"}\n', "rows.jsonl, line 3 is not UTF-8"),
        ("rows.jsonl", b'{"text": "a"}\n[1]\n', r"row 1 \(line 2 of .*rows.jsonl\) is a list"),
        ("rows.json", b'[{"text": "a"},]', "rows.json is not JSON"),
        ("rows.json", b'"a"', "rows.json holds a str"),
        ("rows.csv", b"text,b\na,1\nb\n", "rows.csv, line 3, has more or fewer columns"),
        ("rows.parquet", b"PAR1", "rows.parquet cannot be read as parquet"),
        ("rows.txt", b"a", r"rows.txt ends in .txt; wanted is one of .jsonl"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line_with_file_and_line(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(mistake.Mistake, match=told) as caught:
        read(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_told_with_the_nearest_name(tmp_path):
    words.write(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(
        mistake.Mistake, match=r"no file or folder .*trian.jsonl; did you mean .*train.jsonl\."
    ):
        sources.find(str(tmp_path / "trian.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(mistake.Mistake, match="holds no file"):
        sources.find(str(tmp_path / "empty"))


def test_a_name_of_the_hub_is_loaded_from_there(monkeypatch):
    asked = {}

    def load(path, config, *, split, streaming):
        asked.update(path=path, config=config, split=split, streaming=streaming)
        made = datasets.Dataset.from_list(ROWS)
        return made.to_iterable_dataset() if streaming else made

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(sources, "_reached", lambda _: True)
    assert read("some/rows", config="plain", split="dev[:10%]") == ROWS
    assert asked == {"path": "some/rows", "config": "plain", "split": "dev[:10%]", "streaming": False}
    (source,) = sources.find("some/rows", streaming=True)
    assert [row for _, row in source.read(1)] == ROWS[1:]


def test_a_name_that_the_hub_refuses_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", False)

    def load(*_, **__):
        raise exceptions.DatasetNotFoundError("Dataset 'some/rows'\ndoesn't exist")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(sources, "_reached", lambda _: False)
    with pytest.raises(
        mistake.Mistake, match=r"'some/rows' is no file or folder here .* doesn't exist"
    ) as caught:
        sources.find("some/rows")
    assert "\n" not in str(caught.value)
    assert config.HF_HUB_OFFLINE is False


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        ([], "empty list"),
        ([{"path": "demo", "weight": 1}, "demo"], "some of the entries have a weight"),
        ([{"path": "demo", "weight": 0}], "weight of demo is 0"),
        ([{"file": "demo"}], "neither a path nor a mapping"),
    ],
)
def test_a_list_that_is_not_as_described_is_refused(dataset, told):
    with pytest.raises(mistake.Mistake, match=told):
        sources.find(dataset)


def test_several_sources_are_joined_and_each_may_have_its_own_format(tmp_path):
    first = words.write(tmp_path / "first.jsonl", [{"text": "a"}])
    second = words.write(tmp_path / "second.jsonl", [{"prompt": "a", "completion": "b"}] * 2)
    opened = data.look(sources.find([first, {"path": second}]))
    prepared = data.prepare(
        opened, data.rules(opened, tokenizer=tiny.tokenizer()), folder=tmp_path / "prepared"
    )
    assert [(part.name, part.start, part.stop) for part in prepared.parts] == [(first, 0, 1), (second, 1, 3)]
    assert [one.trained.sum() for one in words.flat(prepared)] == [1, 2, 2]


@pytest.mark.parametrize("kept", ["parquet", "saved", "jsonl"])
def test_schemas_of_tools_bring_no_nulls_and_no_foreign_parameter(tmp_path, kept):
    def tool(name, parameter):
        inner = {"type": "object", "properties": {parameter: {"type": "string"}}}
        return {"name": name, "parameters": {"type": "object", "properties": {"where": inner}}}

    rows = [
        {
            "messages": [
                words.user("x"),
                words.assistant(None, tool_calls=[words.call(name, **{parameter: "v"})]),
            ],
            "tools": [tool(name, parameter)],
        }
        for name, parameter in (("first", "aaa"), ("second", "bbb"))
    ]
    path = str(tmp_path / f"rows.{kept}")
    if kept == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kept == "saved":
        datasets.Dataset(pyarrow.Table.from_pylist(rows)).save_to_disk(path)
    else:
        union = pyarrow.Table.from_pylist(rows).to_pylist()
        assert union[0]["tools"][0]["parameters"]["properties"]["where"]["properties"]["bbb"] is None
        words.write(tmp_path / "rows.jsonl", union)
    opened = data.look(sources.find(path))
    tokenizer = tiny.tokenizer()
    prepared = data.prepare(opened, data.rules(opened, tokenizer=tokenizer), folder=tmp_path / "prepared")
    texts = [tokenizer.decode(one.tokens) for one in words.flat(prepared)]
    for text, own, foreign in ((texts[0], "aaa", "bbb"), (texts[1], "bbb", "aaa")):
        assert text.count(own) == 2
        assert foreign not in text
        assert "null" not in text
        assert "None" not in text


def test_tools_may_be_given_as_text(tmp_path):
    rows = [{"messages": [words.user("x"), words.assistant("y")], "tools": json.dumps([{"name": "f"}])}]
    tokenizer = tiny.tokenizer()
    assert '{"name": "f"}' in tokenizer.decode(words.prepare(tmp_path, rows, tokenizer).samples(0)[0].tokens)
    with pytest.raises(mistake.Mistake, match=r"row 0 .*column tools is not JSON"):
        words.prepare(tmp_path, [{**rows[0], "tools": "{"}], tokenizer)
    with pytest.raises(mistake.Mistake, match=r"row 0 .*column tools: .* a list of JSON schemas"):
        words.prepare(tmp_path, [{**rows[0], "tools": ["f"]}], tokenizer)


def test_the_demo_is_disjoint_right_and_the_same_everywhere(tmp_path):
    train, test = demo.rows("train"), demo.rows("test")
    questions = [{row["messages"][0]["content"] for row in rows} for rows in (train, test)]
    assert len(questions[0]) == len(train)
    assert not questions[0] & questions[1]
    assert 3000 < len(train) < 10000
    assert len(test) > 300
    answers = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in (*train, *test)}
    assert answers["What is 17 + 25?"] == "17 + 25 = 42"
    assert answers["What comes after 99?"] == "100"
    assert answers["Write 710 in words."] == "seven hundred ten"
    assert read("demo", split="test") == test
    with pytest.raises(mistake.Mistake, match="no split 'dev'; it has train and test"):
        sources.find("demo", split="dev")
