"""Columns of a dataset that a loss reads: a number of each row, carried with every sample made of it."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from shell import formats, mistake, own, translate, truncate

MADE = {"pairs": ("margin",), "unpaired": ("label",)}
"""Columns that are read of such rows anyway."""


def check(names: Sequence[str], there: Iterable[str], rows: str, *, where: str) -> None:
    """Refuse a column that a loss needs and that the rows do not have.

    Args:
        names: what the loss needs that neither the model nor the run makes.
        there: columns of the first row.
        rows: what an algorithm trains on them: `text`, `pairs`, `unpaired` or `prompts`.
        where: which dataset.

    Raises:
        Mistake: names the column, those that are there, and the nearest right name.
    """
    columns = [*there]
    for name in names:
        if name in columns or name in MADE.get(rows, ()):
            continue
        hint = translate.hint(name, [*columns, *own.SCORES, *own.MADE])
        raise mistake.Mistake(
            f"{where}: the algorithm needs {name!r}, which is no column there ({', '.join(columns)}), no "
            f"field of the scores ({', '.join(own.SCORES)}) and nothing that a run makes "
            f"({', '.join(own.MADE)}).{hint}"
        )


def added(
    made: Sequence[list[truncate.Piece]], rows: Sequence[tuple[str, Mapping[str, Any]]], names: Sequence[str]
) -> list[list[truncate.Piece]]:
    """Give the samples of each row the numbers of its columns.

    Args:
        made: the samples of each row.
        rows: where each row stands, and the row.
        names: of the columns; those that samples have already stay as they are.

    Raises:
        Mistake: names a row whose value is no number.
    """
    if not names:
        return list(made)
    return [
        [
            attrs.evolve(piece, columns={**numbers(row, names, where=where), **piece.columns})
            for piece in pieces
        ]
        for pieces, (where, row) in zip(made, rows, strict=True)
    ]


def numbers(row: Mapping[str, Any], names: Sequence[str], *, where: str) -> dict[str, float]:
    """Return the numbers of a row's columns, without those that the row does not have to have.

    Args:
        row: the row.
        names: of the columns.
        where: which row, for messages.

    Raises:
        Mistake: a value is no finite number.
    """
    made = {name for known in MADE.values() for name in known}
    return {name: number(row, name, where=where) for name in names if name in row or name not in made}


def number(row: Mapping[str, Any], name: str, *, where: str) -> float:
    """Return a finite number of a row; true and false are 1 and 0.

    Args:
        row: the row.
        name: of the column.
        where: which row, for messages.

    Raises:
        Mistake: it is none.
    """
    value = row.get(name)
    if not isinstance(value, int | float):
        raise mistake.Mistake(f"{where}, column {name}: {formats.describe(value)} came; a number is wanted.")
    if not abs(value) <= sys.float_info.max:
        raise mistake.Mistake(
            f"{where}, column {name}: {str(value)[:40]} came; a finite number is wanted. Mend the row."
        )
    return float(value)
