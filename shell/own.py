"""What callers bring of their own: found by `module:name`, checked, and told of in a line where it fails.

Whatever a loss, a reduction or a reward function of the caller's raises is the caller's mistake and no fault
of ours, so it ends a run as any other mistake does: in one line, with what was trained kept.
"""

import asyncio
import contextlib
import functools
import importlib
import os
import pathlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from typing import Any, get_args

import attrs

from core import algorithms, pack
from shell import about, mistake

SCORES = tuple(field.name for field in attrs.fields(pack.Scores))
MADE = ("reference_logprobs", "mismatched", "sampled_logprobs", "old_logprobs")
"""Columns that a run makes for a loss that needs them."""

FAILURES = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)
"""What code of the caller's may raise: one that ends the program ends it without what was trained."""
_ROOT = pathlib.Path(__file__).parent.parent
_OTHERS = tuple(
    f"{path}{os.sep}"
    for path in (*(_ROOT / name for name in ("core", "adapters", "shell")), sysconfig.get_paths()["stdlib"])
)


def algorithm(name: str) -> algorithms.Algorithm:
    """Import a caller's algorithm.

    Args:
        name: `module:name`.

    Raises:
        mistake.Mistake: there is none, or it cannot be trained.
    """
    found = imported(name, "algorithm")
    if not isinstance(found, algorithms.Algorithm):
        raise mistake.Mistake(f"algorithm {name} is a {type(found).__name__}; an Algorithm was wanted")
    return checked(found, name)


def checked(found: algorithms.Algorithm, name: str = "algorithm") -> algorithms.Algorithm:
    """Refuse what cannot be trained, and let what its functions raise be the caller's mistakes.

    Args:
        found: the caller's own.
        name: what the caller called it.

    Raises:
        mistake.Mistake: names the field and what it may be.
    """
    rows, strange = get_args(algorithms.Rows), sorted({*found.watches} - {*SCORES})
    wanted = {
        "rows": (found.rows, found.rows not in rows, " or ".join(rows)),
        "columns": ("a function", found.columns is not None and found.rows != "prompts", "None"),
        "watches": (", ".join(strange), bool(strange), f"of {', '.join(SCORES)}"),
    }
    for field, (came, wrong, right) in wanted.items():
        if wrong:
            raise mistake.Mistake(f"{name}: {field} is {came}; {right} was wanted")
    others = sorted({*found.reads} & ({*SCORES, *MADE} - {"values", "logprobs"}))
    if "values" in found.needs and others:
        raise mistake.Mistake(
            f"{name}: needs are values and {', '.join(others)}; a model with a scalar head has none over the "
            "vocabulary, so values alone were wanted"
        )
    parts = {field: getattr(found, field) for field in ("loss", "reduce", "columns", "next_carry")}
    told = {field: guarded(f"{field} {_called(f)}", f) for field, f in parts.items() if f is not None}
    return attrs.evolve(found, **told)


def kin(found: algorithms.Algorithm) -> str:
    """Name the built-in algorithm whose defaults a caller's own takes: the one that trains the same rows."""
    return "reward" if found.rows == "pairs" and "values" in found.needs else about.KIN[found.rows]


def columns(found: algorithms.Algorithm) -> tuple[str, ...]:
    """Name what a loss needs that neither the model nor the run makes: columns of the dataset."""
    return tuple(name for name in dict.fromkeys(found.needs) if name not in (*SCORES, *MADE))


def imported(name: str, what: str) -> Any:
    """Import what `module:name` stands for, from the current folder too.

    Args:
        name: `module:name`.
        what: what it was named as, for messages: an option, or `algorithm`.

    Raises:
        mistake.Mistake: whatever the module raises.
    """
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())  # `python -m` does this; the console command does not
    try:
        return getattr(importlib.import_module(module), attribute)
    except FAILURES as problem:  # whatever the caller's module raises
        raise mistake.Mistake(
            f"{what} {name} cannot be imported: {type(problem).__name__}: {mistake.line(problem)}"
        ) from problem
    finally:
        sys.path.pop(0)


def guarded(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a caller's function fail as a mistake of the caller's.

    Args:
        what: what it is, for messages: `reward near`.
        function: the caller's own.
    """

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except mistake.Mistake:
            raise
        except FAILURES as problem:  # whatever the caller's code raises
            raise failed(what, problem) from problem

    return call


def failed(what: str, problem: BaseException) -> mistake.Mistake:
    """Tell that a caller's function failed, and where.

    Args:
        what: what it is, for messages: `reward near`.
        problem: what it raised.
    """
    told = mistake.line(problem)
    return mistake.Mistake(f"{what} failed: {type(problem).__name__}: {told}{_place(problem)}")


@contextlib.contextmanager
def blamed(name: str) -> Iterator[None]:
    """Tell what a step refuses of a caller's algorithm as the caller's mistake.

    Args:
        name: of the algorithm; one of ours is never to blame.
    """
    try:
        yield
    except mistake.Mistake:
        raise
    except ValueError as problem:
        if ":" not in name:
            raise
        raise mistake.Mistake(f"algorithm {name}: {mistake.line(problem)}") from problem


def _called(function: Callable[..., Any]) -> str:
    """Return a function's name, that of the one inside where its numbers are bound."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _place(problem: BaseException) -> str:
    """Return where something was raised: the innermost line that is neither ours nor a library's."""
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if not _is_others(frame.filename)]
    return "".join(f" ({os.path.basename(at.filename)}, line {at.lineno})" for at in (own or frames)[-1:])


def _is_others(path: str) -> bool:
    """Say whether a file is ours or a library's."""
    return path.startswith(_OTHERS) or "site-packages" in path or path.startswith("<")
