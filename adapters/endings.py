"""When a completion is over: by its newest token, or by a text that this token completed."""

from collections.abc import Callable, Collection, Sequence

Decoder = Callable[[Sequence[int]], str]

# What may go wrong at the front of a cut: the rest of a character, at most three bytes, and a space.
_SLACK = 4


def ends(
    tokens: Sequence[int],
    stop_ids: Collection[int],
    stop_strings: Sequence[str] = (),
    decode: Decoder | None = None,
) -> bool:
    """Say whether the newest token ends a completion; asked after each token.

    A character whose bytes are several tokens is there with the last of them, as the decoder says.

    >>> ends([3, 9], (7, 9))
    True
    >>> ends([72, 105], (), ["i"], lambda ids: bytes(ids).decode(errors="replace"))
    True

    Args:
        tokens: all of the completion so far.
        stop_ids: tokens that end it.
        stop_strings: texts that end it; none is empty.
        decode: token ids to text; without it no text ends anything.
    """
    if tokens[-1] in stop_ids:
        return True
    if decode is None or not stop_strings:
        return False
    longest = max(len(s.encode()) for s in stop_strings) + _SLACK
    return _holds(_tail(tokens, longest, decode), stop_strings) and _holds(decode(tokens), stop_strings)


def _holds(text: str, strings: Sequence[str]) -> bool:
    return any(s in text for s in strings)


def _tail(tokens: Sequence[int], wanted: int, decode: Decoder) -> str:
    """Decode the end of a completion, long enough to hold a text that its last token completed.

    A token is mostly a byte or more, and what a decoder makes of the first tokens of a cut, half a character
    or a lost space, stays at the front. Where tokens have no text the tail is made longer.
    """
    size = wanted
    text = decode(tokens[-size:])
    while len(text) < wanted and size < len(tokens):
        size *= 2
        text = decode(tokens[-size:])
    return text
