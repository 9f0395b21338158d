"""The checker of annotations: beartype, to which an int is a float as it is to every other checker."""

from collections.abc import Callable
from typing import Any

import beartype

_check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
_made: dict[tuple[Any, ...], Callable[..., Any]] = {}


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that checks the annotations of another.

    A function inside of another comes again with each call of that, and to make its checks costs more than
    what it does: they are made once for all that are alike. What is handed in here is made by jaxtyping and
    has no body but these checks.
    """
    if "<locals>" not in function.__qualname__:
        return _check(function)
    hints = tuple((name, repr(hint)) for name, hint in function.__annotations__.items())
    key = (function.__module__, function.__qualname__, function.__code__, hints)
    if key not in _made:
        _made[key] = _check(function)
    return _made[key]
