"""Prompts in an order that any place can be found in again, cut into rounds, before there is a generator."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from core import keys
from core.plan import sample
from shell import counts, data, feed, prompts


@attrs.frozen(kw_only=True)
class Round:
    """What is drawn at once.

    Attributes:
        start: prompts used up before it; the numbers of its prompts go on from there.
        rows: its prompts.
        size: prompts of a step; the last of an epoch may have fewer.
        num_slices: steps whose prompts it has.
        num_steps: steps that it is used in.
    """

    start: int
    rows: tuple[int, ...]
    size: int
    num_slices: int
    num_steps: int


@attrs.frozen(kw_only=True, eq=False)
class Plan:
    """Prompts in an order that any place can be found in again, before there is a generator.

    A place is (prompts used up before the round, steps made of the round), and inside a round that used
    other than its own prompts up, because some were replaced, how many those are.

    Attributes:
        prompts: what is completed.
        batch_size: completions in an optimizer step, over all ranks.
        num_generations: completions of a prompt.
        steps_per_generation: steps whose prompts are drawn at once.
        num_iterations: how often a round is gone through.
        max_tokens: most tokens of a completion.
        seed: of the order; None: as they come.
        lmbda: part of the prompts that are answered by the policy; the others have answers of their own.
    """

    prompts: prompts.Prompts
    batch_size: int
    num_generations: int
    steps_per_generation: int
    num_iterations: int
    max_tokens: int
    seed: int | None
    lmbda: float = 1.0
    start: feed.Place = (0, 0)

    @property
    def num_prompts(self) -> int:
        """Return the prompts of a step."""
        return self.batch_size // self.num_generations

    @property
    def steps_per_epoch(self) -> int:
        """Return the optimizer steps of one pass over the prompts."""
        return -(-len(self.prompts) // self.num_prompts) * self.num_iterations

    @property
    def counts(self) -> counts.Counts:
        """Return what became of the rows."""
        return self.prompts.counts

    @property
    def digest(self) -> str:
        """Return a hash of all prompts and their columns."""
        return _digest(self.prompts)

    def round(self, place: feed.Place) -> Round:
        """Return the round that a place is in."""
        assert isinstance(place, tuple)
        epoch, first = divmod(place[0], len(self.prompts))
        stop = min(first + self.num_prompts * self.steps_per_generation, len(self.prompts))
        slices = -(-(stop - first) // self.num_prompts)
        return Round(
            start=place[0],
            rows=tuple(_order(self.prompts, self.seed, epoch)[first:stop].tolist()),
            size=self.num_prompts,
            num_slices=slices,
            num_steps=slices * self.num_iterations,
        )

    def writes(self, key: int, number: int) -> bool:
        """Say whether the policy answers a prompt, by a draw of its own.

        Args:
            key: of the run.
            number: of the prompt in the run.
        """
        return keys.fold_in(key, "writes", number) < self.lmbda * (keys.MASK + 1)

    def row(self, number: int) -> int:
        """Return which prompt comes at a place in the run, over the ends of epochs."""
        epoch, place = divmod(number, len(self.prompts))
        return int(_order(self.prompts, self.seed, epoch)[place])

    def after(self, place: feed.Place) -> tuple[int, ...]:
        """Return the place after the step that begins at a place."""
        assert isinstance(place, tuple)
        now = self.round(place)
        start, made = place[0], place[1] + 1
        return (start, made, *place[2:]) if made < now.num_steps else (start + _used(now, place), 0)

    def epoch(self, place: feed.Place) -> float:
        """Return the passes made at a place."""
        assert isinstance(place, tuple)
        now = self.round(place)
        return (place[0] + _used(now, place) * place[1] / now.num_steps) / len(self.prompts)

    def take(self, place: feed.Place) -> tuple[list[sample.Sample], feed.Place]:
        """Return samples of the size of the step that begins at a place: the longest completions, all unlike.

        They are for planning: what a generator will write, nobody knows.
        """
        assert isinstance(place, tuple)
        now = self.round(place)
        rows = portion(now.rows, place[1] % now.num_slices, now.size)
        made = [
            _unwritten(self.prompts.row(row).tokens, self.max_tokens, row, i * self.num_generations + j)
            for i, row in enumerate(rows)
            for j in range(self.num_generations)
        ]
        return made, self.after(place)


def portion(values: Sequence[Any], number: int, size: int) -> list[Any]:
    """Return one of the runs of a size that values are cut into."""
    return list(values[number * size : (number + 1) * size])


def _used(now: Round, place: tuple[int, ...]) -> int:
    """Return the prompts that a round uses up, seen from a place in it."""
    return place[2] if len(place) > 2 else len(now.rows)


def _unwritten(prompt: np.ndarray, length: int, group: int, number: int) -> sample.Sample:
    """Make a sample of the longest completion, unlike every other."""
    tokens = np.concatenate([prompt, np.full(length, number, np.int64)])
    return sample.Sample(
        tokens=tokens, trained=np.arange(len(tokens)) >= len(prompt), group=group, unit=number
    )


@functools.lru_cache(maxsize=1)
def _digest(rows: prompts.Prompts) -> str:
    made = hashlib.blake2b(digest_size=16)
    for values in (rows.tokens, rows.starts, rows.text, rows.lines, *(rows.answers or ())):
        made.update(np.ascontiguousarray(values).data)
    return made.hexdigest()


@functools.lru_cache(maxsize=2)
def _order(rows: prompts.Prompts, seed: int | None, epoch: int) -> np.ndarray:
    return data.epoch_order(rows, seed=seed, epoch=epoch)
