"""Sums and means of rows over the samples and groups that they belong to.

Axes: terms, samples, groups.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from core import pack


def sample_sums(values: Float[Tensor, " terms"], batch: pack.Batch) -> Float[Tensor, " samples"]:
    """Sum the rows of each sample; 0 for a sample without a row."""
    return _sums(values, batch.terms.sample, len(batch.samples.group))


def sample_means(values: Float[Tensor, " terms"], batch: pack.Batch) -> Float[Tensor, " samples"]:
    """Average the rows of each sample; 0 for a sample without a row."""
    return sample_sums(values, batch) / batch.samples.num_terms.clamp(min=1.0)


def group_sums(values: Float[Tensor, " terms"], batch: pack.Batch) -> Float[Tensor, " groups"]:
    """Sum the rows of each group; 0 for a group without a row."""
    return _sums(values, batch.group, len(batch.groups.num_terms))


def _sums(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Add rows up by index, in float32 or better."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return wide.new_zeros(size).index_add(0, index, wide)
