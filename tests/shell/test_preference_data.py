"""Pairs and labeled answers: their formats, where their answers begin, and what `max_length` does to them."""

import hypothesis
import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import strategies as st
from tokenizers import models

from core.plan import batching, cost
from shell import counts, data, mistake, sides, sources, tiny, truncate
from shell import encode as encoding
from tests import paths
from tests.shell import words

TEXT = "q u e s t i o n a b c d"
PAIR = {"prompt": "q u", "chosen": " a b", "rejected": " c"}
ASKED = [words.user("Say hi.")]
TALK = {"prompt": ASKED, "chosen": [words.assistant("Hi!")], "rejected": [words.assistant("Hmpf.")]}
SHAPE = cost.ModelShape(
    layers=2, hidden=8, heads=2, kv_heads=2, head_dim=4, intermediate=16, vocab=64, parameters=1000
)


def pairs(tmp_path, rows, tokenizer=None, **options):
    tokenizer = tokenizer or words.word_tokenizer(TEXT, bos=True)
    return words.prepare(tmp_path, rows, tokenizer, kind="pairs", **options)


def labeled(tmp_path, rows, tokenizer=None, **options):
    return words.prepare(tmp_path, rows, tokenizer or words.word_tokenizer(TEXT), kind="unpaired", **options)


def seen(prepared):
    """Return ids, targets and columns of all samples."""
    return [(one.tokens.tolist(), words.targets(one), one.columns) for one in words.flat(prepared)]


def test_a_pair_is_two_samples_of_one_unit_that_begin_with_one_prompt(tmp_path):
    prepared = pairs(tmp_path, [PAIR, PAIR])
    chosen, rejected = prepared.samples(1)
    eos = 1
    assert len(prepared) == 2
    assert (chosen.unit, rejected.unit, chosen.group, rejected.group) == (1, 1, 1, 1)
    assert chosen.tokens[:3].tolist() == rejected.tokens[:3].tolist()
    assert words.targets(chosen)[:3] == words.targets(rejected)[:3] == [-100] * 3
    assert [len(chosen.tokens), len(rejected.tokens)] == [6, 5]
    assert words.targets(chosen)[3:] == [*chosen.tokens[3:5], eos]
    assert words.targets(rejected)[3:] == [rejected.tokens[3], eos]
    assert (prepared.counts.read, prepared.counts.used, prepared.counts.samples) == (2, 2, 4)


def test_a_prompt_told_apart_or_inside_of_both_sides_is_the_same(tmp_path):
    inside = {"chosen": [*ASKED, *TALK["chosen"]], "rejected": [*ASKED, *TALK["rejected"]]}
    beside = {"prompt": "Say hi.", **inside}
    twice = {"prompt": ASKED, **inside}
    single = {"prompt": ASKED, "chosen": TALK["chosen"][0], "rejected": TALK["rejected"][0]}
    given = [pairs(tmp_path, [row], tiny.tokenizer()) for row in (TALK, inside, beside, twice, single)]
    assert all(seen(one) == seen(given[0]) for one in given[1:])
    chosen, _ = given[0].samples(0)
    prompt = tiny.tokenizer().apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"]
    assert chosen.tokens[~chosen.trained].tolist() == prompt


def test_text_with_the_prompt_inside_parts_where_the_sides_part(tmp_path):
    row = {"chosen": "q u a b", "rejected": "q u c"}
    assert seen(pairs(tmp_path, [row])) == seen(pairs(tmp_path, [PAIR]))


def test_a_margin_is_kept_and_a_missing_one_is_none(tmp_path):
    prepared = pairs(tmp_path, [PAIR | {"margin": 2.5}, PAIR | {"margin": None}, PAIR | {"margin": 1}])
    assert [one.columns["margin"] for one in words.flat(prepared)] == [2.5, 2.5, 0.0, 0.0, 1.0, 1.0]


def test_labeled_answers_come_as_text_as_messages_and_as_a_prompt_of_messages(tmp_path):
    text = labeled(tmp_path, [{"prompt": "q u", "completion": " a", "label": True}])
    (one,) = words.flat(text)
    assert (words.targets(one), one.columns) == ([-100, -100, *one.tokens[2:]], {"label": 1.0})
    whole = {"messages": [*ASKED, *TALK["chosen"]], "label": 0}
    apart = {"prompt": ASKED, "completion": TALK["chosen"], "label": False}
    both = [labeled(tmp_path, [row], tiny.tokenizer()) for row in (whole, apart)]
    assert seen(both[0]) == seen(both[1])
    assert words.flat(both[0])[0].columns == {"label": 0.0}


def test_of_several_messages_in_an_answer_the_assistants_are_trained(tmp_path):
    answer = [words.assistant("Wait."), {"role": "tool", "content": "42"}, words.assistant("It is 42.")]
    (chosen, _) = pairs(tmp_path, [TALK | {"chosen": answer}], tiny.tokenizer()).samples(0)
    told = tiny.tokenizer().decode(chosen.tokens[chosen.trained])
    assert told == "Wait.<|im_end|>It is 42.<|im_end|>\n"


@pytest.mark.parametrize(
    ("kind", "row", "told"),
    [
        ("pairs", {"text": "a"}, "columns are text; wanted: chosen and rejected"),
        ("pairs", {"messages": ASKED, "label": True}, "train them with kto"),
        ("unpaired", PAIR, "train them with dpo or reward"),
        ("unpaired", {"prompt": "a", "completion": "b", "label": "yes"}, "row 0.*'yes' came; true or 1"),
        *(
            ("unpaired", {"prompt": "a", "completion": "b", "label": label}, f"row 0.*label: {label} came")
            for label in (-1, 2, 0.5, float("nan"), None)
        ),
        ("unpaired", {"messages": TALK["chosen"], "label": -1}, "row 0.*column label: -1 came; true or 1"),
        ("unpaired", {"messages": ASKED, "label": True}, "row 0.*role user; an answer"),
        ("pairs", PAIR | {"margin": "big"}, "row 0.*column margin: the text 'big' came"),
        ("pairs", PAIR | {"rejected": None}, "row 0.*column rejected: nothing"),
        ("pairs", TALK | {"rejected": []}, "row 0.*column rejected: the list of messages is empty"),
        ("pairs", TALK | {"prompt": []}, "row 0.*column prompt: the list of messages is empty"),
        ("pairs", TALK | {"prompt": "Other."}, "row 0.*column prompt: text came beside"),
        ("pairs", TALK | {"chosen": [words.user("Me?")]}, "row 0.*column chosen.*role user; two answers"),
        (
            "pairs",
            TALK | {"chosen": [*TALK["chosen"], words.user("?")]},
            "row 0.*last message has the role user",
        ),
        ("pairs", {"chosen": ASKED, "rejected": ASKED}, "row 0.*role user"),
    ],
)
def test_a_row_that_is_no_pair_and_no_labeled_answer_is_told(tmp_path, kind, row, told):
    with pytest.raises(mistake.Mistake, match=told):
        words.prepare(tmp_path, [row], tiny.tokenizer(), kind=kind)


def test_text_among_messages_is_told(tmp_path):
    with pytest.raises(mistake.Mistake, match=r"row 1.*column chosen: text came; the first row has messages"):
        pairs(tmp_path, [TALK, PAIR], tiny.tokenizer())


def test_rows_cannot_be_split(tmp_path):
    for kind, row in (("pairs", PAIR), ("unpaired", {"prompt": "a", "completion": "b", "label": 1})):
        with pytest.raises(mistake.Mistake, match="truncation split is for texts"):
            words.prepare(tmp_path, [row], words.word_tokenizer(TEXT), kind=kind, truncation="split")


def merging(begin=False):
    """Return a tokenizer that knows a, b, c and one token for ab."""
    vocab = {name: number for number, name in enumerate(["</s>", "a", "b", "c", "x", "ab", "<s>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")


@pytest.mark.parametrize("prompt", ["a", "xa"])
def test_a_token_that_takes_in_the_prompts_end_on_one_side_leaves_both_the_prompt_that_generation_sees(
    tmp_path, prompt
):
    row = {"prompt": prompt, "chosen": "b", "rejected": "c"}
    chosen, rejected = pairs(tmp_path, [row], merging()).samples(0)
    asked = merging()(prompt)["input_ids"]
    assert chosen.tokens.tolist() == [*asked, 2, 0]
    assert rejected.tokens.tolist() == [*asked, 3, 0]
    assert words.targets(chosen)[len(asked) :] == [2, 0]
    assert words.targets(rejected)[len(asked) :] == [3, 0]


def test_a_token_that_takes_in_the_prompts_end_on_both_sides_is_trained_on_both(tmp_path):
    row = {"prompt": "xa", "chosen": "b", "rejected": "bc"}
    chosen, rejected = pairs(tmp_path, [row], merging()).samples(0)
    assert (chosen.tokens.tolist(), rejected.tokens.tolist()) == ([4, 5, 0], [4, 5, 3, 0])
    assert (words.targets(chosen), words.targets(rejected)) == ([-100, 5, 0], [-100, 5, 3, 0])


def test_a_doubled_begin_token_stands_once_on_both_sides(tmp_path):
    row = {"prompt": "<s> q", "chosen": " a", "rejected": " b"}
    for one in pairs(tmp_path, [row]).samples(0):
        assert one.tokens.tolist().count(0) == 1
        assert one.tokens[0] == 0


def counted(prompt, chosen, rejected, limit, truncation="keep_start"):
    """Cut one pair of these lengths; the answers begin with other tokens and end in eos, 9."""
    asked = np.arange(100, 100 + prompt)
    drafts = []
    for number, length in enumerate((chosen, rejected)):
        tokens = np.concatenate([asked, np.full(max(length - 1, 0), number + 1), np.full(int(length > 0), 9)])
        drafts.append(encoding.Draft(tokens=tokens, trained=np.arange(len(tokens)) >= prompt))
    aligned = sides.Aligned(sides=tuple(drafts), start=prompt)
    rules = encoding.Rules(tokenizer=None, max_length=limit, truncation=truncation)
    return sides.cut([aligned], [0.0], rules)


def test_both_sides_keep_the_limit_and_the_same_prompt():
    ((chosen, rejected),), told = counted(6, 3, 20, 12)
    assert (len(chosen.tokens), len(rejected.tokens)) == (9, 12)
    assert chosen.tokens[:6].tolist() == rejected.tokens[:6].tolist()
    assert (told.cut_rows, told.cut_tokens, told.one_ended) == (1, 14, 1)


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
def test_the_shorter_answer_is_not_emptied_by_a_cut(truncation):
    ((chosen, rejected),), _ = counted(4, 12, 2, 10, truncation)
    assert chosen.trained.sum() >= 1
    assert rejected.trained.sum() == 2
    assert max(len(chosen.tokens), len(rejected.tokens)) <= 10


def test_a_pair_of_fifty_thousand_tokens_is_cut_to_the_limit():
    ((chosen, rejected),), told = counted(10, 50_000, 49_000, 128)
    assert (len(chosen.tokens), len(rejected.tokens)) == (128, 128)
    assert told.one_ended == 0


@pytest.mark.parametrize(
    ("lengths", "limit", "truncation", "reason"),
    [
        ((4, 12, 2), 10, "drop", truncate.TOO_LONG),
        ((12, 3, 3), 12, "keep_start", sides.CUT_AWAY),
        ((4, 3, 0), 20, "keep_start", sides.NO_ANSWER),
    ],
)
def test_a_pair_that_cannot_be_kept_is_dropped_and_counted(lengths, limit, truncation, reason):
    made, told = counted(*lengths, limit, truncation)
    assert made == [[]]
    assert (told.read, told.used, told.dropped) == (1, 0, {reason: 1})


def test_an_end_that_the_cut_takes_from_one_side_alone_is_told():
    _, told = counted(6, 3, 20, 12)
    assert any("1 of 1 pairs lost the end of one side alone" in line for line in counts.notes(told))


@hypothesis.given(
    prompt=st.integers(1, 12), chosen=st.integers(0, 12), rejected=st.integers(0, 12),
    limit=st.integers(2, 16), truncation=st.sampled_from(["keep_start", "keep_end", "drop"]),
)  # fmt: skip
def test_whatever_the_lengths_a_pair_that_is_kept_is_whole(prompt, chosen, rejected, limit, truncation):
    (made,), told = counted(prompt, chosen, rejected, limit, truncation)
    assert sum(told.dropped.values()) + told.used == told.read == 1
    if not made:
        return
    untrained = [one.tokens[: int(one.trained.argmax())].tolist() for one in made]
    assert untrained[0] == untrained[1] != []
    assert all(one.trained[1:].any() and not one.trained[0] and len(one.tokens) <= limit for one in made)
    ended = [one.tokens[-1] == 9 for one in made]
    assert told.one_ended == (ended[0] != ended[1])


def test_equal_sides_keep_a_token_to_train(tmp_path):
    for row in (PAIR | {"rejected": " a b"}, {"chosen": "q a", "rejected": "q a"}):
        chosen, rejected = pairs(tmp_path, [row]).samples(0)
        assert chosen.tokens.tolist() == rejected.tokens.tolist()
        assert words.targets(chosen) == words.targets(rejected)
        assert chosen.trained.any()


@pytest.mark.parametrize("empty", ["chosen", "rejected"])
def test_an_empty_answer_trains_its_end(tmp_path, empty):
    samples = pairs(tmp_path, [PAIR | {empty: ""}]).samples(0)
    assert samples[empty == "rejected"].trained.sum() == 1


def test_a_stream_gives_the_pairs_of_a_list(tmp_path):
    rows = [PAIR | {"margin": number} for number in range(5)]
    stream = words.draw(tmp_path, rows, words.word_tokenizer(TEXT, bos=True), kind="pairs")
    drawn = [next(stream).samples for _ in range(5)]
    prepared = pairs(tmp_path, rows)
    for number, both in enumerate(drawn):
        wanted = prepared.samples(number)
        assert [one.unit for one in both] == [number, number]
        assert [(o.tokens.tolist(), o.columns) for o in both] == [
            (o.tokens.tolist(), o.columns) for o in wanted
        ]


def test_rows_for_another_kind_of_training_are_other_prepared_data(tmp_path):
    row = {"prompt": "q", "completion": "a", "label": 1}
    names = set()
    for kind in ("text", "unpaired"):
        opened = data.look(sources.find(words.write(tmp_path / "rows.jsonl", [row])), kind)
        names.add(data.fingerprint(opened, data.rules(opened, tokenizer=words.word_tokenizer(TEXT))))
    assert len(names) == 2


def test_real_pairs_share_their_prompts(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        paths.shared("models", "smollm2-135m-instruct-tokenizer")
    )
    opened = data.look(sources.find(str(paths.shared("data", "lf_demo", "dpo_en_200.jsonl"))), "pairs")
    prepared = data.prepare(opened, data.rules(opened, tokenizer=tokenizer), folder=tmp_path)
    samples = words.flat(prepared)
    plan = batching.assign(samples, budget=16384, couples="pair", shape=SHAPE)
    assert len(samples) == 400
    assert cost.summarize(samples, plan, SHAPE, budget=16384).packing_ratio >= 1.4
