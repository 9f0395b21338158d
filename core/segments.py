"""Sums and means of rows over the samples that they belong to.

Axes: terms, samples.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from core import pack, precision


def sample_sums(values: Float[Tensor, " terms"], batch: pack.Batch) -> Float[Tensor, " samples"]:
    """Sum the rows of each sample; 0 for a sample without a row."""
    return _sums(values, batch.terms.sample, len(batch.samples.group))


def sample_means(values: Float[Tensor, " terms"], batch: pack.Batch) -> Float[Tensor, " samples"]:
    """Average the rows of each sample; 0 for a sample without a row."""
    return sample_sums(values, batch) / batch.samples.num_terms.clamp(min=1.0)


def positions(batch: pack.Batch) -> Int[Tensor, " terms"]:
    """Number the rows of each sample from 0, in the order of its tokens."""
    lengths = batch.samples.num_terms.long()
    starts = lengths.cumsum(0) - lengths
    rows = torch.arange(len(batch.terms.sample), device=batch.terms.sample.device)
    return rows - starts.index_select(0, batch.terms.sample)


def last_rows(values: Float[Tensor, " terms"], batch: pack.Batch) -> Float[Tensor, " samples"]:
    """Return the last row of each sample, found by its length; 0 for a sample without a row."""
    last = positions(batch) == batch.num_terms.long() - 1
    return sample_sums(values.where(last, 0.0), batch)


def _sums(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Add rows up by index, in float32 or better."""
    wide = precision.widened(values)
    return wide.new_zeros(size).index_add(0, index, wide)
