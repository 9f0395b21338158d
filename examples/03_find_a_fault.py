"""Property-based research: hypothesis finds the smallest batch on which a loss depends on how it was packed.

The planted fault is the classic one: the loss divides by the tokens it happens to see instead of the step's.
Prints the smallest failing batch: `smallest failing batch: 2 samples, 2 trained tokens`.
"""

import hypothesis
import numpy as np
from hypothesis import strategies as st

import espalier as es


def mean_of_means(values, batch):
    """Divide by the rows in this pack: wrong as soon as there are two."""
    return values.mean()


faulty = es.algorithms.sft.evolve(reduce=mean_of_means)
model, params = es.reference.Reference(), es.reference.params()


def gap(lengths: list[int]) -> float:
    """Return how far the loss of one pack is from that of a pack a sample."""
    rows = [np.zeros(length, np.int64) for length in lengths]
    samples = [es.Sample(tokens=row, trained=np.arange(len(row)) > 0, unit=i) for i, row in enumerate(rows)]
    counts = es.pack.count(samples)
    together = [es.pack.build(samples, counts, share=False)]
    apart = [es.pack.build([one], counts) for one in samples]
    first, second = (
        es.steps.loss_and_grad(model, faulty, params, packs, key=0)[0] for packs in (together, apart)
    )
    return abs(first - second).item()


smallest = hypothesis.find(
    st.lists(st.integers(2, 8), min_size=1, max_size=5),
    lambda lengths: gap(lengths) > 1e-9,
    settings=hypothesis.settings(derandomize=True, deadline=None),
)
trained = sum(length - 1 for length in smallest)
print(f"smallest failing batch: {len(smallest)} samples, {trained} trained tokens")
