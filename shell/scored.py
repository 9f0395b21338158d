"""Log-probabilities of samples, taken on the packs that a step of them would train on."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from core import algorithms, ports
from core.plan import sample
from shell import feed


def trained(samples: Sequence[sample.Sample]) -> list[sample.Sample]:
    """Leave out samples without a trained token, unless there are no others: they would only be forwarded."""
    kept = [one for one in samples if one.trained.any()]
    return kept or list(samples)


def logprobs(
    model: ports.Model,
    algorithm: algorithms.Algorithm,
    params: ports.Params,
    samples: Sequence[sample.Sample],
    *,
    packing: Mapping[str, Any],
    ranks: ports.Ranks = ports.ALONE,
) -> list[np.ndarray]:
    """Return each sample's log-probabilities at its tokens, 0 where none is trained; on every rank.

    Args:
        model: scores packs.
        algorithm: decides what must be seen together.
        params: of the policy, or of a reference.
        samples: of a whole step, the same on every rank.
        packing: how packs are made, the arguments of `feed.packs`.
        ranks: who shares the work.
    """
    kept = trained(samples)
    planning = {name: packing[name] for name in ("budget", "share", "shape")}
    own = feed.members(kept, algorithm, ranks=ranks, **planning)
    packs = feed.packs(kept, algorithm, needs=(), ranks=ranks, own=own, **packing)
    starts = np.cumsum([0, *(len(one.tokens) for one in kept)])
    found = torch.zeros(int(starts[-1]), dtype=packing["dtype"])
    for members, each in zip(own, packs, strict=True):
        rows = [starts[i] + np.flatnonzero(kept[i].trained) for i in members]
        places = torch.from_numpy(np.concatenate(rows) if rows else np.zeros(0, np.int64))
        told = model.predict(params, each, None).logprobs
        found[places] = told.to(device="cpu", dtype=found.dtype)
    summed = ranks.sum(found).numpy()
    values = {id(one): summed[starts[i] : starts[i + 1]] for i, one in enumerate(kept)}
    none = {id(one): np.zeros(len(one.tokens), summed.dtype) for one in samples if id(one) not in values}
    return [{**values, **none}[id(one)] for one in samples]
