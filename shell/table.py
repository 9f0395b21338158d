"""Completions with their rewards: a table for people, and a file of all of them."""

import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rich.table

from shell import written

SHOWN = 8
"""Completions in a table."""
WIDTH = 60
"""Characters of a text in a line."""

Rows = Sequence[Mapping[str, Any]]


class File:
    """`completions.jsonl`: one JSON object a completion, with the `step` that it was drawn for.

    Nothing is written before there is something to write.
    """

    def __init__(self, folder: pathlib.Path, *, resumed: int | None) -> None:
        """Open the file of a folder.

        Args:
            folder: output_dir.
            resumed: the step that the run goes on from: what was drawn after it is removed; None: all is.
        """
        self._path = folder / written.COMPLETIONS
        if self._path.exists():
            stop = 0 if resumed is None else _until(self._path, resumed)
            os.truncate(self._path, stop)

    def write(self, step: int, rows: Rows) -> None:
        """Write what was drawn for a step.

        Args:
            step: the step that it is trained in first.
            rows: from `answers.table`.
        """
        lines = [json.dumps({"step": step, **row}, default=str) + "\n" for row in rows]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def sync(self) -> None:
        """Put the file on the disk: before a checkpoint."""
        if self._path.exists():
            with self._path.open("rb") as file:
                os.fsync(file.fileno())


def drawn(rows: Rows, *, most: int = SHOWN) -> rich.table.Table:
    """Lay completions out for a terminal.

    Args:
        rows: from `answers.table`.
        most: rows to show.
    """
    made = rich.table.Table("prompt", "completion", show_lines=False, title_justify="left")
    names = _numbers(rows)
    for name in names:
        made.add_column(name.removeprefix("rewards/"), justify="right")
    for row in rows[:most]:
        numbers = ("" if row[name] is None else f"{row[name]:.3f}" for name in names)
        made.add_row(_short(_asked(row["prompt"])), _short(row["completion"]), *numbers)
    return made


def lines(rows: Rows, *, most: int = SHOWN) -> list[str]:
    """Write completions as lines.

    Args:
        rows: from `answers.table`.
        most: rows to show.
    """
    return [
        f"  {_reward(row)}{_short(_asked(row['prompt']))} -> {_short(row['completion'])}"
        for row in rows[:most]
    ]


def _reward(row: Mapping[str, Any]) -> str:
    """Write a row's reward, nothing where nobody gives any."""
    if "reward" not in row:
        return ""
    return f"reward {'none' if row['reward'] is None else format(row['reward'], '.3f')}  "


def _numbers(rows: Rows) -> Iterable[str]:
    """Name the columns of rewards; the sum only where it is not the one function's."""
    names = [name for name in rows[0] if name.startswith("rewards/")] if rows else []
    if rows and "reward" not in rows[0]:
        return []
    return names if len(names) == 1 else [*names, "reward"]


def _asked(prompt: Any) -> str:
    """Return what a prompt says last."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))


def _short(text: str) -> str:
    """Write a text in one line that is not too long, its end being what prompts and answers differ in."""
    shown = repr(text)
    return shown if len(shown) <= WIDTH else f"{shown[: WIDTH // 2]}...{shown[-WIDTH // 2 :]}"


def _until(path: pathlib.Path, step: int) -> int:
    """Return where the lines up to a step end."""
    place = 0
    with path.open("rb") as file:
        for line in file:
            try:
                if json.loads(line)["step"] > step:
                    return place
            except (ValueError, TypeError, KeyError):  # cut by a kill
                return place
            place += len(line)
    return place
