"""The tokenizer of the built-in model."""

import transformers
from hypothesis import given
from hypothesis import strategies as st

from shell import chat, tiny
from tests.shell import words


@given(st.text())
def test_any_text_survives_and_ids_are_its_bytes(text):
    tokenizer = tiny.tokenizer()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    if "<|" not in text:
        assert tokenizer(text)["input_ids"] == list(text.encode("utf-8"))


def test_the_special_tokens_come_after_the_bytes():
    tokenizer = tiny.tokenizer()
    assert tokenizer.convert_tokens_to_ids([tiny.PAD, tiny.OPEN, tiny.CLOSE]) == [256, 257, 258]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (256, 258, 259)
    assert chat.stop_ids(tokenizer) == (258,)


def test_a_saved_tokenizer_loads_as_it_was(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(str(tmp_path))
    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    messages = [words.user("hé"), words.assistant("🙂"), words.user("x")]
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    assert loaded.get_vocab() == tokenizer.get_vocab()
    printed = [
        one.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        for one in (loaded, tokenizer)
    ]
    assert printed[0] == printed[1]
