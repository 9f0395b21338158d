"""Masks over any text, and over what real tokenizers make of it."""

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from shell import chat as chats
from shell import spans, tiny
from tests import paths
from tests.shell import words
from tests.shell.test_chat import PLAIN, TALK

MARKS = {"blacklist_categories": ["Cs"], "blacklist_characters": [chats.OPEN, chats.CLOSE, chats.STAND_IN]}
TEXT = st.text(st.characters(**MARKS), min_size=1, max_size=8).filter(str.strip)


@given(st.lists(TEXT, min_size=2, max_size=6))
def test_masks_hold_whole_characters_of_any_text(contents):
    tokenizer = tiny.tokenizer()
    messages = [(words.assistant if number % 2 else words.user)(text) for number, text in enumerate(contents)]
    for template in (None, PLAIN):
        chat = chats.bind(tokenizer, chat_template=template)
        text = chats.render(chat, messages)
        found = spans.assistant_spans(chat, messages, None, text)
        assert [text[a:b] for a, b in found] == [m["content"] + "<|im_end|>" for m in messages[1::2]]
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = spans.token_mask(np.array(encoded["offset_mapping"]), found, len(text))
        ids = np.array(encoded["input_ids"])
        assert tokenizer.decode(ids[mask]) == "".join(text[a:b] for a, b in found)


@pytest.mark.parametrize(
    ("folder", "template"),
    [("stories260K", "chat_template_for_tests.jinja"), ("smollm2-135m-instruct-tokenizer", None)],
)
def test_real_tokenizers_train_answers_alone(tmp_path, folder, template):
    place = paths.shared("models", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(place))
    options = {"chat_template": template and str(place / template)}
    prepared = words.prepare(tmp_path, [{"messages": TALK}], tokenizer, assistant_only_loss=True, **options)
    (one,) = prepared.samples(0)
    end = tokenizer.eos_token
    assert tokenizer.decode(one.tokens[one.trained]).replace(" ", "") == f"yo{end}so🙂é\n好{end}"
    if template:
        wanted = {"return_dict": True, "return_assistant_tokens_mask": True}
        library = tokenizer.apply_chat_template(TALK, chat_template=(place / template).read_text(), **wanted)
        assert one.trained.tolist() == [bool(number) for number in library["assistant_masks"]]
        assert one.tokens.tolist() == library["input_ids"]
