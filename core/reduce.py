"""Reductions: values a loss returned to the one number that is differentiated.

Each is a weighted sum; the weights come from the counts of the whole step and hold one over its total
already, so sums over packs, micro-batches and ranks add up to the same number in any split.

A sample that is masked out (an answer that was cut off) has no trained token: it has no row, and no count of
the step knows it, so numerator and denominator agree. Masked all, the loss and its gradient are exactly 0.

Axes: terms, samples, pairs.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from core import pack


def _rows(values: Tensor, batch: pack.Batch) -> Tensor:
    """Return values, of which there must be one a row."""
    return _one_each(values, len(batch.terms.sample), "trained token")


def _one_each(values: Tensor, num: int, what: str) -> Tensor:
    """Return values, of which so many are wanted; another axis would broadcast, or be summed as it is."""
    if values.shape != (num,):
        raise ValueError(
            f"a loss returned values of shape {tuple(values.shape)}; its reduction wants one a {what}, "
            f"({num},)."
        )
    return values


def token_mean(values: Float[Tensor, " terms"], batch: pack.Batch) -> Float[Tensor, ""]:
    """Divide the sum over trained tokens by the trained tokens of the whole step.

        L = sum(l) / terms

    One token of 4 and nine of 1 give 1.3, in one batch, two micro-batches or on two ranks.
    """
    return (_rows(values, batch) / batch.totals.terms).sum()


def sequence_mean(values: Float[Tensor, " terms"], batch: pack.Batch) -> Float[Tensor, ""]:
    """Average inside each sample first, then over the samples of the step.

    L = sum_i (1 / n_i) sum_t l_it / samples
    """
    return (_rows(values, batch) / (batch.num_terms * batch.totals.samples)).sum()


def sequence_sum(values: Float[Tensor, " terms"], batch: pack.Batch) -> Float[Tensor, ""]:
    """Sum inside each sample, then average over the samples of the step.

        L = sum_i sum_t l_it / samples

    Liu et al. 2026, LUSPO (arXiv:2602.05261): of a loss that is one number a sequence, each counts by its
    length.
    """
    return (_rows(values, batch) / batch.totals.samples).sum()


def constant(values: Float[Tensor, " terms"], batch: pack.Batch, *, length: float) -> Float[Tensor, ""]:
    """Sum inside each sample, divide by one length for all, and average over the samples of the step.

        L = sum_i sum_t l_it / (length samples)

    Liu et al. 2025, Dr. GRPO (arXiv:2503.20783), sec. 3.2.

    Args:
        values: one a row.
        batch: whose rows they are.
        length: in tokens, the same for every sample: the longest that an answer may get.
    """
    return (_rows(values, batch) / (length * batch.totals.samples)).sum()


def prompt_mean(values: Float[Tensor, " terms"], batch: pack.Batch) -> Float[Tensor, ""]:
    """Average over the tokens of all answers to a prompt, then over the prompts of the step.

        L = sum_g (1 / n_g) sum_{i in g} sum_t l_it / groups

    Yu et al. 2025, DAPO (arXiv:2503.14476), eq. 8, where the mean over tokens stands inside the expectation
    over prompts; ScaleRL (arXiv:2510.13786).
    """
    terms = batch.groups.num_terms.index_select(0, batch.group)
    return (_rows(values, batch) / (terms * batch.totals.groups)).sum()


def as_token_mean(
    values: Float[Tensor, " terms"],
    batch: pack.Batch,
    *,
    by: Callable[[Tensor, pack.Batch], Float[Tensor, ""]],
) -> Float[Tensor, " terms"]:
    """Scale rows so that another reduction gives their token mean.

        by(as_token_mean(l)) = token_mean(l)

    So a term of the loss can be averaged over tokens while the rest is averaged otherwise.

    Args:
        values: one a row.
        batch: whose rows they are.
        by: a reduction of rows: a weighted sum, no weight 0.
    """
    weights = torch.func.grad(lambda rows: by(rows, batch))(torch.ones_like(values))
    return values / (weights * batch.totals.terms)


def sample_mean(values: Float[Tensor, " samples"], batch: pack.Batch) -> Float[Tensor, ""]:
    """Average one value a sample over the samples of the step that train a token.

    L = sum_i l_i [n_i > 0] / samples
    """
    # A step without any trained sample is 0, not 0 / 0.
    values = _one_each(values, len(batch.samples.num_terms), "sample")
    return values.where(batch.samples.num_terms > 0, 0.0).sum() / batch.totals.samples.clamp(min=1.0)


def pair_mean(values: Float[Tensor, " pairs"], batch: pack.Batch) -> Float[Tensor, ""]:
    """Average one value a pair over the pairs of the step.

    L = sum_k l_k / pairs
    """
    num, samples = len(batch.pairs.chosen), len(batch.samples.num_terms)
    if samples != 2 * num:
        raise ValueError(
            f"{samples} samples make {num} pairs; a pair is two samples of one unit, the chosen one first, "
            "and no sample may be without its other side."
        )
    return (_one_each(values, num, "pair") / batch.totals.pairs).sum()
