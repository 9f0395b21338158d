"""Prepared rows that were damaged on the disk are found out and prepared again, and templates that fail."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shell import aside, chat, counts, data, mistake, prompts, sources
from tests.shell import runs, words

ROWS = [{"text": "a b c"}, {"text": "d e"}, {"text": "f"}]


def prepare(folder, note, module=data, rows=ROWS):
    opened = module.look(sources.find(words.write(folder / "rows.jsonl", rows)))
    rules = module.rules(opened, tokenizer=words.word_tokenizer("a b c d e f"))
    return module.prepare(opened, rules, folder=folder / "prepared", note=note)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 0xFF
    path.write_bytes(changed)


def garble(path):
    path.write_bytes(b"\x00\xff garbage")


def remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [cut, flip, garble, remove])
@pytest.mark.parametrize("module", [data, prompts])
def test_each_damaged_file_of_prepared_rows_is_noted_and_prepared_again(tmp_path, module, damage):
    rows = ROWS if module is data else [{"prompt": row["text"], "answer": 1} for row in ROWS]
    told = []
    made = prepare(tmp_path, told.append, module, rows)
    folder = tmp_path / "prepared" / made.fingerprint
    whole = content(folder)
    assert told == []
    names = [name for name, held in whole.items() if held]  # prompts may have no answers of their own
    for number, name in enumerate(names, 1):
        damage(folder / name)
        again = prepare(tmp_path, told.append, module, rows)
        assert len(told) == number
        assert "damaged: its rows are prepared again" in told[-1]
        assert content(folder) == whole
        assert again.counts == made.counts
    prepare(tmp_path, told.append, module, rows)
    assert len(told) == len(names)


@settings(max_examples=20)
@given(position=st.integers(min_value=0), bit=st.integers(0, 7))
def test_every_bit_of_what_is_known_of_the_files_is_guarded(tmp_path_factory, position, bit):
    folder = tmp_path_factory.mktemp("bit")

    def write(place):
        (place / "x").write_bytes(b"x")
        return {"weight": 0.1, "names": ["a"]}

    def kept(note=None):
        return aside.kept(folder, "key", write, note)[1]

    assert kept() == {"weight": 0.1, "names": ["a"]}
    path = folder / "key" / "about.json"
    original = path.read_bytes()
    changed = bytearray(original)
    changed[position % len(changed)] ^= 1 << bit
    path.write_bytes(changed)
    told = []
    assert kept(told.append) == {"weight": 0.1, "names": ["a"]}
    assert told or json.loads(changed) == json.loads(original)


def test_a_run_over_damaged_rows_prepares_them_again_and_says_so(tmp_path, capsys):
    plan = {"dataset": words.write(tmp_path / "rows.jsonl", ROWS * 4), "dataset_split": "train"}
    runs.made(tmp_path / "out", **plan, max_steps=1)
    (tokens,) = (tmp_path / "out" / "prepared").glob("*/tokens.bin")
    whole = tokens.read_bytes()
    cut(tokens)
    capsys.readouterr()
    runs.made(tmp_path / "out", **plan, max_steps=2)
    assert "is damaged: its rows are prepared again" in "".join(capsys.readouterr())
    assert tokens.read_bytes() == whole


def test_a_stream_whose_file_was_edited_is_not_gone_on_with(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    words.write(file, ROWS * 4)
    plan = {"dataset": file, "dataset_split": "train", "streaming": True, "save_steps": 1}
    runs.made(tmp_path / "out", **plan, max_steps=1)
    runs.made(tmp_path / "out", **plan, max_steps=2)
    words.write(file, ROWS * 5)
    capsys.readouterr()
    assert runs.run(tmp_path / "out", **plan, max_steps=3) == 2
    assert "gives other samples than when the run" in capsys.readouterr().err
    runs.made(tmp_path / "out", **plan, max_steps=3, resume="force")


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{% for i in range(100000000) %}a{% endfor %}", "OverflowError"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{{ messages['x'].y.z }}", "cannot print this conversation: 'list object' has no attribute"),
        ("{{ raise_exception('no.') }}", "cannot print this conversation: no"),
        ("{% if %}", "cannot print this conversation"),
    ],
)
def test_whatever_a_chat_template_raises_is_told_with_the_row(tmp_path, template, told):
    rows = [{"messages": [words.user("a"), words.assistant("b")]}]
    with pytest.raises(mistake.Mistake, match=r"row 0 \(line 1") as caught:
        words.prepare(tmp_path, rows, words.word_tokenizer("a b"), chat_template=template)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not str(caught.value).endswith("..")


def test_a_chat_template_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    tokenizer = words.word_tokenizer("a b")
    path = tmp_path / "chat.jinja"
    path.write_bytes("{{ messages }} caf\xe9".encode("latin-1"))
    with pytest.raises(mistake.Mistake, match=r"chat.jinja is not UTF-8 \(byte 18\)"):
        chat.bind(tokenizer, chat_template=str(path))
    with pytest.raises(mistake.Mistake, match=r"aaa\.\.\. cannot be read: File name too long"):
        chat.bind(tokenizer, chat_template="a" * 5000)
    with pytest.raises(mistake.Mistake, match="there is no file"):
        chat.bind(tokenizer, chat_template=str(tmp_path))

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(type(path), "read_text", denied)
    with pytest.raises(mistake.Mistake, match=r"chat.jinja cannot be read: Permission denied"):
        chat.bind(tokenizer, chat_template=str(path))


def test_several_templates_of_a_tokenizer_without_a_default_are_told():
    tokenizer = words.word_tokenizer("a b")
    tokenizer.chat_template = {"one": "{{ messages }}", "two": "{{ messages }}"}
    with pytest.raises(mistake.Mistake, match="several chat templates"):
        chat.bind(tokenizer)


@pytest.mark.parametrize("name", ["messages", "tools", "tokenize", "add_generation_prompt", "chat_template"])
def test_settings_of_a_template_that_have_the_name_of_what_rows_bring_are_refused(name):
    tokenizer = words.word_tokenizer("a b")
    with pytest.raises(mistake.Mistake, match=f"chat_template_kwargs: '{name}'"):
        chat.bind(tokenizer, chat_template="{{ messages }}", settings={name: []})
    bound = chat.bind(
        tokenizer, chat_template="{{ think }}{{ documents }}", settings={"think": 1, "documents": []}
    )
    assert chat.render(bound, [words.user("a")]) == "1[]"


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("text", {"text": "a b"}),
        ("text", {"prompt": "a", "completion": " b"}),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "a a"}),
    ],
)
def test_text_without_a_stop_token_is_told_as_the_tokenizers_and_not_the_templates(tmp_path, kind, row):
    tokenizer = words.word_tokenizer("a b")
    tokenizer.eos_token = None
    (line,) = counts.notes(words.prepare(tmp_path, [row], tokenizer, kind).counts)
    assert "1 of 1 rows end without a stop token: the tokenizer has no eos" in line
    assert "template" not in line
