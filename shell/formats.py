"""Rows of people's datasets to the few kinds that are trained on. The columns tell which, once a source.

For supervised training: `text`; `messages` (or `conversations` with from and value); `prompt` and
`completion`, as text or as messages; `input_ids` with `labels`, `completion_mask` or `assistant_masks`. Other
columns are left alone.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeGuard

import attrs
import numpy as np

from shell import mistake, readers

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})

_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}

_PACKED = ("position_ids", "seq_lengths", "seq_idx", "cu_seqlens", "cu_seq_lens_q", "document_ids")

WANTED = "text; messages; conversations; prompt and completion; or input_ids"


@attrs.frozen(kw_only=True)
class Text:
    """A text, trained whole."""

    text: str


@attrs.frozen(kw_only=True)
class Exchange:
    """A prompt and what follows it, as text."""

    prompt: str
    completion: str


@attrs.frozen(kw_only=True)
class Conversation:
    """Messages for a chat template. `num_prompt` of them are the prompt; None when the row does not say."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    num_prompt: int | None = None


@attrs.frozen(kw_only=True, eq=False)
class Ids:
    """A sequence tokenized elsewhere, int64 `[length]`, and its targets (None: the row does not say)."""

    tokens: np.ndarray
    trained: np.ndarray | None = None


def supervised(columns: Collection[str], *, where: str) -> str:
    """Name the format of rows with these columns.

    Args:
        columns: what the first row brings.
        where: which dataset, for messages.

    Raises:
        Mistake: when the columns fit no format, or several.
    """
    if "input_ids" in columns:
        return "input_ids"
    fitting = [name for name in ("text", "messages", "conversations") if name in columns]
    if {"prompt", "completion"} <= set(columns):
        fitting.append("prompt and completion")
    came = ", ".join(columns) or "none"
    if len(fitting) > 1:
        raise mistake.Mistake(
            f"{where}: each of {' and '.join(fitting)} could be trained on (columns: {came}); "
            "remove all but one."
        )
    if not fitting:
        pairs = {"chosen", "rejected"} <= set(columns)
        hint = " chosen and rejected are preference rows: train them with dpo or reward." if pairs else ""
        raise mistake.Mistake(
            f"{where}: the columns are {came}; wanted for sft: {WANTED}. Rename yours.{hint}"
        )
    return fitting[0]


def parse(
    row: Mapping[str, Any], kind: str, *, where: str, template: str = ""
) -> Text | Exchange | Conversation | Ids:
    """Read one row in the format that `supervised` named.

    Args:
        row: the row.
        kind: its format.
        where: which row, for messages.
        template: the chat template; a role that it names is a role.

    Raises:
        Mistake: when a value is missing, empty where that means nothing, or of another type.
    """
    if kind == "input_ids":
        return _ids(row, where)
    if kind == "text":
        return Text(text=text_of(row, "text", where))
    if kind == "prompt and completion":
        return _prompt_completion(row, where, template)
    messages = messages_of(row, kind, where, template)
    for number, message in enumerate(messages):
        says = any(
            message.get(key)
            for key in ("content", "tool_calls", "reasoning_content", "thinking", "reasoning")
        )
        if message["role"] == "assistant" and not says:
            raise mistake.Mistake(
                f"{where}, column {kind}, message {number}: the assistant's content is empty and it calls "
                "no tool; fill it or remove the row."
            )
    return Conversation(messages=messages, tools=tools_of(row, where))


def _prompt_completion(row: Mapping[str, Any], where: str, template: str) -> Exchange | Conversation:
    """Read a prompt and its completion, both text or both messages."""
    texts = [isinstance(row.get(column), str) for column in ("prompt", "completion")]
    for column in ("prompt", "completion"):
        text_or_messages(row, column, where)
    if all(texts):
        return Exchange(prompt=row["prompt"], completion=row["completion"])
    prompt = messages_of(row, "prompt", where, template)
    completion = messages_of(row, "completion", where, template)
    return Conversation(messages=[*prompt, *completion], tools=tools_of(row, where), num_prompt=len(prompt))


def text_or_messages(row: Mapping[str, Any], column: str, where: str) -> None:
    """Refuse a column that holds neither."""
    value = row.get(column)
    if not isinstance(value, str | list | Mapping):
        raise mistake.Mistake(
            f"{where}, column {column}: {describe(value)} came; text or a list of messages is wanted."
        )


def text_of(row: Mapping[str, Any], column: str, where: str) -> str:
    """Return a column's text, or refuse what is none."""
    value = row.get(column)
    if not isinstance(value, str):
        raise mistake.Mistake(f"{where}, column {column}: {describe(value)} came; text is wanted.")
    return value


def messages_of(row: Mapping[str, Any], column: str, where: str, template: str) -> list[dict[str, Any]]:
    """Return a column's messages in the form role and content."""
    value = row.get(column)
    if is_table(value):
        # Old datasets of the hub hold a list of messages as a message of lists.
        value = [dict(zip(value, parts, strict=True)) for parts in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise mistake.Mistake(
            f"{where}, column {column}: {describe(value)} came; a list of messages is wanted, each with "
            "role and content."
        )
    if not value:
        raise mistake.Mistake(
            f"{where}, column {column}: the list of messages is empty; fill it or remove the row."
        )
    return [
        _message(message, f"{where}, column {column}, message {number}", template)
        for number, message in enumerate(value)
    ]


def is_table(value: Any) -> TypeGuard[Mapping[str, list[Any]]]:
    """Tell whether a value is an object of lists, all of one length."""
    if not isinstance(value, Mapping) or not all(isinstance(part, list) for part in value.values()):
        return False
    return len({len(part) for part in value.values()}) == 1


def _message(message: Any, where: str, template: str) -> dict[str, Any]:
    """Bring one message into the form role and content."""
    if not isinstance(message, Mapping):
        raise mistake.Mistake(
            f"{where}: {describe(message)} came; an object with role and content is wanted."
        )
    present = {key: value for key, value in message.items() if value is not None}
    if "role" not in present and "from" in present:
        present = _from_value(present, where)
    _known_role(present.get("role"), where, template)
    if present.get("tool_calls"):
        present["tool_calls"] = without_nulls(present["tool_calls"])
    else:
        present.pop("tool_calls", None)
    content = present.get("content")
    if content is None and not present.get("tool_calls"):
        raise mistake.Mistake(
            f"{where}: the content of role {present['role']} is missing; only a message with tool_calls "
            "may lack it."
        )
    if content is not None and not isinstance(content, str | list):
        raise mistake.Mistake(
            f"{where}: the content is {describe(content)}; text or a list of text parts is wanted."
        )
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise mistake.Mistake(
                f"{where}: the content has a part {str(part)[:60]!r} that is no text; only text is trained."
            )
    return present


def _known_role(role: Any, where: str, template: str) -> None:
    """Refuse a role that neither everybody's templates nor this one know."""
    named = isinstance(role, str) and (f"'{role}'" in template or f'"{role}"' in template)
    if not isinstance(role, str) or (role not in ROLES and not named):
        wanted = ", ".join(sorted(ROLES))
        raise mistake.Mistake(f"{where}: the role {role!r} is unknown; wanted is one of {wanted}.")


def role_of(named: Any) -> str | None:
    """Return the role that a `from` names, None where it names none.

    >>> role_of("gpt")
    'assistant'
    """
    return _SHAREGPT.get(named) if isinstance(named, str) else None


def _from_value(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Translate a message with from and value."""
    named = message["from"]
    role = role_of(named)
    if role is None:
        raise mistake.Mistake(
            f"{where}: the role {named!r} is unknown; wanted is one of {', '.join(_SHAREGPT)}."
        )
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    if role != "function_call":
        return {"role": role, **({"content": message["value"]} if "value" in message else {}), **rest}
    try:
        value = message.get("value")
        calls = readers.parsed(value if isinstance(value, str) else "", where)
    except mistake.Mistake:
        calls = None
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise mistake.Mistake(f"{where}: the value of {named!r} is no JSON object with name and arguments.")
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


def tools_of(row: Mapping[str, Any], where: str) -> list[Any] | None:
    """Return a row's tools, given as a list or as JSON text, without the nulls that a table adds."""
    value = row.get("tools")
    if isinstance(value, str):
        value = readers.parsed(value, f"{where}, column tools") if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise mistake.Mistake(
            f"{where}, column tools: {describe(value)} came; a list of JSON schemas is wanted."
        )
    return without_nulls(value)


def without_nulls(value: Any) -> Any:
    """Drop every field that is null, at any depth: a table gives each row the fields of all others, as nulls.

    >>> without_nulls({"a": {"type": "string"}, "b": None})
    {'a': {'type': 'string'}}
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _ids(row: Mapping[str, Any], where: str) -> Ids:
    """Read a tokenized row. Padding is what `attention_mask` says it is, never a token's value."""
    _unpacked(row, where)
    tokens = _integers(row, "input_ids", where)
    trained = None
    if row.get("labels") is not None:
        labels = _integers(row, "labels", where, len(tokens))
        trained = labels != -100
        if (labels != tokens)[trained].any():
            raise mistake.Mistake(
                f"{where}: labels differ from input_ids where they are not -100; they must be unshifted."
            )
    for column in ("completion_mask", "assistant_masks"):
        if row.get(column) is not None:
            mask = _mask(row, column, where, len(tokens))
            trained = mask if trained is None else trained & mask
    if row.get("attention_mask") is not None:
        real = _mask(row, "attention_mask", where, len(tokens))
        if (np.diff(np.flatnonzero(real)) > 1).any():
            raise mistake.Mistake(
                f"{where}, column attention_mask: zeros stand among the ones; zeros are padding, wanted at "
                "the beginning or the end alone. Remove those tokens."
            )
        tokens, trained = tokens[real], None if trained is None else trained[real]
    return Ids(tokens=tokens, trained=trained)


def _unpacked(row: Mapping[str, Any], where: str) -> None:
    """Refuse a row that says where the sequences in it begin: it would be trained as one."""
    for column in _PACKED:
        if row.get(column) is not None:
            raise mistake.Mistake(
                f"{where}, column {column}: it is for rows that hold several sequences; one a row is wanted, "
                "since packing is done here. Take packed rows apart, then remove the column."
            )


def _mask(row: Mapping[str, Any], column: str, where: str, length: int) -> np.ndarray:
    """Return a column of zeros and ones, or of false and true."""
    numbers = _integers(row, column, where, length, kinds="iub")
    odd = numbers[(numbers != 0) & (numbers != 1)]
    if len(odd):
        raise mistake.Mistake(f"{where}, column {column}: {odd[0]} came; 0 or 1 for each token is wanted.")
    return numbers != 0


def _integers(
    row: Mapping[str, Any], column: str, where: str, length: int | None = None, *, kinds: str = "iu"
) -> np.ndarray:
    """Return a column as integers, as many as tokens; `kinds` are those of numpy that it may have."""
    value = row.get(column)
    if "b" not in kinds and isinstance(value, list) and bool in set(map(type, value)):
        raise mistake.Mistake(f"{where}, column {column}: true or false came; a list of integers is wanted.")
    numbers = np.asarray(value if isinstance(value, list | np.ndarray) else None)
    if numbers.size == 0 and numbers.shape == (0,):
        numbers = numbers.astype(np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in kinds:
        raise mistake.Mistake(
            f"{where}, column {column}: {describe(value)} came; a list of integers is wanted."
        )
    if length is not None and len(numbers) != length:
        raise mistake.Mistake(f"{where}, column {column}: {len(numbers)} values beside {length} input_ids.")
    return numbers.astype(np.int64)


def describe(value: Any) -> str:
    """Describe a value that is of the wrong type."""
    if value is None:
        return "nothing (null or no such column)"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    return f"a {type(value).__name__}"
