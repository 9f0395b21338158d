"""What is put around a preference loss: several at once, weights of pairs, another count of long answers.

Each takes a loss over pairs as a keyword and is such a loss itself, so they nest, the innermost first:

    partial(policy_weighted, loss=partial(length_desensitized, ld_alpha=0.5, loss=preference.sigmoid))

weighs by the answers as they are; the other way round the weights would see the scaled ones.

Axes: terms (trained tokens), samples, pairs.
"""

import functools
import inspect
from collections.abc import Callable
from typing import TypeAlias

import attrs
import torch
from jaxtyping import Float
from torch import Tensor

from core import pack, segments
from core.losses import margins, preference

Loss: TypeAlias = Callable[..., tuple[Float[Tensor, " pairs"], margins.Metrics]]


def mixture(
    scores: pack.Scores, batch: pack.Batch, *, parts: tuple[tuple[Loss, float], ...]
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Add losses up, each with a weight.

        loss = sum_i w_i loss_i

    MPO, Wang et al. 2024 (arXiv:2411.10442), sec. 3: `sigmoid` 0.8, `bco_pair` 0.2, `sft` 1.

    Args:
        scores: what the parts read.
        batch: likewise.
        parts: (loss, weight), at least one.

    Returns:
        One loss a pair; a metric that several parts have is the first one's.
    """
    ran = [(weight, *loss(scores, batch)) for loss, weight in parts]
    total = torch.stack([weight * values for weight, values, _ in ran]).sum(0)
    return total, {name: metric for _, _, found in reversed(ran) for name, metric in found.items()}


def policy_weighted(
    scores: pack.Scores, batch: pack.Batch, *, loss: Loss
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Weigh each pair by how likely the policy itself is to give both its answers.

        w = exp(mean_t(logprobs_t - log_sum_squares_t)), detached        loss_k = w_chosen w_rejected loss_k

    WPO, Zhou et al. 2024 (arXiv:2406.11827), eq. 2, aligned by what the policy's own draw would get, so that
    flat distributions do not weigh less.

    Args:
        scores: `logprobs`, `log_sum_squares` (nats), and what the loss reads.
        batch: what the loss reads.
        loss: its values belong to pairs, not to ranks as those of `core.losses.transport`.

    Returns:
        One loss a pair; the loss' own metrics.
    """
    values, found = loss(scores, batch)
    aligned = (scores.logprobs - pack.field(scores, "log_sum_squares")).detach()
    chosen, rejected = margins.sides(segments.sample_means(aligned, batch).exp(), batch)
    return values * chosen * rejected, found


def length_desensitized(
    scores: pack.Scores, batch: pack.Batch, *, loss: Loss, ld_alpha: float
) -> tuple[Float[Tensor, " pairs"], margins.Metrics]:
    """Count what the longer side has beyond the length of the shorter with a factor.

        logprob = sum_{t < n} logprobs_t + alpha sum_{t >= n} logprobs_t,    n = min(n_c, n_l)

    LD-DPO, Liu et al. 2024 (arXiv:2409.06411), sec. 3: under the policy and under the reference alike.

    Args:
        scores: `logprobs` (nats), and what the loss reads.
        batch: column `reference_logprobs` (nats) where the loss reads it.
        loss: any over pairs; lengths that it divides by stay whole.
        ld_alpha: the factor, in [0, 1]; 1 changes nothing, 0 cuts the tail off.

    Returns:
        One loss a pair; the loss' own metrics, of the scaled log-probabilities.
    """
    lengths = batch.samples.num_terms
    shorter = torch.minimum(*margins.sides(lengths, batch))
    both = torch.cat([batch.pairs.chosen, batch.pairs.rejected])
    shared = lengths.index_copy(0, both, shorter.repeat(2))
    tail = segments.positions(batch) >= shared.index_select(0, batch.terms.sample)
    factor = torch.ones_like(scores.logprobs).masked_fill(tail, ld_alpha)
    columns = {
        name: column * factor if name == "reference_logprobs" else column
        for name, column in batch.terms.columns.items()
    }
    scaled = attrs.evolve(scores, logprobs=scores.logprobs * factor)
    return loss(scaled, attrs.evolve(batch, terms=pack.Axis(columns=columns)))


def diverging(loss: Loss, divergence: preference.Divergence) -> Loss:
    """Put an f-divergence in the place of the log-ratio.

    Args:
        loss: one that takes `divergence`; `preference.sft`, which has no log-ratio, comes back as it is.
        divergence: of `margins`: `reverse_kl`, `forward_kl`, `js_divergence`, `alpha_divergence`.

    Returns:
        The loss with the divergence bound.

    Raises:
        ValueError: the loss is defined for the log-ratio alone.
    """
    if loss is preference.sft:
        return loss
    if "divergence" not in inspect.signature(loss).parameters:
        name = getattr(getattr(loss, "func", loss), "__name__", repr(loss))
        raise ValueError(
            f"{name} is defined for the log-ratio alone; an f-divergence goes with sigmoid, sigmoid_norm, "
            "hinge, ipo, exo_pair, robust, discopop and sft: choose one of them or reverse_kl."
        )
    return functools.partial(loss, divergence=divergence)
