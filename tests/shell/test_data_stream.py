"""Rows read while training: the samples of a list, in an order that resumes anywhere."""

import itertools

import attrs
import pytest

from shell import counts, data, encode, mistake, sources, stream
from tests.shell import words

WORDS = "a b c d e f g h i j k l m n o p q r s t"
ROWS = [{"text": " ".join(WORDS.split()[: number + 1])} for number in range(20)]


def seen(drawn):
    return [
        (one.tokens.tolist(), one.trained.tolist(), one.group, one.unit) for d in drawn for one in d.samples
    ]


@pytest.mark.parametrize("truncation", ["keep_start", "split", "drop"])
@pytest.mark.parametrize("seed", [None, 3])
def test_twenty_rows_give_the_same_samples_as_list_and_as_stream(tmp_path, seed, truncation):
    options = {"max_length": 9, "truncation": truncation}
    tokenizer = words.word_tokenizer(WORDS)
    prepared = words.prepare(tmp_path, ROWS, tokenizer, **options)
    drawn = list(
        itertools.islice(words.draw(tmp_path, ROWS, tokenizer, seed=seed, **options), 2 * len(prepared))
    )
    listed = [
        (one.tokens.tolist(), one.trained.tolist(), one.group, one.unit)
        for epoch in range(2)
        for row in data.epoch_order(prepared, seed=seed, epoch=epoch)
        for one in prepared.samples(int(row))
    ]
    assert seen(drawn) == listed
    once = counts.Counts()
    for one in drawn[: len(prepared)]:
        once = counts.merge(once, one.counts)
    assert once == prepared.counts


@pytest.mark.parametrize("truncation", ["keep_start", "split", "drop"])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_stream_goes_on_from_every_place_as_if_it_had_not_stopped(tmp_path, monkeypatch, seed, truncation):
    monkeypatch.setattr(stream, "BLOCK", 6)
    options = {"max_length": 9, "truncation": truncation, "seed": seed}
    tokenizer = words.word_tokenizer(WORDS)
    whole = list(itertools.islice(words.draw(tmp_path, ROWS, tokenizer, **options), 70))
    for stop in (0, 1, 5, 6, 7, 17, 40, 61):
        place = stream.Place(**attrs.asdict(whole[stop].after))
        rest = list(
            itertools.islice(words.draw(tmp_path, ROWS, tokenizer, place=place, **options), 69 - stop)
        )
        assert seen(rest) == seen(whole[stop + 1 :])
        assert [one.after for one in rest] == [one.after for one in whole[stop + 1 :]]
        assert [one.counts for one in rest] == [one.counts for one in whole[stop + 1 :]]


def test_rows_before_the_place_are_not_tokenized(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", 5)
    tokenizer, made = words.word_tokenizer(WORDS), []
    drafts = encode.drafts
    monkeypatch.setattr(encode, "drafts", lambda rows, rules: made.extend(rows) or drafts(rows, rules))
    place = stream.Place(row=15, used=15, block=3)
    first = next(words.draw(tmp_path, ROWS, tokenizer, place=place))
    assert len(first.samples[0].tokens) == 17
    assert len(made) == 5


def test_each_block_is_shuffled_by_itself_and_every_row_comes_once_an_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", 8)
    drawn = seen(itertools.islice(words.draw(tmp_path, ROWS, words.word_tokenizer(WORDS), seed=1), 40))
    epochs = [[one[2] for one in drawn[:20]], [one[2] for one in drawn[20:]]]
    for epoch in epochs:
        assert sorted(epoch[:8]) == list(range(8))
        assert sorted(epoch) == list(range(20))
        assert epoch != sorted(epoch)
        assert [row - 8 for row in epoch[8:16]] != epoch[:8]
    assert epochs[0] != epochs[1]


def test_a_stream_with_weights_takes_rows_in_turn_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", 4)
    first = words.write(tmp_path / "first.jsonl", [{"text": "a"}] * 12)
    second = words.write(tmp_path / "second.jsonl", [{"text": "b"}] * 4)
    found = sources.find([{"path": first, "weight": 3}, {"path": second, "weight": 1}], streaming=True)
    opened = data.look(found)
    rules = data.rules(opened, tokenizer=words.word_tokenizer(WORDS))
    whole = list(itertools.islice(stream.draw(opened, rules, seed=None), 40))
    names = [int(one.samples[0].tokens[0]) - 3 for one in whole]
    assert names[:4].count(1) == 1
    assert names[:16].count(1) == 4
    assert whole[16].after.epoch == 1
    rest = list(itertools.islice(stream.draw(opened, rules, seed=None, place=whole[9].after), 30))
    assert seen(rest) == seen(whole[10:])


def test_sources_without_weights_are_read_one_after_the_other(tmp_path):
    files = [words.write(tmp_path / f"{n}.jsonl", [{"text": text}] * 2) for n, text in enumerate("ab")]
    opened = data.look(sources.find(files, streaming=True))
    rules = data.rules(opened, tokenizer=words.word_tokenizer(WORDS))
    drawn = list(itertools.islice(stream.draw(opened, rules, seed=None), 4))
    assert [int(one.samples[0].tokens[0]) for one in drawn] == [3, 3, 4, 4]
    after = next(stream.draw(opened, rules, seed=None, place=stream.Place(row=2, used=2, block=1)))
    assert int(after.samples[0].tokens[0]) == 4


def test_a_stream_that_gives_nothing_in_a_whole_pass_is_refused(tmp_path):
    with pytest.raises(mistake.Mistake, match="nothing to train in a whole pass"):
        next(words.draw(tmp_path, [{"text": ""}] * 3, words.word_tokenizer(WORDS)))
