"""Whole numbers that a caller gives: counts, budgets, ranks, epochs."""

import operator
from typing import Any


def number(name: str, value: Any, *, least: int | None = 0) -> int:
    """Return a whole number as an int, refusing what is none.

    Args:
        name: what the number is, for the line that tells of it.
        value: what came.
        least: the smallest that is taken; None: any.

    Raises:
        ValueError: it is no integer, or a smaller one.
    """
    wanted = "a whole number" if least is None else f"a whole number of at least {least}"
    try:
        found = operator.index(value)
    except TypeError as problem:
        raise ValueError(f"{name} is {value!r}; {wanted} is wanted.") from problem
    if least is not None and found < least:
        raise ValueError(f"{name} is {found}; {wanted} is wanted.")
    return found
