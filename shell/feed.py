"""From the place in the data to the packs of a step."""

import functools
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from core import algorithms, pack, ports
from core.plan import batching, cost, sample
from shell import data


@attrs.frozen(kw_only=True, eq=False)
class Feed:
    """Rows in an order that is a function of the seed and the epoch alone.

    Attributes:
        rows: what is trained on.
        batch_size: rows in an optimizer step, over all ranks; the last step of an epoch may have fewer.
        seed: of the order; None: as they come.
    """

    rows: data.Prepared
    batch_size: int
    seed: int | None

    @property
    def steps_per_epoch(self) -> int:
        """Return the optimizer steps of one pass over the rows."""
        return -(-len(self.rows) // self.batch_size)


def take(feed: Feed, place: int) -> tuple[list[sample.Sample], int]:
    """Return the samples of the step that begins at a place, and the place after it.

    Args:
        feed: the rows and their order.
        place: rows used up so far, over all epochs.
    """
    epoch, start = divmod(place, len(feed.rows))
    stop = min(start + feed.batch_size, len(feed.rows))
    order = _order(feed.rows, feed.seed, epoch)
    samples = [s for row in order[start:stop].tolist() for s in feed.rows.samples(row)]
    return samples, place + stop - start


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
    counts: pack.Counts | None = None,
    ranks: ports.Ranks = ports.ALONE,
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
        counts: totals that the loss divides by; None: those of these samples.
        ranks: who shares the step.
    """
    counts = pack.count(samples) if counts is None else counts
    plan = batching.assign(
        samples, budget=budget, couples=algorithm.couples, num_ranks=ranks.num, share=share, shape=shape
    )
    return [
        pack.build(
            [samples[i] for i in members], counts, needs=needs, share=share, dtype=dtype, device=device
        )
        for members in plan[ranks.index]
    ]


@functools.lru_cache(maxsize=2)
def _order(rows: data.Prepared, seed: int | None, epoch: int) -> np.ndarray:
    return data.epoch_order(rows, seed=seed, epoch=epoch)
