"""Evaluation, in training and on its own: the same packs, loss and reduction as a step, without gradients.

The totals are those of the whole dataset, so the batch size and the number of ranks change nothing but
rounding. What couples a whole step (KTO's common zero) is taken over `batch_size` rows, as in a step.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from core import algorithms, metrics, pack, ports, steps
from core.plan import sample
from shell import feed


class Rows(Protocol):
    """What is evaluated, row by row."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def samples(self, row: int) -> list[sample.Sample]:
        """Return the samples of one row."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class Listed:
    """Samples in memory, a row each.

    Attributes:
        listed: the samples.
    """

    listed: Sequence[sample.Sample]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.listed)

    def samples(self, row: int) -> list[sample.Sample]:
        """Return the one sample of a row."""
        return [self.listed[row]]


def measure(
    model: ports.Model,
    algorithm: algorithms.Algorithm,
    params: ports.Params,
    rows: Rows,
    *,
    packing: Mapping[str, Any],
    batch_size: int,
    carry: Mapping[str, float] | None = None,
    ranks: ports.Ranks = ports.ALONE,
    most: int | None = None,
    reference: ports.Params | None = None,
    arrange: feed.Arrange = feed.as_they_come,
) -> dict[str, float]:
    """Return the loss and the metrics over all rows, under `eval_...`; nothing is drawn, so dropout is off.

    Args:
        model, algorithm, params: what is evaluated and by which loss.
        rows: each is seen once.
        packing: how packs are made, the arguments of `feed.packs`.
        batch_size: rows that are planned together.
        carry: what the algorithm remembers.
        ranks: who shares the work; all return the same.
        most: rows to look at, the first ones, and tell names of what they do not show; None: all.
        reference: parameters of the reference, where the algorithm needs one.
        arrange: as of `feed.Prepared`.
    """
    num = len(rows) if most is None else min(most, len(rows))
    counts = pack.count([s for row in range(num) for s in rows.samples(row)])
    value, means, place, tokens = 0.0, {}, 0, 0
    while place < num:
        stop = min(place + batch_size, num)
        samples = [s for row in range(place, stop) for s in rows.samples(row)]
        place = stop
        tokens += sum(len(s.tokens) for s in samples)
        samples = arrange(samples)
        # Mismatched samples are of these rows alone, as in a step.
        own = pack.count(samples)
        counts = attrs.evolve(counts, mismatched=own.mismatched, columns=own.columns)
        needs = algorithm.reads
        packs = feed.packs(samples, algorithm, needs=needs, counts=counts, ranks=ranks, **packing)
        packs = steps.with_reference(model, algorithm, reference, packs)
        part, found = steps.evaluate(model, algorithm, params, packs, carry=carry, ranks=ranks)
        value += float(part)
        means = metrics.merge(means, metrics.host(found))
    named = {"loss": value, **read(means, every=most is not None), "num_tokens": float(tokens)}
    return {f"eval_{name}": number for name, number in named.items()}


def read(found: metrics.Metrics, *, every: bool) -> dict[str, float]:
    """Return numbers by their names; of what nothing was seen of the name alone, with NaN, or nothing.

    Args:
        found: summed up over rows.
        every: few rows were looked at to know the names: what they did not show, others may.
    """
    unseen = dict.fromkeys((name for name in found if not name.startswith(metrics.NONFINITE)), math.nan)
    return (unseen if every else {}) | metrics.values(found)
