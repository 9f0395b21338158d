"""From a batch on which something fails to a smallest one: what is left over is what the fault needs.

Every step leaves something out or makes a number plainer, and is kept where the batch still fails: first
whole groups and units, then tokens, then targets, then digits.
"""

from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np

from core.plan import sample

Samples = Sequence[sample.Sample]
Moves = Callable[[Samples], Iterator[list[sample.Sample]]]


def smallest(samples: Samples, fails: Callable[[Samples], bool]) -> tuple[sample.Sample, ...]:
    """Return a batch that still fails and of which nothing can be left out.

    Args:
        samples: a batch that fails. Units stay whole, and every sample keeps a trained token.
        fails: says whether a batch still fails in the same way.
    """
    while True:
        made = samples
        for moves in _MOVES:
            made = _kept(made, moves, fails)
        if made is samples:
            return tuple(samples)
        samples = made


def _kept(samples: Samples, moves: Moves, fails: Callable[[Samples], bool]) -> Samples:
    """Make all moves of one kind that leave the batch failing."""
    place = 0
    while True:
        candidate = next((one for i, one in enumerate(moves(samples)) if i == place), None)
        if candidate is None:
            return samples
        if fails(candidate):
            samples = candidate  # what stood after this move is now at its place
        else:
            place += 1


def _fewer_groups(samples: Samples) -> Iterator[list[sample.Sample]]:
    """Leave one group out."""
    for group in dict.fromkeys(s.group for s in samples):
        kept = [s for s in samples if s.group != group]
        if kept:
            yield kept


def _fewer_units(samples: Samples) -> Iterator[list[sample.Sample]]:
    """Leave one unit out."""
    for unit in dict.fromkeys(s.unit for s in samples):
        kept = [s for s in samples if s.unit != unit]
        if kept:
            yield kept


def _shorter(samples: Samples) -> Iterator[list[sample.Sample]]:
    """Leave one token out."""
    for i, one in enumerate(samples):
        for place in range(len(one.tokens)):
            trained = np.delete(one.trained, place)
            if not trained[1:].any():
                continue
            trained[0] = False
            columns = {
                name: np.delete(values, place) if isinstance(values, np.ndarray) else values
                for name, values in one.columns.items()
            }
            share = None if one.share is None else np.delete(one.share, place)
            tokens = np.delete(one.tokens, place)
            yield _with(
                samples, i, attrs.evolve(one, tokens=tokens, trained=trained, columns=columns, share=share)
            )


def _fewer_targets(samples: Samples) -> Iterator[list[sample.Sample]]:
    """Train one token fewer."""
    for i, one in enumerate(samples):
        targets = np.flatnonzero(one.trained)
        for place in targets if len(targets) > 1 else ():
            trained = one.trained.copy()
            trained[place] = False
            yield _with(samples, i, attrs.evolve(one, trained=trained))


def _plainer_tokens(samples: Samples) -> Iterator[list[sample.Sample]]:
    """Write a token as 0."""
    for i, one in enumerate(samples):
        for place in np.flatnonzero(one.tokens):
            tokens = one.tokens.copy()
            tokens[place] = 0
            yield _with(samples, i, attrs.evolve(one, tokens=tokens))


def _plainer_columns(samples: Samples) -> Iterator[list[sample.Sample]]:
    """Write a column as zeros, or with fewer digits."""
    for i, one in enumerate(samples):
        for name, values in one.columns.items():
            for plain in _plainer(np.asarray(values, np.float64)):
                value = plain if isinstance(values, np.ndarray) else float(plain)
                yield _with(samples, i, attrs.evolve(one, columns={**one.columns, name: value}))


def _plainer(values: np.ndarray) -> Iterator[np.ndarray]:
    """Round to ever more digits, as long as that is rounder than the values are."""
    for plain in (np.zeros_like(values), *(np.round(values, digits) + 0.0 for digits in range(3))):
        if np.array_equal(plain, values):
            return
        yield plain


def _with(samples: Samples, place: int, one: sample.Sample) -> list[sample.Sample]:
    """Return the samples with another one at a place."""
    return [*samples[:place], one, *samples[place + 1 :]]


_MOVES: tuple[Moves, ...] = (
    _fewer_groups,
    _fewer_units,
    _shorter,
    _fewer_targets,
    _plainer_tokens,
    _plainer_columns,
)
