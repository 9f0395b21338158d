"""Rows that are read while training: samples in an order that any place can be found in again.

Rows are read in blocks. Without shuffling samples come as the rows do; with it, each block is shuffled by
itself (a stream that fits into one block is shuffled like prepared data). A stream of several sources reads
one after the other; with weights it takes rows in turn by weight, and its epoch ends with the first source
that ends.
"""

import itertools
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from core.plan import batching, sample
from shell import counts, data, encode, mistake, shares, sources, truncate

BLOCK = 1024


@attrs.frozen(kw_only=True)
class Place:
    """Where a stream stands: plain numbers, so that a checkpoint can hold them.

    Attributes:
        epoch: passes completed.
        row: rows read of this pass before the current block.
        used: rows (what is trained together) given in this pass before the current block.
        block: number of the current block in this pass.
        taken: rows given of the current block.
    """

    epoch: int = 0
    row: int = 0
    used: int = 0
    block: int = 0
    taken: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Drawn:
    """What a stream gives.

    Attributes:
        samples: what is trained together.
        after: where to go on from.
        counts: of the rows of a block, with the first that it gives; none afterwards, so that one who goes on
            inside of a block counts nothing twice.
    """

    samples: list[sample.Sample]
    after: Place
    counts: counts.Counts


def draw(
    opened: Sequence[data.Opened], bound: encode.Rules, *, seed: int | None, place: Place | None = None
) -> Iterator[Drawn]:
    """Yield samples without end, pass after pass, from a place on.

    Rows before the place are skipped unread where the source can, and never tokenized.

    Args:
        opened: from `data.look`.
        bound: from `data.rules`.
        seed: of the shuffling; None gives samples as they come.
        place: where to begin; None for the beginning.

    Raises:
        Mistake: naming a row that cannot be trained, or when a whole pass gives nothing.
    """
    place = place or Place()
    while True:
        ended = place
        for drawn in _pass(opened, bound, seed, place):
            yield drawn
            ended = drawn.after
        if ended.used + ended.taken == 0:
            names = ", ".join(one.source.name for one in opened)
            raise mistake.Mistake(
                f"dataset: {names} leaves nothing to train in a whole pass over the stream."
            )
        place = Place(epoch=ended.epoch + 1)


def _pass(
    opened: Sequence[data.Opened], bound: encode.Rules, seed: int | None, place: Place
) -> Iterator[Drawn]:
    """Yield the rest of one pass."""
    rows = _mixed(opened, place.row)
    pending = counts.Counts()
    while chunk := list(itertools.islice(rows, BLOCK)):
        pieces, counted = _block(chunk, opened, bound)
        pending = counts.merge(pending, counted)
        order = batching.order(
            len(pieces), seed=None if seed is None else seed + place.block, epoch=place.epoch
        )
        following = attrs.evolve(
            place, row=place.row + len(chunk), used=place.used + len(pieces), block=place.block + 1, taken=0
        )
        for taken in range(place.taken, len(pieces)):
            last = taken + 1 == len(pieces)
            number = int(order[taken])
            yield Drawn(
                samples=[_sample(piece, place.used + number) for piece in pieces[number]],
                after=following if last else attrs.evolve(place, taken=taken + 1),
                counts=counts.Counts() if taken else pending,
            )
        pending = pending if not pieces else counts.Counts()
        place = following


def _block(
    chunk: Sequence[tuple[int, sources.Located]], opened: Sequence[data.Opened], bound: encode.Rules
) -> tuple[list[list[truncate.Piece]], counts.Counts]:
    """Encode a block: the rows of each source together, put back in the order in which they came."""
    placed: list[list[list[truncate.Piece]]] = [[] for _ in chunk]
    total = counts.Counts()
    for index, one in enumerate(opened):
        positions = [position for position, (source, _) in enumerate(chunk) if source == index]
        done = iter(positions)
        for pieces, counted in data.batches((chunk[position][1] for position in positions), one, bound):
            total = counts.merge(total, counted)
            for row in pieces:
                placed[next(done)] = data.together(row, one)
    return list(itertools.chain.from_iterable(placed)), total


def _mixed(opened: Sequence[data.Opened], skip: int) -> Iterator[tuple[int, sources.Located]]:
    """Yield rows with the number of their source, from the row `skip` of the mixture on."""
    weights = [one.source.weight for one in opened]
    if len(opened) == 1:
        yield from ((0, row) for row in opened[0].source.read(skip))
    elif weights[0] is None:
        chained = ((index, row) for index, one in enumerate(opened) for row in one.source.read(0))
        yield from itertools.islice(chained, skip, None)
    else:
        turns = _turns(shares.fractions(weights))
        skipped = np.bincount(
            np.fromiter(itertools.islice(turns, skip), np.int64, skip), minlength=len(opened)
        )
        readers = [one.source.read(int(number)) for one, number in zip(opened, skipped, strict=True)]
        for index in turns:
            row = next(readers[index], None)
            if row is None:
                return
            yield index, row


def _turns(fractions: np.ndarray) -> Iterator[int]:
    """Yield without end whose turn it is: always the source that is furthest behind its share."""
    taken = np.zeros(len(fractions))
    for draw_number in itertools.count(1):
        index = int(np.argmax(fractions * draw_number - taken))
        taken[index] += 1
        yield index


def _sample(piece: truncate.Piece, number: int) -> sample.Sample:
    """Make a sample; the number of what it is trained together with is its group and unit."""
    return sample.Sample(
        tokens=piece.tokens, trained=piece.trained, columns=piece.columns, group=number, unit=number
    )
