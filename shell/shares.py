"""How several sources share an epoch: draws by weight, and endless passes that go on where they stopped."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from core.plan import batching
from shell import mistake


class Weighted(Protocol):
    """A source with a share of an epoch."""

    @property
    def name(self) -> str:
        """Return what it is called in messages."""
        ...

    @property
    def weight(self) -> float | None:
        """Return its share, beside those of the others."""
        ...


def fractions(weights: Sequence[float | None]) -> np.ndarray:
    """Return weights as parts of 1; however large they are, their sum stays a number.

    >>> fractions([1e308, 1e308, 2e307]).round(3).tolist()
    [0.455, 0.455, 0.091]
    """
    numbers = np.array(weights, np.float64)
    numbers = numbers / numbers.max()
    return numbers / numbers.sum()


def draws(parts: Sequence[Weighted], total: int) -> list[int]:
    """Divide an epoch's draws by weight, the largest remainders rounded up."""
    exact = total * fractions([part.weight for part in parts])
    numbers = np.floor(exact).astype(np.int64)
    up = np.argsort(numbers - exact, kind="stable")[: total - int(numbers.sum())]
    numbers[up] += 1
    for part, number in zip(parts, numbers, strict=True):
        if number == 0:
            raise mistake.Mistake(
                f"dataset: the weight {part.weight} of {part.name} gives it none of an epoch's {total} rows."
            )
    return numbers.tolist()


def walk(size: int, start: int, number: int, seed: int | None) -> np.ndarray:
    """Return `number` draws from `start` on of endless passes over `size` rows, each in its own order."""
    position = np.arange(start, start + number)
    passes = {
        turn: batching.order(size, seed=seed, epoch=turn)
        for turn in range(start // size, (start + number) // size + 1)
    }
    turns, places = np.divmod(position, size)
    drawn = np.empty(number, np.int64)
    for turn, permutation in passes.items():
        chosen = turns == turn
        drawn[chosen] = permutation[places[chosen]]
    return drawn
