"""Model folders of other people: what is wrong with one, told in a line."""

import json
import os
import pathlib

import safetensors

from shell import mistake

WEIGHTS = "*.safetensors"
GENERATION = "generation_config.json"


def check(what: str, folder: pathlib.Path) -> None:
    """Refuse a folder without weights, or with a file of weights that cannot be read or was cut.

    Args:
        what: what the folder is called in the message.
        folder: a model folder; only the heads of its files are read.

    Raises:
        mistake.Mistake: names the file and what is wrong with it: weights, or how sequences are generated.
    """
    files = sorted(folder.glob(WEIGHTS))
    if not files:
        raise mistake.Mistake(
            f"{what} has a config and no weights: {WEIGHTS} were wanted (pickled ones are not read)"
        )
    for file in files:
        if problem := _unreadable(file):
            raise mistake.Mistake(
                f"{what}: its weights {file.name} cannot be read ({problem}); copy the folder again"
            )
    _check_generation(what, folder / GENERATION)


def _check_generation(what: str, file: pathlib.Path) -> None:
    """Refuse ends of sequences that cannot be read: others would be taken in their place without a word."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as problem:
        raise mistake.Mistake(
            f"{what}: its {file.name} cannot be read ({first_line(problem)}); copy it again, or take it away"
        ) from problem
    if not isinstance(found, dict):
        raise mistake.Mistake(f"{what}: its {file.name} holds no mapping; copy it again, or take it away")


def first_line(problem: BaseException) -> str:
    """Return the first line of what went wrong, and the next where that one only announces it."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    if not lines:
        return type(problem).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _unreadable(file: pathlib.Path) -> str | None:
    """Say why a file of weights cannot be read, or None."""
    try:
        # safetensors says of every file that it cannot open that there is none.
        with file.open("rb"), safetensors.safe_open(file, framework="pt"):
            return None
    except OSError as problem:
        return problem.strerror or os.strerror(problem.errno or 0)
    except safetensors.SafetensorError as problem:
        return first_line(problem)
