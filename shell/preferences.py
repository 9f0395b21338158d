"""Rows that say which answers are better: pairs of answers, and single answers with a label.

Pairs: `chosen` and `rejected`, with the `prompt` of both or with the prompt inside of them, as text or as
messages; a `margin` where there is one. Labeled answers: `prompt` and `completion`, or `messages` of which
the last is the answer, with `label`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from shell import carried, formats, mistake

EXPLICIT = "prompt, chosen and rejected"
IMPLICIT = "chosen and rejected"
LABELED = "prompt, completion and label"
LABELED_MESSAGES = "messages and label"

Side: TypeAlias = formats.Text | formats.Exchange | formats.Conversation


@attrs.frozen(kw_only=True)
class Pair:
    """Two answers to one prompt. Sides that are `Text` hold the prompt themselves."""

    chosen: Side
    rejected: Side
    margin: float = 0.0


@attrs.frozen(kw_only=True)
class Labeled:
    """One answer, and whether it is a good one."""

    side: Side
    label: float


def kind(columns: Collection[str], rows: str, *, where: str) -> str:
    """Name the format of rows with these columns.

    Args:
        columns: what the first row brings.
        rows: `pairs` or `unpaired`.
        where: which dataset, for messages.

    Raises:
        Mistake: when the columns fit no format.
    """
    names = set(columns)
    if rows == "pairs" and {"chosen", "rejected"} <= names:
        return EXPLICIT if "prompt" in names else IMPLICIT
    if rows == "unpaired" and "label" in names:
        if {"prompt", "completion"} <= names:
            return LABELED
        if "messages" in names:
            return LABELED_MESSAGES
    wanted = {
        "pairs": "chosen and rejected, with or without prompt",
        "unpaired": "prompt, completion and label; or messages and label",
    }[rows]
    hint = ""
    if rows == "unpaired" and {"chosen", "rejected"} <= names:
        hint = " chosen and rejected are pairs: train them with dpo or reward."
    if rows == "pairs" and "label" in names:
        hint = " A label says that rows are unpaired: train them with kto."
    raise mistake.Mistake(
        f"{where}: the columns are {', '.join(columns) or 'none'}; wanted: {wanted}. Rename yours.{hint}"
    )


def is_conversation(row: Mapping[str, Any], name: str) -> bool:
    """Say whether a row of a format holds messages."""
    texts = {LABELED: ("prompt", "completion"), LABELED_MESSAGES: ()}.get(name, ("chosen",))
    return not texts or any(isinstance(row[column], list | Mapping) for column in texts)


def parse(row: Mapping[str, Any], name: str, *, where: str, template: str = "") -> Pair | Labeled:
    """Read one row in the format that `kind` named.

    Args:
        row: the row.
        name: its format.
        where: which row, for messages.
        template: the chat template; a role that it names is a role.

    Raises:
        Mistake: when a value is missing, empty where that means nothing, or of another type.
    """
    if name == LABELED:
        side = formats.parse(row, "prompt and completion", where=where, template=template)
        assert isinstance(side, formats.Exchange | formats.Conversation)
        if isinstance(side, formats.Conversation):
            _answered(side.messages, where, "completion")
        return Labeled(side=side, label=_label(row, where))
    if name == LABELED_MESSAGES:
        messages = formats.messages_of(row, "messages", where, template)
        _answered(messages, where, "messages")
        side = formats.Conversation(
            messages=messages, tools=formats.tools_of(row, where), num_prompt=len(messages) - 1
        )
        return Labeled(side=side, label=_label(row, where))
    for column in ("chosen", "rejected"):
        formats.text_or_messages(row, column, where)
    if isinstance(row.get("chosen"), str):
        sides = _texts(row, name, where)
    else:
        sides = _conversations(row, name, where, template)
    return Pair(chosen=sides[0], rejected=sides[1], margin=_margin(row, where))


def _texts(row: Mapping[str, Any], name: str, where: str) -> list[Side]:
    """Read two answers that are text."""
    answers = [formats.text_of(row, column, where) for column in ("chosen", "rejected")]
    if name == IMPLICIT:
        return [formats.Text(text=answer) for answer in answers]
    prompt = formats.text_of(row, "prompt", where)
    return [formats.Exchange(prompt=prompt, completion=answer) for answer in answers]


def _conversations(row: Mapping[str, Any], name: str, where: str, template: str) -> list[Side]:
    """Read two answers that are messages, after a prompt of messages or as whole conversations."""
    both = []
    for column in ("chosen", "rejected"):
        # Some datasets hold a side as its one message.
        value = [row[column]] if isinstance(row.get(column), Mapping) and _is_message(row[column]) else None
        read = row if value is None else {column: value}
        both.append(formats.messages_of(read, column, where, template))
    prompt: list[dict[str, Any]] = []
    if name == EXPLICIT and not isinstance(row.get("prompt"), str):
        prompt = formats.messages_of(row, "prompt", where, template)
    if not all(side[: len(prompt)] == prompt for side in both):
        both = [[*prompt, *side] for side in both]
    start = len(prompt) or min(_common(*both), *(len(side) - 1 for side in both))
    if isinstance(row.get("prompt"), str) and row["prompt"] not in [
        m.get("content") for m in both[0][:start]
    ]:
        raise mistake.Mistake(
            f"{where}, column prompt: text came beside chosen and rejected of messages that do not begin "
            "with it; a list of messages is wanted."
        )
    tools = formats.tools_of(row, where)
    sides: list[Side] = []
    for column, messages in zip(("chosen", "rejected"), both, strict=True):
        first = messages[start]["role"] if start < len(messages) else "none"
        if first != "assistant":
            raise mistake.Mistake(
                f"{where}, column {column}: it parts from the other side with a message of the role {first}; "
                "two answers of the assistant to one prompt are wanted. Remove the row."
            )
        _answered(messages, where, column)
        sides.append(formats.Conversation(messages=messages, tools=tools, num_prompt=start))
    return sides


def _is_message(value: Mapping[str, Any]) -> bool:
    """Tell one message from a list of messages that is held as a message of lists."""
    return not formats.is_table(value)


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many messages two conversations begin with alike."""
    size = min(len(first), len(second))
    return next((i for i in range(size) if first[i] != second[i]), size)


def _answered(messages: Sequence[Mapping[str, Any]], where: str, column: str) -> None:
    """Refuse a conversation that does not end with an answer."""
    last = messages[-1]["role"]
    if last != "assistant":
        raise mistake.Mistake(
            f"{where}, column {column}: the last message has the role {last}; an answer of the assistant is "
            "wanted there."
        )


def _label(row: Mapping[str, Any], where: str) -> float:
    """Return a row's label, 1 for a good answer."""
    value = row.get("label")
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return float(value)
    raise mistake.Mistake(
        f"{where}, column label: {value!r} came; true or 1 for a good answer, false or 0 for a bad one is "
        "wanted."
    )


def _margin(row: Mapping[str, Any], where: str) -> float:
    """Return by how much the chosen answer is better; 0 where the row does not say."""
    return 0.0 if row.get("margin") is None else carried.number(row, "margin", where=where)
