"""Rows to token ids and targets.

* A text is `encode(text) + eos`, unless it ends in it; all of it is trained.
* A prompt with its completion is `encode(prompt + completion) + eos`, trained after the longest common prefix
  with `encode(prompt)`, so a token that holds the end of one and the beginning of the other is trained.
* A conversation is printed once, whole, by the chat template and encoded as printed: nothing is added to it.
  It is trained whole, or after its prompt (`completion_only_loss`), or where the assistant writes
  (`assistant_only_loss`).

A begin token that both text and tokenizer bring stands once. Padding does not exist here.
"""

import re
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import transformers

from shell import chat as chats
from shell import formats, mistake, spans

_HALF = re.compile("[\ud800-\udfff]")

TRUNCATIONS = ("keep_start", "keep_end", "drop", "split")


@attrs.frozen(kw_only=True, eq=False)
class Rules:
    """How rows become samples.

    Attributes:
        tokenizer: encodes; never changed.
        chat: the template for conversations; None where rows are not.
        max_length: most tokens of a sample; None for no limit.
        truncation: what becomes of longer rows: `keep_start`, `keep_end`, `drop` (the row is left out) or
            `split` (the rest makes further samples; texts only).
        completion_only_loss: train completions alone; None means yes, for rows that have one.
        assistant_only_loss: train what the assistant writes alone (conversations).
        columns: numbers of a row that its samples carry, for a loss that reads them.
    """

    tokenizer: transformers.PreTrainedTokenizerBase
    chat: chats.Chat | None = None
    max_length: int | None = None
    truncation: str = "keep_start"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    columns: tuple[str, ...] = ()


@attrs.frozen(kw_only=True, eq=False)
class Draft:
    """One row as tokens, before `max_length`.

    Attributes:
        tokens: ids, int64 `[length]`.
        trained: targets, bool `[length]`.
        closed: whether its last target is a token that a generator stops at.
        endless: whether it is open since the tokenizer has no end token at all.
        tools_unseen: whether it brought tools that the template does not print.
    """

    tokens: np.ndarray
    trained: np.ndarray
    closed: bool = True
    endless: bool = False
    tools_unseen: bool = False


Parsed = formats.Text | formats.Exchange | formats.Conversation | formats.Ids


def check(kind: str, conversation: bool, rules: Rules, *, where: str) -> None:
    """Refuse rules that mean nothing for a format.

    Args:
        kind: the format.
        conversation: whether its rows are messages.
        rules: the rules.
        where: which dataset, for messages.
    """
    if rules.assistant_only_loss and not conversation:
        raise mistake.Mistake(f"{where}: assistant_only_loss needs conversations; the rows are {kind}.")
    if rules.completion_only_loss and kind not in ("prompt and completion", "input_ids"):
        raise mistake.Mistake(
            f"{where}: completion_only_loss needs the columns prompt and completion; the rows are {kind}."
        )
    if rules.truncation == "split" and kind not in ("text", "input_ids"):
        raise mistake.Mistake(
            f"{where}: truncation split is for texts; the rows are {kind}. Use keep_start or drop."
        )
    if rules.truncation not in TRUNCATIONS:
        raise mistake.Mistake(
            f"truncation is {rules.truncation!r}; wanted is one of {', '.join(TRUNCATIONS)}."
        )
    if rules.max_length is not None and rules.max_length < 2:
        raise mistake.Mistake(
            f"max_length is {rules.max_length}; the least is 2: a token and the one that it predicts."
        )


def drafts(rows: Sequence[tuple[str, Parsed]], rules: Rules) -> list[Draft]:
    """Encode rows of one format together.

    Args:
        rows: where each row stands, and the row.
        rules: how.

    Raises:
        Mistake: naming the row that cannot be encoded.
    """
    made: dict[int, Draft] = {}
    encoders = {
        formats.Text: _texts,
        formats.Exchange: _exchanges,
        formats.Conversation: _conversations,
        formats.Ids: _ids,
    }
    for kind, encoder in encoders.items():
        chosen: list[Any] = [number for number, (_, row) in enumerate(rows) if isinstance(row, kind)]
        if chosen:
            made.update(zip(chosen, encoder([rows[number] for number in chosen], rules), strict=True))
    return [made[number] for number in range(len(rows))]


def _texts(rows: Sequence[tuple[str, Any]], rules: Rules) -> list[Draft]:
    """Encode texts."""
    eos = rules.tokenizer.eos_token_id
    texts = [encodable(row.text, where) for where, row in rows]
    encoded = [_ended(ids, eos) for ids in encode(rules.tokenizer, texts)]
    return [
        Draft(tokens=tokens, trained=np.ones(len(tokens), bool), endless=eos is None) for tokens in encoded
    ]


def _exchanges(rows: Sequence[tuple[str, Any]], rules: Rules) -> list[Draft]:
    """Encode prompts with their completions."""
    tokenizer, eos = rules.tokenizer, rules.tokenizer.eos_token_id
    wholes = encode(tokenizer, [encodable(row.prompt + row.completion, where) for where, row in rows])
    prompts = encode(tokenizer, [row.prompt for _, row in rows])
    ends_itself = _ends_itself(tokenizer)
    result = []
    for whole, prompt in zip(wholes, prompts, strict=True):
        tokens = _ended(whole, eos)
        trained = np.ones(len(tokens), bool)
        if rules.completion_only_loss is not False:
            # A tokenizer that ends every text by itself ends the prompt too; that end is not in the whole.
            prompt = prompt[:-1] if ends_itself else prompt
            trained[: shared(tokens, prompt)] = False
        result.append(Draft(tokens=tokens, trained=trained, endless=eos is None))
    return result


def _ids(rows: Sequence[tuple[str, Any]], rules: Rules) -> list[Draft]:
    """Take ids as they are."""
    size = len(rules.tokenizer)
    result = []
    for where, row in rows:
        if len(row.tokens) and not 0 <= row.tokens.min() <= row.tokens.max() < size:
            raise mistake.Mistake(
                f"{where}, column input_ids: ids from {row.tokens.min()} to {row.tokens.max()} beside a "
                f"tokenizer of {size}; tokenize the rows with this tokenizer."
            )
        if row.trained is None and rules.completion_only_loss:
            raise mistake.Mistake(
                f"{where}: completion_only_loss needs labels or completion_mask beside input_ids."
            )
        trained = np.ones(len(row.tokens), bool) if row.trained is None else row.trained
        result.append(Draft(tokens=row.tokens, trained=trained))
    return result


def _conversations(rows: Sequence[tuple[str, Any]], rules: Rules) -> list[Draft]:
    """Print conversations, find what is trained in the print, and encode it."""
    chat = rules.chat
    assert chat is not None, "conversations are encoded with a chat template"
    printed = []
    for where, row in rows:
        try:
            printed.append(_printed(chat, row, rules))
        except mistake.Mistake as error:
            raise mistake.Mistake(f"{where}: {error}") from error
    texts = [encodable(text, where) for (text, _, _), (where, _) in zip(printed, rows, strict=True)]
    masked = any(ranges is not None for _, ranges, _ in printed)
    if masked and not rules.tokenizer.is_fast:
        raise mistake.Mistake(
            "finding the assistant's tokens needs a tokenizer that tells which characters a token holds; "
            "this one does not: use a model folder with a tokenizer.json, or train the whole conversation."
        )
    encoded = rules.tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=masked,
        verbose=False,
    )
    result = []
    for number, (text, ranges, unseen) in enumerate(printed):
        ids = np.asarray(encoded["input_ids"][number], np.int64)
        trained = np.ones(len(ids), bool)
        if ranges is not None:
            offsets = np.asarray(encoded["offset_mapping"][number], np.int64).reshape(-1, 2)
            trained = _proved(offsets, ranges, text, rows[number][0])
        short = once(ids, rules.tokenizer.bos_token_id)
        stop = max((end for _, end in ranges), default=0) if ranges is not None else len(text)
        result.append(
            Draft(
                tokens=short,
                trained=trained[len(ids) - len(short) :],
                closed=_closed(chat, text[:stop]),
                tools_unseen=unseen,
            )
        )
    return result


def _printed(
    chat: chats.Chat, row: formats.Conversation, rules: Rules
) -> tuple[str, list[spans.Span] | None, bool]:
    """Print a conversation; tell which characters are trained (None: all) and whether tools are lost."""
    messages = row.messages
    try:
        text = chats.render(chat, messages, row.tools)
    except mistake.Mistake:
        # Many templates join the content of every message, and one that only calls tools need not have any.
        messages = [{"content": "", **message} for message in messages]
        text = chats.render(chat, messages, row.tools)
    _calls_are_printed(chat, messages, row.tools, text)
    ranges = None
    if rules.assistant_only_loss:
        ranges = spans.assistant_spans(chat, messages, row.tools, text)
    if row.num_prompt is not None and rules.completion_only_loss is not False:
        start = spans.turn_start(chat, messages, row.tools, text, row.num_prompt)
        ranges = [(max(start, first), stop) for first, stop in ranges or [(0, len(text))] if stop > start]
    unseen = row.tools is not None and chats.render(chat, messages, None) == text
    return text, ranges, unseen


def _calls_are_printed(
    chat: chats.Chat, messages: Sequence[chats.Message], tools: Sequence[Any] | None, text: str
) -> None:
    """Refuse a template that leaves tool calls out: training on the rest teaches answers out of nothing."""
    for number, message in enumerate(messages):
        if not message.get("tool_calls"):
            continue
        silent = {"content": "", **{key: value for key, value in message.items() if key != "tool_calls"}}
        if chats.render(chat, [*messages[:number], silent, *messages[number + 1 :]], tools) == text:
            raise mistake.Mistake(
                f"the chat template does not print the tool_calls of message {number}; "
                "give a chat_template that does, or write the calls into content."
            )


def _proved(offsets: np.ndarray, ranges: Sequence[spans.Span], text: str, where: str) -> np.ndarray:
    """Return the mask of the ranges, having made sure that each found tokens."""
    if len(offsets) and (np.diff(offsets[:, 0]) < 0).any():
        raise mistake.Mistake(
            f"{where}: the tokenizer's character offsets run backwards; train the whole conversation."
        )
    for first, stop in ranges:
        if text[first:stop].strip() and not spans.token_mask(offsets, [(first, stop)], len(text)).any():
            raise mistake.Mistake(
                f"{where}: no token holds {text[first:stop][:40]!r}: the tokenizer's offsets are wrong."
            )
    return spans.token_mask(offsets, ranges, len(text))


def _closed(chat: chats.Chat, text: str) -> bool:
    """Tell whether a text ends in a special token, white space aside."""
    text = text.rstrip()
    return any(text.endswith(token) for token in chat.special.findall(text[-64:]))


def encodable(text: str, where: str) -> str:
    """Return a text, or refuse what no tokenizer takes: half of a surrogate pair, which JSON can hold.

    Args:
        text: of a row.
        where: which row, for messages.

    Raises:
        Mistake: names the row and what stands around the half.
    """
    half = None if text.isascii() else _HALF.search(text)
    if half is not None:
        around = text[max(half.start() - 20, 0) : half.end() + 20]
        raise mistake.Mistake(
            f"{where}: the text holds {half.group()!a}, half of a surrogate pair, in {around!a}; such a half "
            "is no character: remove it."
        )
    return text


def encode(tokenizer: transformers.PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """Encode plain texts with what the tokenizer adds to each; a doubled begin token is taken once."""
    encoded = tokenizer(list(texts), return_attention_mask=False, verbose=False)["input_ids"]
    return [once(np.asarray(ids, np.int64), tokenizer.bos_token_id) for ids in encoded]  # pyright: ignore[reportGeneralTypeIssues]


def prompt_ids(tokenizer: transformers.PreTrainedTokenizerBase, prompt: str) -> np.ndarray:
    """Encode a prompt by itself, as generation sees it."""
    ids = encode(tokenizer, [prompt])[0]
    return ids[:-1] if _ends_itself(tokenizer) else ids


def continuation(tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> np.ndarray:
    """Encode what follows a prompt, apart from it, and end it in eos."""
    ids = tokenizer([text], add_special_tokens=False, return_attention_mask=False, verbose=False)
    return _ended(np.asarray(ids["input_ids"][0], np.int64), tokenizer.eos_token_id)


def _ends_itself(tokenizer: transformers.PreTrainedTokenizerBase) -> bool:
    """Tell whether a tokenizer ends every text in eos."""
    eos = tokenizer.eos_token_id
    return eos is not None and list(encode(tokenizer, ["a"])[0][-1:]) == [eos]


def once(ids: np.ndarray, bos: Any) -> np.ndarray:
    """Drop the second of two begin tokens: one that a template prints and a tokenizer adds again."""
    return ids[1:] if bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos else ids


def _ended(ids: np.ndarray, eos: Any) -> np.ndarray:
    """End in eos, once."""
    return ids if eos is None or (len(ids) and ids[-1] == eos) else np.append(ids, np.int64(eos))


def shared(first: np.ndarray, second: np.ndarray) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length
