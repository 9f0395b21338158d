"""Samples to what a checkpoint holds, and back, to the bit: what was written for steps still to come."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.plan import sample

PREFIX = "rollout/"


def split(parts: Sequence[Sequence[sample.Sample]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the numbers of the samples of some steps.

    Every sample has the same columns.

    Args:
        parts: the samples of each step.
    """
    flat = [one for part in parts for one in part]
    if not flat:
        return {}, {"sizes": []}
    names = {name: isinstance(values, np.ndarray) for name, values in flat[0].columns.items()}
    tensors = {
        "tokens": np.concatenate([one.tokens for one in flat]),
        "trained": np.concatenate([one.trained for one in flat]),
        "lengths": np.array([len(one.tokens) for one in flat], np.int64),
        "groups": np.array([one.group for one in flat], np.int64),
        "units": np.array([one.unit for one in flat], np.int64),
    }
    for name, long in names.items():
        values = [one.columns[name] for one in flat]
        tensors[f"column/{name}"] = np.concatenate(values) if long else np.array(values, np.float64)
    held = {f"{PREFIX}{name}": torch.from_numpy(values) for name, values in tensors.items()}
    return held, {"sizes": [len(part) for part in parts], "columns": names}


def join(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> list[list[sample.Sample]]:
    """Return the samples of `split`.

    Args:
        tensors: by path.
        values: the numbers.
    """
    if not values["sizes"]:
        return []
    held = {name.removeprefix(PREFIX): t.numpy() for name, t in tensors.items() if name.startswith(PREFIX)}
    bounds = np.cumsum(held["lengths"])[:-1]
    columns = {
        name: np.split(held[f"column/{name}"], bounds) if long else held[f"column/{name}"].tolist()
        for name, long in values["columns"].items()
    }
    flat = [
        sample.Sample(
            tokens=tokens,
            trained=trained,
            columns={name: column[i] for name, column in columns.items()},
            group=int(held["groups"][i]),
            unit=int(held["units"][i]),
        )
        for i, (tokens, trained) in enumerate(
            zip(np.split(held["tokens"], bounds), np.split(held["trained"], bounds), strict=True)
        )
    ]
    edges = np.cumsum([0, *values["sizes"]]).tolist()
    return [flat[start:stop] for start, stop in itertools.pairwise(edges)]
