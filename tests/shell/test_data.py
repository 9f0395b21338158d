"""From rows to samples: texts, prompts with completions, ids; lengths; what is kept on disk."""

import json
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.plan import batching
from shell import counts, data, mistake, sources, tiny, truncate
from shell import encode as encoding
from tests import paths
from tests.shell import words

WORDS = "a b c d e f g h i j k l m n o p"


def test_a_text_is_its_ids_and_one_end(tmp_path):
    tokenizer = words.word_tokenizer(WORDS)
    prepared = words.prepare(tmp_path, [{"text": "a b c"}, {"text": "a b </s>"}], tokenizer)
    assert [one.tokens.tolist() for one in words.flat(prepared)] == [[3, 4, 5, 1], [3, 4, 1]]
    assert words.targets(prepared.samples(0)[0]) == [-100, 4, 5, 1]


def test_the_end_token_is_trained_though_it_is_also_the_pad_token(tmp_path):
    tokenizer = words.word_tokenizer(WORDS, pad="</s>")
    row = {"input_ids": [5, 6, 7, 1, 1, 1], "attention_mask": [1, 1, 1, 1, 0, 0]}
    for made in ([{"text": "c d e"}], [row]):
        assert words.targets(words.prepare(tmp_path, made, tokenizer).samples(0)[0]) == [-100, 6, 7, 1]


@pytest.mark.parametrize(("completion", "terms"), [("", 1), ("c", 2), ("c d", 3)])
def test_a_completion_trains_its_tokens_and_the_end(tmp_path, completion, terms):
    tokenizer = words.word_tokenizer(WORDS)
    rows = [{"prompt": "a b ", "completion": completion}]
    one = words.prepare(tmp_path, rows, tokenizer).samples(0)[0]
    assert one.trained.sum() == terms
    assert one.trained[-1]
    assert one.tokens[-1] == 1
    whole = words.prepare(tmp_path, rows, tokenizer, completion_only_loss=False).samples(0)[0]
    assert whole.trained.tolist() == [False] + [True] * (len(whole.tokens) - 1)


def test_a_token_that_joins_prompt_and_completion_is_trained(tmp_path):
    rows = [{"prompt": "<a>x ", "completion": "ab"}]
    tokenizer = words.spaced_tokenizer()
    one = words.prepare(tmp_path, rows, tokenizer).samples(0)[0]
    pieces = tokenizer.convert_ids_to_tokens(one.tokens)
    assert [piece for piece, trained in zip(pieces, one.trained, strict=True) if trained] == [
        "▁a",
        "b",
        "</s>",
    ]


@given(
    prompt=st.text(st.sampled_from("abcyu <"), max_size=12),
    completion=st.text(st.sampled_from("abcyu <"), max_size=12),
)
def test_training_begins_after_the_longest_common_prefix_with_the_prompt(prompt, completion):
    tokenizer = words.spaced_tokenizer()
    rules = encoding.Rules(tokenizer=tokenizer)
    row = ("row 0", encoding.formats.Exchange(prompt=prompt, completion=completion))
    (draft,) = encoding.drafts([row], rules)
    whole, alone = tokenizer(prompt + completion)["input_ids"] + [1], tokenizer(prompt)["input_ids"]
    common = 0
    while common < min(len(whole), len(alone)) and whole[common] == alone[common]:
        common += 1
    assert draft.tokens.tolist() == whole
    assert draft.trained.tolist() == [position >= common for position in range(len(whole))]


def test_a_begin_token_in_the_text_is_not_doubled(tmp_path):
    tokenizer = words.word_tokenizer(WORDS, bos=True)
    rows = [{"text": "a b"}, {"text": "<s> a b"}]
    assert [one.tokens.tolist() for one in words.flat(words.prepare(tmp_path, rows, tokenizer))] == [
        [0, 3, 4, 1]
    ] * 2
    pair = words.prepare(tmp_path, [{"prompt": "<s> a", "completion": " b"}], tokenizer).samples(0)[0]
    assert words.targets(pair) == [-100, -100, 4, 1]


def test_labels_and_masks_of_tokenized_rows_are_kept(tmp_path):
    tokenizer = words.word_tokenizer(WORDS)
    rows = [
        {"input_ids": [3, 4, 5], "labels": [-100, -100, 5]},
        {"input_ids": [3, 4, 5], "completion_mask": [0, 1, 0]},
        {"input_ids": [3, 4, 5], "assistant_masks": [0, 1, 1]},
        {"input_ids": [3, 4, 5]},
    ]
    made = [words.targets(one) for one in words.flat(words.prepare(tmp_path, rows, tokenizer))]
    assert made == [[-100, -100, 5], [-100, 4, -100], [-100, 4, 5], [-100, 4, 5]]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input_ids": [3, 4], "labels": [4, 5]}, "unshifted"),
        ({"input_ids": [3, 99]}, "tokenizer of 19"),
        ({"input_ids": "3 4"}, "list of integers"),
        ({"input_ids": [3, 4], "labels": [3]}, "1 values beside 2"),
        ({"text": None}, "column text: nothing"),
        ({"prompt": "a", "completion": None}, "column completion: nothing"),
        (
            {"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]},
            "column prompt: the text 'a'",
        ),
        (
            {"prompt": [], "completion": [{"role": "assistant", "content": "b"}]},
            "column prompt: the list of messages is",
        ),
        ({"messages": "a"}, "column messages: the text 'a' came; a list of messages is wanted"),
        ({"messages": []}, "column messages: the list of messages is empty"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_with_its_column(tmp_path, row, told):
    tokenizer = words.word_tokenizer(WORDS)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    good = {
        "input_ids": {"input_ids": [3, 4]},
        "text": {"text": "a b"},
        "prompt": {"prompt": [words.user("a")], "completion": [words.assistant("b")]},
        "messages": {"messages": [words.user("a"), words.assistant("b")]},
    }[next(iter(row))]
    if row.get("completion", "") is None:
        good = {"prompt": "a", "completion": "b"}
    with pytest.raises(mistake.Mistake, match=r"row 1 \(line 2 of .*rows.jsonl\)") as caught:
        words.prepare(tmp_path, [good, row], tokenizer)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"question": "a", "answer": "b"}, "columns are question, answer; wanted"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo"),
        ({"text": "a", "messages": []}, "remove all but one"),
    ],
)
def test_columns_that_fit_no_format_or_two_are_told(tmp_path, row, told):
    with pytest.raises(mistake.Mistake, match=told):
        data.look(sources.find(words.write(tmp_path / "rows.jsonl", [row])))


def test_rows_shorter_than_the_limit_are_all_kept(tmp_path):
    rows = [{"text": "a b c d"}] * 10
    prepared = words.prepare(tmp_path, rows, words.word_tokenizer(WORDS), max_length=128)
    assert len(prepared) == 10
    assert prepared.counts == counts.Counts(read=10, used=10, samples=10, tokens=50, trained=40)


def test_splitting_keeps_every_token_and_cutting_reports_those_it_drops(tmp_path):
    rows = [{"text": text} for text in ("a b c d e f", "a b", "a")]  # 7, 3 and 2 tokens
    tokenizer = words.word_tokenizer(WORDS)
    split = words.prepare(tmp_path, rows, tokenizer, max_length=5, truncation="split")
    assert [len(one.tokens) for one in words.flat(split)] == [5, 2, 3, 2]
    assert (split.counts.tokens, split.counts.cut_tokens, split.counts.split_rows) == (12, 0, 1)
    lengths = [len(pack) for pack in batching.assign(words.flat(split), budget=5, share=False)[0]]
    assert len(lengths) == 3
    assert sum(lengths) == 4
    cut = words.prepare(tmp_path, rows, tokenizer, max_length=5)
    assert [len(one.tokens) for one in words.flat(cut)] == [5, 3, 2]
    assert (cut.counts.tokens, cut.counts.cut_tokens, cut.counts.cut_rows) == (10, 2, 1)
    assert "2 tokens cut from 1 rows" in counts.notes(cut.counts)[0]
    end = words.prepare(tmp_path, rows, tokenizer, max_length=5, truncation="keep_end")
    assert words.targets(end.samples(0)[0]) == [-100, 6, 7, 8, 1]
    drop = words.prepare(tmp_path, rows, tokenizer, max_length=5, truncation="drop")
    assert len(drop) == 2
    assert drop.counts.dropped == {truncate.TOO_LONG: 1}


def test_a_row_whose_targets_are_cut_away_is_dropped_and_counted(tmp_path):
    rows = [{"prompt": "a b c d e f", "completion": " g"}, {"prompt": "a", "completion": " b"}]
    prepared = words.prepare(tmp_path, rows, words.word_tokenizer(WORDS), max_length=5)
    assert len(prepared) == 1
    assert prepared.counts.dropped == {truncate.CUT_AWAY: 1}
    assert prepared.counts.read == 2
    assert prepared.counts.used == 1


def test_data_that_leave_nothing_to_train_are_refused(tmp_path):
    with pytest.raises(mistake.Mistake, match="leaves nothing to train"):
        words.prepare(tmp_path, [{"text": ""}], words.word_tokenizer(WORDS))
    with pytest.raises(mistake.Mistake, match="has no rows"):
        words.prepare(tmp_path, [], words.word_tokenizer(WORDS))


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    limit=st.integers(2, 9),
    truncation=st.sampled_from(encoding.TRUNCATIONS),
)
def test_every_token_is_kept_cut_or_in_a_dropped_row(lengths, limit, truncation):
    drafts = [
        encoding.Draft(tokens=np.arange(length, dtype=np.int64), trained=np.ones(length, bool))
        for length in lengths
    ]
    pieces, counted = truncate.fit(drafts, max_length=limit, truncation=truncation)
    gone = sum(length for length, row in zip(lengths, pieces, strict=True) if not row)
    assert counted.tokens + counted.cut_tokens + gone == sum(lengths)
    assert counted.used + sum(counted.dropped.values()) == counted.read == len(lengths)
    assert all(
        len(piece.tokens) <= limit and not piece.trained[0] and piece.trained.any()
        for row in pieces
        for piece in row
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"assistant_only_loss": True}, "assistant_only_loss needs conversations"),
        ({"completion_only_loss": True}, "completion_only_loss needs the columns"),
        ({"truncation": "middle"}, "truncation is 'middle'"),
        ({"max_length": 1}, "max_length is 1"),
    ],
)
def test_options_that_mean_nothing_for_the_rows_are_refused(tmp_path, options, told):
    with pytest.raises(mistake.Mistake, match=told):
        words.prepare(tmp_path, [{"text": "a b"}], words.word_tokenizer(WORDS), **options)


def test_what_was_prepared_is_found_again_and_not_made_again(tmp_path, monkeypatch):
    rows = [{"text": "a b"}, {"text": "c d e"}]
    first = words.prepare(tmp_path, rows, words.word_tokenizer(WORDS))
    with monkeypatch.context() as patched:
        patched.setattr(encoding, "drafts", lambda *_: pytest.fail("rows were tokenized again"))
        again = words.prepare(tmp_path, rows, words.word_tokenizer(WORDS))
    assert again.fingerprint == first.fingerprint
    assert again.counts == first.counts
    assert [one.tokens.tolist() for one in words.flat(again)] == [
        one.tokens.tolist() for one in words.flat(first)
    ]
    others = [
        words.prepare(tmp_path, rows[:1], words.word_tokenizer(WORDS)),
        words.prepare(tmp_path, rows, words.word_tokenizer(WORDS + " q")),
        words.prepare(tmp_path, rows, words.word_tokenizer(WORDS), max_length=3),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_an_interrupted_preparation_leaves_nothing_that_is_trusted(tmp_path, monkeypatch):
    rows = [{"text": "a b"}] * 3
    monkeypatch.setattr(data, "BATCH", 1)
    monkeypatch.setattr(truncate, "fit", _fails_at(2, truncate.fit))
    with pytest.raises(KeyboardInterrupt):
        words.prepare(tmp_path, rows, words.word_tokenizer(WORDS))
    assert list((tmp_path / "prepared").iterdir()) == []
    assert len(words.prepare(tmp_path, rows, words.word_tokenizer(WORDS))) == 3


def test_what_a_killed_process_left_is_swept_and_never_read(tmp_path):
    rows = [{"text": "a b"}]
    made = words.prepare(tmp_path / ".", rows, words.word_tokenizer(WORDS))
    place = tmp_path / "prepared" / made.fingerprint
    place.rename(tmp_path / "prepared" / f"{made.fingerprint}.partial-{socket.gethostname()}-999999999")
    assert len(words.prepare(tmp_path, rows, words.word_tokenizer(WORDS))) == 1
    assert [path.name for path in (tmp_path / "prepared").iterdir()] == [made.fingerprint]


def test_progress_tells_the_rows_read(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "BATCH", 2)
    told = []
    opened = data.look(sources.find(words.write(tmp_path / "rows.jsonl", [{"text": "a b"}] * 5)))
    rules = data.rules(opened, tokenizer=words.word_tokenizer(WORDS))
    data.prepare(opened, rules, folder=tmp_path / "prepared", progress=told.append)
    assert told == [2, 4, 5]


def test_group_and_unit_are_the_row(tmp_path):
    prepared = words.prepare(tmp_path, [{"text": "a b"}] * 3, words.word_tokenizer(WORDS))
    assert [(one.group, one.unit) for one in words.flat(prepared)] == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(IndexError):
        prepared.samples(3)


def test_an_epoch_holds_every_row_once_in_an_order_of_seed_and_epoch(tmp_path):
    prepared = words.prepare(tmp_path, [{"text": "a b"}] * 64, words.word_tokenizer(WORDS))
    orders = [
        data.epoch_order(prepared, seed=seed, epoch=epoch).tolist() for seed in (1, 2) for epoch in (0, 1)
    ]
    assert all(sorted(order) == list(range(64)) for order in orders)
    assert len(set(map(tuple, orders))) == 4
    assert data.epoch_order(prepared, seed=None, epoch=3).tolist() == list(range(64))


@pytest.mark.parametrize("seed", [None, 5])
def test_weights_are_shares_of_an_epoch_and_a_source_goes_on_where_it_stopped(tmp_path, seed):
    small = words.write(tmp_path / "small.jsonl", [{"text": "a"}] * 4)
    large = words.write(tmp_path / "large.jsonl", [{"text": "b"}] * 8)
    found = sources.find([{"path": small, "weight": 1}, {"path": large, "weight": 2}])
    opened = data.look(found)
    prepared = data.prepare(
        opened, data.rules(opened, tokenizer=words.word_tokenizer(WORDS)), folder=tmp_path / "p"
    )
    epochs = [data.epoch_order(prepared, seed=seed, epoch=epoch) for epoch in range(2)]
    assert [np.bincount(epoch < 4, minlength=2).tolist() for epoch in epochs] == [[8, 4], [8, 4]]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(12))
    skewed = data.look(sources.find([{"path": small, "weight": 3}, {"path": large, "weight": 1}]))
    rules = data.rules(skewed, tokenizer=words.word_tokenizer(WORDS))
    prepared = data.prepare(skewed, rules, folder=tmp_path / "p")
    drawn = np.concatenate([data.epoch_order(prepared, seed=seed, epoch=epoch) for epoch in range(8)])
    seen = np.bincount(drawn, minlength=12)
    assert seen[:4].tolist() == [18] * 4
    assert seen[4:].tolist() == [3] * 8


def test_counts_add_up():
    first = counts.Counts(read=3, used=2, dropped={"x": 1}, tokens=7)
    second = counts.Counts(read=2, used=0, dropped={"x": 1, "y": 1})
    assert counts.merge(first, second) == counts.Counts(read=5, used=2, dropped={"x": 2, "y": 1}, tokens=7)
    assert counts.notes(counts.Counts(read=4, used=4)) == ()


def test_a_thousand_rows_of_school_mathematics_are_prepared_whole(tmp_path):
    path = paths.shared("data", "gsm8k", "train_2000.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()[:1000]]
    tokenizer = tiny.tokenizer()
    prepared = words.prepare(tmp_path, rows, tokenizer, assistant_only_loss=True)
    assert prepared.counts.used == 1000
    answers = sum(len(row["messages"][1]["content"].encode()) + 1 for row in rows)
    assert prepared.counts.trained == answers


def _fails_at(number, function):
    """Return the function, interrupted at one call."""
    calls = iter(range(1, 1000))

    def wrapped(*given, **named):
        if next(calls) == number:
            raise KeyboardInterrupt
        return function(*given, **named)

    return wrapped
