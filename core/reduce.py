"""Reductions: values a loss returned to the one number that is differentiated.

Each is a weighted sum; the weights come from the counts of the whole step and hold one over its total
already, so sums over packs, micro-batches and ranks add up to the same number in any split.

Axes: terms, samples, pairs.
"""

from jaxtyping import Float
from torch import Tensor

from core import pack


def token_mean(values: Float[Tensor, " terms"], batch: pack.Batch) -> Float[Tensor, ""]:
    """Divide the sum over trained tokens by the trained tokens of the whole step.

        L = sum(l) / terms

    One token of 4 and nine of 1 give 1.3, in one batch, two micro-batches or on two ranks.
    """
    return (values / batch.totals.terms).sum()


def sequence_mean(values: Float[Tensor, " terms"], batch: pack.Batch) -> Float[Tensor, ""]:
    """Average inside each sample first, then over the samples of the step.

    L = sum_i (1 / n_i) sum_t l_it / samples
    """
    return (values / (batch.num_terms * batch.totals.samples)).sum()


def sample_mean(values: Float[Tensor, " samples"], batch: pack.Batch) -> Float[Tensor, ""]:
    """Average one value a sample over the samples of the step that train a token.

    L = sum_i l_i [n_i > 0] / samples
    """
    return values.where(batch.samples.num_terms > 0, 0.0).sum() / batch.totals.samples


def pair_mean(values: Float[Tensor, " pairs"], batch: pack.Batch) -> Float[Tensor, ""]:
    """Average one value a pair over the pairs of the step.

    L = sum_k l_k / pairs
    """
    return (values / batch.totals.pairs).sum()
