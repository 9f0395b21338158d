"""A completion ends where its decoded text first holds a stop string, however its characters are cut."""

import hypothesis
from hypothesis import strategies as st

from adapters import endings

# Token 0 has no text, the others are runs of bytes: some are parts of a character.
PIECES = [b"", b"a", b"b", b" ", b"ab", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xf0\x9f\x98\x80", b" a"]
LETTERS = "ab \u00e9\u20ac\U0001f600"


def decode(ids):
    return b"".join(PIECES[i] for i in ids).decode(errors="replace")


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=40),
    strings=st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_completion_ends_where_its_whole_text_first_holds_a_string(tokens, strings):
    for length in range(1, len(tokens) + 1):
        want = any(s in decode(tokens[:length]) for s in strings)
        assert endings.ends(tokens[:length], (), strings, decode) == want
        if want:
            return


def test_tokens_without_text_do_not_hide_a_string():
    assert endings.ends([1, *[0] * 50, 2], (), ["ab"], decode)


def test_a_character_is_there_with_the_last_of_its_bytes():
    assert not endings.ends([1, 7], (), ["\u20ac"], decode)
    assert endings.ends([1, 7, 8], (), ["\u20ac"], decode)


def test_half_a_character_at_the_front_of_the_tail_ends_nothing():
    tokens = [*[1] * 20, 7, 8, *[2] * 9]
    assert not any(endings.ends(tokens[:n], (), ["\ufffdb"], decode) for n in range(23, len(tokens) + 1))
