"""Which characters of a printed conversation the model is to write: assistant turns, and all after a prompt.

A conversation is printed once, whole. Turns are then found inside that one text, never printed alone: many
templates print a turn differently at the end of a conversation than in its middle. Two proofs are known,
tried in this order:

1. the template's own generation markers;
2. prefixes: when printing the first n messages (with the generation prompt) gives a prefix of the whole, the
   turn begins right after it. Where history is printed differently, the message is exchanged for a stand-in
   and the two prints are compared: what differs is the message's.

A row for which neither holds is refused, never guessed.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from shell import chat as chats
from shell import mistake

Span = tuple[int, int]

_ADVICE = "give a chat_template with {% generation %} markers around what the assistant writes"


def assistant_spans(
    chat: chats.Chat, messages: Sequence[chats.Message], tools: Sequence[Any] | None, text: str
) -> list[Span]:
    """Return the characters of each assistant turn, its closing token included.

    Args:
        chat: the template.
        messages: the conversation.
        tools: its tools.
        text: the conversation as `chat.render` prints it whole.

    Raises:
        Mistake: when the turns cannot be proved.
    """
    if chat.marked is not None:
        return [_closed(chat, text, span) for span in _marked_spans(chat, messages, tools, text)]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    spans = []
    for turn in turns:
        start = turn_start(chat, messages, tools, text, turn)
        stop = _turn_stop(chat, messages, tools, text, turn)
        if start >= stop or (spans and start < spans[-1][1]):
            raise mistake.Mistake(f"assistant turns overlap in the print at message {turn}; {_ADVICE}.")
        spans.append((start, _without_trail(chat, text, start, stop)))
    return spans


def turn_start(
    chat: chats.Chat, messages: Sequence[chats.Message], tools: Sequence[Any] | None, text: str, turn: int
) -> int:
    """Return where the model begins to write message number `turn`: after its generation prompt.

    Raises:
        Mistake: when that cannot be proved.
    """
    if turn:
        prompt = _try(chat, messages[:turn], tools, generation_prompt=True)
        if prompt is not None and text.startswith(prompt):
            return len(prompt)
    header = _header(chat, messages, tools, max(turn, 1))
    begin, _ = _differing(chat, messages, tools, text, turn)
    found = text.rfind(header, 0, begin) if header else -1
    floor = _differing(chat, messages, tools, text, turn - 1)[1] if turn else 0
    if found < floor:
        raise mistake.Mistake(
            f"cannot prove where message {turn} begins in the print of the conversation; {_ADVICE}."
        )
    return found + len(header)


def token_mask(offsets: np.ndarray, spans: Sequence[Span], length: int) -> np.ndarray:
    """Return True for each token that holds a character of a span, bool `[tokens]`.

    Tokens that share one character (its bytes) have the same offsets, so characters are never taken in part.
    A token without characters of its own counts as the character that it stands at.

    Args:
        offsets: first character and one past the last of each token, `[tokens, 2]`.
        spans: half-open ranges of characters.
        length: characters of the text.
    """
    inside = np.zeros(length + 1, np.int64)
    for start, stop in spans:
        inside[start:stop] = 1
    before = np.concatenate([[0], np.cumsum(inside)])
    starts, stops = offsets[:, 0], offsets[:, 1]
    stops = np.maximum(stops, np.minimum(starts + 1, length + 1))
    return before[stops] > before[starts]


def _marked_spans(
    chat: chats.Chat, messages: Sequence[chats.Message], tools: Sequence[Any] | None, text: str
) -> list[Span]:
    """Read the spans off a print in which the generation markers are characters."""
    if chats.OPEN in text or chats.CLOSE in text:
        raise mistake.Mistake(
            f"the text holds {chats.OPEN!a} or {chats.CLOSE!a}, private characters that mark the assistant's "
            "turns here; take them out of the row."
        )
    marked = chats.render(chat, messages, tools, template=chat.marked)
    if marked.replace(chats.OPEN, "").replace(chats.CLOSE, "") != text:
        raise mistake.Mistake(
            "the chat template edits the text between its generation markers, so the assistant's tokens "
            "cannot be found; print that text as it is between the markers."
        )
    spans, position, opened = [], 0, 0
    for piece in re.split(f"([{chats.OPEN}{chats.CLOSE}])", marked):
        if piece == chats.OPEN:
            opened = position
        elif piece == chats.CLOSE:
            spans.append((opened, position))
        else:
            position += len(piece)
    return [span for span in spans if span[0] < span[1]]


def _closed(chat: chats.Chat, text: str, span: Span) -> Span:
    """Take in the turn's closing token where the markers stop right before it: a model must learn to stop."""
    start, stop = span
    if chat.closer is not None and text.startswith(chat.closer, stop):
        stop += len(chat.closer)
    return start, stop


def _turn_stop(
    chat: chats.Chat, messages: Sequence[chats.Message], tools: Sequence[Any] | None, text: str, turn: int
) -> int:
    """Return where the print of an assistant turn ends."""
    if turn == len(messages) - 1:
        return len(text)
    through = _try(chat, messages[: turn + 1], tools)
    if through is not None and text.startswith(through):
        return len(through)
    _, end = _differing(chat, messages, tools, text, turn)
    limit, _ = _differing(chat, messages, tools, text, turn + 1)
    found = text.find(chat.closer, end, limit) if chat.closer is not None else -1
    if found < 0 or (through is not None and not through.rstrip().endswith(str(chat.closer))):
        raise mistake.Mistake(
            f"cannot prove where message {turn} ends in the print of the conversation; {_ADVICE}."
        )
    return found + len(str(chat.closer))


def _without_trail(chat: chats.Chat, text: str, start: int, stop: int) -> int:
    """Leave out white space after the closing token: generation has ended before it."""
    trimmed = start + len(text[start:stop].rstrip())
    closing = [match.end() for match in chat.special.finditer(text, start, stop)]
    return trimmed if closing and closing[-1] == trimmed else stop


def _header(
    chat: chats.Chat, messages: Sequence[chats.Message], tools: Sequence[Any] | None, turn: int
) -> str:
    """Return what an assistant turn is opened with: the generation prompt alone."""
    before = _try(chat, messages[:turn], tools)
    prompt = _try(chat, messages[:turn], tools, generation_prompt=True)
    if before is None or prompt is None or not prompt.startswith(before):
        return ""
    through = _try(chat, messages[: turn + 1], tools)
    if through is not None and through.startswith(before):
        # The generation prompt may open more than the turn was printed with (a block of thoughts).
        prompt = prompt[: _whole_tokens(chat, _common(prompt, through), prompt, through)]
    return prompt[len(before) :]


def _differing(
    chat: chats.Chat, messages: Sequence[chats.Message], tools: Sequence[Any] | None, text: str, turn: int
) -> Span:
    """Return the characters that change when one message's words are exchanged for a stand-in."""
    other = _try(chat, [*messages[:turn], _exchanged(messages[turn]), *messages[turn + 1 :]], tools)
    if other is None or chats.STAND_IN not in other:
        raise mistake.Mistake(f"cannot find message {turn} in the print of the conversation; {_ADVICE}.")
    start = _common(text, other)
    most = min(len(text), len(other)) - start
    tail = _common(text[: -most - 1 : -1], other[: -most - 1 : -1]) if most else 0
    outside = other[:start] + other[len(other) - tail :]
    if chats.STAND_IN in outside:
        raise mistake.Mistake(f"the chat template prints message {turn} in several places; {_ADVICE}.")
    return start, len(text) - tail


def _exchanged(message: chats.Message) -> dict[str, Any]:
    """Return a message whose words are the stand-in and whose kind (an answer, a call) is the same."""
    changed = dict(message)
    if changed.get("tool_calls"):
        call = {"name": chats.STAND_IN, "arguments": {chats.STAND_IN: chats.STAND_IN}}
        changed["tool_calls"] = [{"type": "function", "function": call}]
    if changed.get("content") or not changed.get("tool_calls"):
        changed["content"] = chats.STAND_IN
    return changed


def _try(
    chat: chats.Chat,
    messages: Sequence[chats.Message],
    tools: Sequence[Any] | None,
    *,
    generation_prompt: bool = False,
) -> str | None:
    """Print a part of a conversation; None where the template refuses that part."""
    try:
        return chats.render(chat, messages, tools, generation_prompt=generation_prompt)
    except mistake.Mistake:
        return None


def _common(first: str, second: str) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle)
    return low


def _whole_tokens(chat: chats.Chat, position: int, *texts: str) -> int:
    """Move a position that stands inside an added token of one of the texts to that token's beginning."""
    added = sorted(
        (token.content for token in chat.tokenizer.added_tokens_decoder.values()), key=len, reverse=True
    )
    for text in texts:
        for token in added:
            first = text.find(token, max(position - len(token) + 1, 0), position + len(token) - 1)
            if 0 <= first < position:
                position = first
    return position
