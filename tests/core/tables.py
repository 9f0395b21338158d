"""Batches by hand: samples of given lengths that share nothing, with the columns of a loss."""

import numpy as np
import torch

from core import pack
from core.plan import sample


def samples(lengths, *, groups=None, ended=None, **columns):
    """Return one sample a length; `ended[i]` False leaves sample i without a trained token."""
    made = []
    for i, length in enumerate(lengths):
        start, stop = sum(lengths[:i]), sum(lengths[: i + 1])
        own = {}
        for name, values in columns.items():
            if len(values) == len(lengths) and name == "advantage":
                own[name] = float(values[i])
            else:
                own[name] = np.concatenate([[np.nan], np.asarray(values, dtype=np.float64)[start:stop]])
        trained = np.ones(length + 1, np.bool_)
        trained[0] = False
        if ended is not None and not ended[i]:
            trained[:] = False
        tokens = np.concatenate([[1000 + i], np.arange(start, stop)]).astype(np.int64)
        made.append(
            sample.Sample(
                tokens=tokens, trained=trained, columns=own, group=0 if groups is None else groups[i], unit=i
            )
        )
    return made


def batch(lengths, *, dtype=torch.float64, **columns):
    """Return the Batch of all samples in one pack."""
    rows = samples(lengths, **columns)
    return pack.build(rows, pack.count(rows), dtype=dtype).batch


def scores(logprobs, *, dtype=torch.float64, **fields):
    """Return Scores whose log-probabilities can be differentiated."""
    return pack.Scores(
        logprobs=torch.tensor(logprobs, dtype=dtype).requires_grad_(),
        **{name: torch.tensor(values, dtype=dtype).requires_grad_() for name, values in fields.items()},
    )
