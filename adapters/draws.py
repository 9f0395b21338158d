"""From logits to drawn tokens: which are kept, which is taken, how likely it was before any were cut off.

Axes: rows (one next token each), vocab.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from core import keys, ports

_FIRST_SEARCH = 256


class Drawn(NamedTuple):
    """One token a row; the fields are those of `core.ports.Completion`."""

    tokens: Int64[Tensor, " rows"]
    logprobs: Float[Tensor, " rows"]
    kept: Float[Tensor, " rows"]


def uniforms(
    key: int,
    numbers: Int64[np.ndarray, " rows"],
    samples: Int64[np.ndarray, " rows"],
    position: int,
) -> Float64[np.ndarray, " rows"]:
    """Return the uniform number that names (key, number, sample, position), the same on every platform.

        h = 0;  for each word: h = mix(h ^ word);  u = floor(h / 2^12) / 2^52

    where `mix` is `core.keys.mixed`, a bijection of 64 bits: draws whose names differ in one word never
    share a hash.

    Args:
        key: names the draws of a call.
        numbers: of the prompts.
        samples: of which sample of its prompt each row is.
        position: how many tokens were drawn before.

    Returns:
        Numbers in `[0, 1)`; the largest times any positive float64 is below it.
    """
    state = np.zeros(len(numbers), np.uint64)
    for word in (np.int64(key), numbers, samples, np.int64(position)):
        state = keys.mixed(state ^ np.asarray(word, np.int64).astype(np.uint64))
    return (state >> np.uint64(12)).astype(np.float64) * 2.0**-52


def draw(
    logits: Float[Tensor, "rows vocab"],
    numbers: Float64[np.ndarray, " rows"],
    sampling: ports.Sampling,
) -> Drawn:
    """Draw a token a row by the inverse of the distribution function, tokens in the order of their ids.

        p = softmax(logits / temperature)        kept = sum of p over the support
        token = first with   sum of p over kept ids up to it   >   number * kept

    The order does not hang on a sort, so ties and rounding move a draw only where the number falls within the
    rounding error of a step. Top-k comes first, top-p counts within what it kept, min-p is relative to the
    likeliest token; tokens as likely as the last one kept are kept too.

    At temperature 0 the likeliest token (of equals the first) is taken, and the distribution that is told is
    that of temperature 1: the only one that a later pass could score.

    Args:
        logits: float32 or better, before the temperature.
        numbers: uniform in `[0, 1)`.
        sampling: temperature and support.
    """
    if sampling.temperature == 0.0:
        logprobs, tokens = logits.log_softmax(-1).max(-1)
        return Drawn(tokens, logprobs, logprobs.exp())
    # A tiny temperature overflows to -inf below the likeliest token instead of to NaN at it.
    logprobs = ((logits - logits.amax(-1, keepdim=True)) / sampling.temperature).log_softmax(-1)
    weights = logprobs.exp()
    cut = _cut(weights, sampling)
    if cut is not None:
        weights = weights.masked_fill_(weights < cut[:, None], 0.0)
    steps = weights.cumsum(-1, dtype=torch.float64)
    total = steps[:, -1:]
    places = torch.from_numpy(numbers).to(total.device)[:, None] * total
    tokens = torch.searchsorted(steps, places, right=True).clamp_(max=logits.shape[-1] - 1)
    kept = torch.ones_like(total) if cut is None else total.clamp(max=1.0)
    return Drawn(tokens[:, 0], logprobs.gather(-1, tokens)[:, 0], kept[:, 0].to(logprobs.dtype))


def _cut(p: Float[Tensor, "rows vocab"], sampling: ports.Sampling) -> Float[Tensor, " rows"] | None:
    """Return the probability from which on a token is kept; None: all are."""
    cuts = []
    mass = None
    if 0 < sampling.top_k < p.shape[-1]:
        cuts.append(p.topk(sampling.top_k).values[:, -1])
        mass = p.where(p >= cuts[0][:, None], 0.0).sum(-1, dtype=torch.float64)
    if sampling.top_p < 1.0:
        cuts.append(_nucleus(p, sampling.top_p, p.sum(-1, dtype=torch.float64) if mass is None else mass))
    if sampling.min_p > 0.0:
        cuts.append(p.amax(-1) * sampling.min_p)
    return torch.stack(cuts).amax(0) if cuts else None


def _nucleus(p: Tensor, top_p: float, mass: Tensor) -> Tensor:
    """Return the probability of the last token that is needed to reach `top_p` of the mass.

    Few tokens mostly are enough: the search starts among these and is widened until it holds every row's.
    """
    size, wanted = _FIRST_SEARCH, top_p * mass
    while True:
        best = p.topk(min(size, p.shape[-1])).values
        sums = best.cumsum(-1, dtype=torch.float64)
        if size >= p.shape[-1] or bool((sums[:, -1] >= wanted).all()):
            last = (sums < wanted[:, None]).sum(-1, keepdim=True)
            return best.gather(-1, last.clamp_(max=best.shape[-1] - 1))[:, 0]
        size *= 8
