"""Rows for a student and its teacher: a prompt and the answer to it, whoever writes the answer.

A conversation's last turn, where it is the assistant's, is the answer to what stands before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from shell import data, formats, mistake, sources

TALKS = ("messages", "conversations")


def apart(source: sources.Source) -> sources.Source:
    """Return a source whose conversations are a prompt and its completion; other rows stay as they are.

    Args:
        source: rows of any kind.
    """
    first = next(source.read(0), None)
    kind = next((name for name in TALKS if first and name in first[1] and "prompt" not in first[1]), None)
    if kind is None:
        return source

    def read(start: int) -> Iterator[sources.Located]:
        for where, row in source.read(start):
            yield where, _split(row, kind, where)

    return attrs.evolve(source, read=read)


def answered(opened: Sequence[data.Opened], share: float) -> tuple[data.Opened, ...]:
    """Return prompts as the rows with answers that part of them are trained as.

    Args:
        opened: from `prompts.look`.
        share: part of the answers that the student writes; for the message.

    Raises:
        mistake.Mistake: a source has no answers.
    """
    for one in opened:
        _, row = next(one.source.read(0))
        if "completion" not in row:
            raise mistake.Mistake(
                f"{one.source.name}: the columns are {', '.join(row)}; with lmbda {share:g} the rows bring "
                f"{1 - share:.0%} of the answers, so a column completion is wanted, or messages that end in "
                "the assistant's. lmbda 1 needs none."
            )
    return data.look([one.source for one in opened])


def _split(row: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """Take the assistant's last turn off a conversation."""
    value = row.get(kind)
    if formats.is_table(value):
        value = [dict(zip(value, parts, strict=True)) for parts in zip(*value.values(), strict=True)]
    if not isinstance(value, list) or not value:
        raise mistake.Mistake(
            f"{where}, column {kind}: {formats.describe(value)} came; a list of messages is wanted."
        )
    last = value[-1] if isinstance(value[-1], Mapping) else {}
    role = last.get("role") or formats.role_of(last.get("from"))
    rest = {name: column for name, column in row.items() if name != kind}
    if role != "assistant":
        return {"prompt": value, **rest}
    return {"prompt": value[:-1], "completion": value[-1:], **rest}
