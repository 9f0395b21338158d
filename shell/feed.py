"""From the place in the data to the packs of a step."""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import attrs
import numpy as np
import torch

from core import algorithms, pack, padded, ports
from core.plan import batching, cost, mismatch, sample
from core.plan import sizes as sizes_
from shell import counts as counts_
from shell import data, encode, mistake, stream

Place: TypeAlias = int | tuple[int, ...]
Arrange: TypeAlias = Callable[[list[sample.Sample]], list[sample.Sample]]

_PLACE = tuple(field.name for field in attrs.fields(stream.Place))


def as_they_come(samples: list[sample.Sample]) -> list[sample.Sample]:
    """Leave the samples of a step as they are."""
    return samples


def with_mismatched(samples: list[sample.Sample], *, max_length: int | None) -> list[sample.Sample]:
    """Add each prompt of a step once more, with the completion of another row; see `mismatch.rotated`.

    The rest of an epoch may be one row alone: there is no other then, and nothing is added.

    Args:
        samples: of the whole step.
        max_length: what is added is cut to so many tokens.
    """
    if len(samples) == 1:
        return [attrs.evolve(s, columns={**s.columns, "mismatched": 0.0}) for s in samples]
    return [
        attrs.evolve(s, tokens=s.tokens[:max_length], trained=s.trained[:max_length])
        for s in mismatch.rotated(samples)
    ]


class Feed(Protocol):
    """Samples in an order that any place can be found in again."""

    @property
    def batch_size(self) -> int:
        """Return the rows of an optimizer step."""
        ...

    @property
    def steps_per_epoch(self) -> int | None:
        """Return the optimizer steps of one pass, None where nobody knows."""
        ...

    @property
    def start(self) -> Place:
        """Return the place before the first row."""
        ...

    @property
    def counts(self) -> counts_.Counts:
        """Return what became of the rows read so far."""
        ...

    @property
    def digest(self) -> str | None:
        """Return a short name of all samples, or of what they are read from; None where nobody can tell."""
        ...

    def take(self, place: Place) -> tuple[list[sample.Sample], Place]:
        """Return the samples of the step that begins at a place, and the place after it."""
        ...

    def epoch(self, place: Place) -> float:
        """Return the passes made at a place."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class Prepared:
    """Prepared rows, in an order that is a function of the seed and the epoch alone.

    A place is the number of rows used up.

    Attributes:
        rows: what is trained on.
        batch_size: rows in an optimizer step, over all ranks; the last step of an epoch may have fewer.
        seed: of the order; None: as they come.
        arrange: what is made of the samples of a step.
    """

    rows: data.Prepared
    batch_size: int
    seed: int | None
    arrange: Arrange = as_they_come
    start: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Return the optimizer steps of one pass over the rows."""
        return -(-len(self.rows) // self.batch_size)

    @property
    def counts(self) -> counts_.Counts:
        """Return what became of the rows."""
        return self.rows.counts

    @property
    def digest(self) -> str:
        """Return a hash of all samples: rows that changed under their name are other rows."""
        return digest(self.rows)

    def take(self, place: Place) -> tuple[list[sample.Sample], Place]:
        """Return the samples of the step that begins at a place, and the place after it."""
        assert isinstance(place, int)
        epoch, start = divmod(place, len(self.rows))
        stop = min(start + self.batch_size, len(self.rows))
        order = _order(self.rows, self.seed, epoch)
        samples = [s for row in order[start:stop].tolist() for s in self.rows.samples(row)]
        return self.arrange(samples), place + stop - start

    def epoch(self, place: Place) -> float:
        """Return the passes made at a place."""
        assert isinstance(place, int)
        return place / len(self.rows)


class Streamed:
    """Rows that are read while training. A place is the fields of `stream.Place`.

    Attributes:
        batch_size: rows (what is trained together) in an optimizer step; the last one of a pass may have
            fewer.
        counts: what became of the rows read so far; a run that goes on sets it to what it was.
        digest: a hash of the sources, as far as they can be told apart unread: files by what is in them, the
            hub's by their names.
    """

    start: Place = attrs.astuple(stream.Place())
    steps_per_epoch = None

    def __init__(
        self,
        opened: Sequence[data.Opened],
        bound: encode.Rules,
        *,
        batch_size: int,
        seed: int | None,
        vocab: int | None = None,
        arrange: Arrange = as_they_come,
    ) -> None:
        """Read nothing yet.

        Args:
            opened: from `data.look`.
            bound: from `data.rules`.
            batch_size: samples in an optimizer step; the last step of a pass may have fewer.
            seed: of the shuffling; None: as they come.
            vocab: rows of the model's embedding; None: tokens are not checked against it.
            arrange: what is made of the samples of a step.
        """
        self._vocab, self._arrange = vocab, arrange
        self.batch_size, self.counts = batch_size, counts_.Counts()
        self.digest = hashlib.blake2b(
            "\n".join(one.source.fingerprint for one in opened).encode(), digest_size=16
        ).hexdigest()
        self._draw = functools.partial(stream.draw, opened, bound, seed=seed)
        self._at: Place | None = None
        self._drawn: Iterator[stream.Drawn] = iter(())

    def take(self, place: Place) -> tuple[list[sample.Sample], Place]:
        """Return the samples of the step that begins at a place, and the place after it."""
        assert isinstance(place, tuple)
        if place != self._at:
            self._drawn = self._draw(place=stream.Place(**dict(zip(_PLACE, place, strict=True))))
        taken: list[stream.Drawn] = []
        self._at = None  # what fails on the way is read again
        for drawn in self._drawn:
            if taken and drawn.after.epoch != taken[0].after.epoch:
                self._drawn = itertools.chain([drawn], self._drawn)
                break
            taken.append(drawn)
            if len(taken) == self.batch_size:
                break
        samples = [s for drawn in taken for s in drawn.samples]
        if self._vocab is not None:
            check_vocabulary(np.concatenate([s.tokens for s in samples]), self._vocab)
        self.counts = functools.reduce(counts_.merge, (drawn.counts for drawn in taken), self.counts)
        self._at = attrs.astuple(taken[-1].after)
        return self._arrange(samples), self._at

    def epoch(self, place: Place) -> float:
        """Return the passes completed at a place."""
        assert isinstance(place, tuple)
        return float(place[0])


def packs(
    samples: Sequence[sample.Sample],
    algorithm: algorithms.Algorithm,
    *,
    budget: int,
    share: bool,
    shape: cost.ModelShape,
    needs: Sequence[str],
    dtype: torch.dtype,
    device: str,
    sizes: sizes_.Sizes | None = None,
    counts: pack.Counts | None = None,
    ranks: ports.Ranks = ports.ALONE,
    own: Sequence[Sequence[int]] | None = None,
) -> list[pack.Pack]:
    """Plan a step and build this rank's packs.

    Args:
        samples: of the whole step, the same on every rank.
        algorithm: decides what must be seen together.
        budget: most unique tokens in one forward.
        share: merge what begins alike.
        shape: of the model, whose FLOPs are balanced.
        needs: fields of Scores that are wanted beside log-probabilities.
        dtype: of the columns.
        device: where the tensors go.
        sizes: what forwards are padded to; None: nothing is.
        counts: totals that the loss divides by; None: those of these samples.
        ranks: who shares the step.
        own: what `members` planned, for who asks for both; None: it is planned here.
    """
    counts = pack.count(samples) if counts is None else counts
    if own is None:
        own = members(samples, algorithm, budget=budget, share=share, shape=shape, ranks=ranks)
    options = {"needs": needs, "share": share, "dtype": dtype, "device": device}
    parts = ([samples[i] for i in numbers] for numbers in own)
    if sizes is None:
        return [pack.build(each, counts, budget=budget, **options) for each in parts]
    most = min(budget, sizes.nodes[-1])
    check_lengths(max((len(one.tokens) for one in samples), default=0), most)
    return [padded.build(each, counts, planned=sizes, budget=most, **options) for each in parts]


def members(
    samples: Sequence[sample.Sample],
    algorithm: algorithms.Algorithm,
    *,
    budget: int,
    share: bool,
    shape: cost.ModelShape,
    ranks: ports.Ranks = ports.ALONE,
) -> Sequence[Sequence[int]]:
    """Plan a step: which of the samples each of this rank's packs has.

    Args:
        samples, algorithm, budget, share, shape, ranks: as in `packs`.
    """
    plan = batching.assign(
        samples, budget=budget, couples=algorithm.couples, num_ranks=ranks.num, share=share, shape=shape
    )
    return plan[ranks.index]


def check_lengths(longest: int, budget: int) -> None:
    """Refuse a sample that no forward at planned sizes holds.

    Args:
        longest: tokens of the longest sample.
        budget: most tokens of a forward.

    Raises:
        mistake.Mistake: names both.
    """
    if longest > budget:
        raise mistake.Mistake(
            f"token_budget is {budget}, and a sample has {longest} tokens that one forward at planned sizes "
            f"must hold. Raise token_budget to {longest}, cut samples with max_length or "
            "max_completion_length, or train without planned sizes (pad_to_multiple_of none)"
        )


def check_vocabulary(tokens: np.ndarray, vocab: int) -> None:
    """Refuse tokens that the model has no embedding for.

    Args:
        tokens: ids.
        vocab: rows of the embedding.

    Raises:
        mistake.Mistake: names the largest id.
    """
    largest = int(tokens.max(initial=0))
    if largest >= vocab:
        raise mistake.Mistake(
            f"tokenizer: id {largest} came of it; the model has embeddings for {vocab}, so lower ids were "
            "wanted. Name the model's own with --tokenizer"
        )


@functools.lru_cache(maxsize=2)
def digest(rows: data.Prepared) -> str:
    """Return a hash of all samples.

    Args:
        rows: prepared.
    """
    made = hashlib.blake2b(digest_size=16)
    columns = (rows.columns[name] for name in sorted(rows.columns))
    for values in (rows.tokens, rows.trained, rows.starts, rows.rows, *columns):
        made.update(np.ascontiguousarray(values).data)
    return made.hexdigest()


@functools.lru_cache(maxsize=2)
def _order(rows: data.Prepared, seed: int | None, epoch: int) -> np.ndarray:
    return data.epoch_order(rows, seed=seed, epoch=epoch)
