"""Learning-rate schedules: the number of updates done so far in, a factor of the base rate out.

The first update of a run sees 0 updates done: ten updates of `linear` from 1 are made at 1.0, 0.9 ... 0.1.
"""

import math
from collections.abc import Callable

from core import whole

Schedule = Callable[[int], float]


def constant(*, num_warmup: int = 0) -> Schedule:
    """Stay at 1 after a linear rise over `num_warmup` updates."""
    whole.number("num_warmup", num_warmup)
    return lambda done: _rise(done, num_warmup)


def linear(*, num_updates: int, num_warmup: int = 0) -> Schedule:
    """Rise over `num_warmup` updates, then fall in a line that reaches 0 after `num_updates`.

    f(k) = k / warmup                                 for k < warmup
    f(k) = (updates - k) / (updates - warmup)         afterwards, never below 0
    """
    _check(num_updates, num_warmup)
    return lambda done: min(_rise(done, num_warmup), 1.0 - _passed(done, num_updates, num_warmup))


def cosine(*, num_updates: int, num_warmup: int = 0, floor: float = 0.0) -> Schedule:
    """Rise over `num_warmup` updates, then fall along half a cosine to `floor` after `num_updates`.

        f(k) = floor + (1 - floor) (1 + cos(pi (k - warmup) / (updates - warmup))) / 2

    Loshchilov & Hutter 2017 (arXiv:1608.03983), eq. 5 without restarts.

    Args:
        num_updates: updates in the whole run.
        num_warmup: updates of the linear rise.
        floor: what is left at the end, a fraction of the base rate.

    Raises:
        ValueError: a number of updates is not whole or negative, or `floor` is no fraction.
    """
    _check(num_updates, num_warmup)
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"floor is {floor}; a fraction of the base rate, from 0 to 1, is wanted.")

    def factor(done: int) -> float:
        if (rise := _rise(done, num_warmup)) < 1.0:
            return rise
        wave = (1.0 + math.cos(math.pi * _passed(done, num_updates, num_warmup))) / 2.0
        return floor + (1.0 - floor) * wave

    return factor


def _check(num_updates: int, num_warmup: int) -> None:
    """Refuse a run without updates, and numbers of them that are not whole."""
    whole.number("num_updates", num_updates, least=1)
    whole.number("num_warmup", num_warmup)


def _rise(done: int, num_warmup: int) -> float:
    """Return how far the warm-up has come, 1 without one."""
    if done < 0:
        raise ValueError(f"{done} updates are done; the number of the next one is wanted, 0 for the first.")
    return 1.0 if done >= num_warmup else done / num_warmup


def _passed(done: int, num_updates: int, num_warmup: int) -> float:
    """Return the part of the fall that lies behind, in [0, 1]."""
    return min(1.0, max(0.0, (done - num_warmup) / max(1, num_updates - num_warmup)))
