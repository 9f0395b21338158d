"""A batch on which a property of an algorithm fails, in a file: found once, tried again after every change.

One safetensors file: the samples as tensors, the rest as JSON in its header. Nothing in it can run.

    try:
        espalier.check(mine)
    except espalier.Broken as broken:
        espalier.failures.save(broken.failure, "failing.safetensors")

    failure = espalier.failures.load("failing.safetensors")
    print(espalier.failures.again(mine, failure))  # empty: mended
"""

import json
import os
import pathlib

import safetensors
import safetensors.torch

from core import algorithms, check
from shell import buffer, files, mistake

KIND = "espalier.failure"
FORMAT = 1


def save(failure: check.Failure, path: str | os.PathLike[str]) -> None:
    """Write a failure.

    Args:
        failure: from `check.find`, or of a `check.Broken`.
        path: of the file.
    """
    tensors, values = buffer.split([list(failure.samples)])
    told = {
        "format": FORMAT,
        "name": failure.name,
        "problem": failure.problem,
        "seed": failure.seed,
        "samples": values,
    }
    files.replace(pathlib.Path(path), safetensors.torch.save(tensors, metadata={KIND: json.dumps(told)}))


def load(path: str | os.PathLike[str]) -> check.Failure:
    """Read a failure.

    Args:
        path: of a file of `save`.

    Raises:
        mistake.Mistake: there is no such file, or it holds something else.
    """
    place = pathlib.Path(path)
    try:
        with safetensors.safe_open(place, framework="pt") as file:
            told = json.loads((file.metadata() or {})[KIND])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        (samples,) = buffer.join(tensors, told["samples"])
        return check.Failure(
            name=told["name"], problem=told["problem"], seed=told["seed"], samples=tuple(samples)
        )
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError, IndexError) as problem:
        raise mistake.Mistake(
            f"{place} holds no failing batch ({type(problem).__name__}: {problem}); a file of "
            "shell.failures.save was wanted."
        ) from problem


def again(algorithm: algorithms.Algorithm, failure: check.Failure) -> str:
    """Return what is wrong with an algorithm on a batch that was kept; empty where the property holds now.

    Args:
        algorithm: as it is now.
        failure: from `load`.

    Raises:
        mistake.Mistake: the property has another name by now.
    """
    if failure.name not in check.PROPERTIES:
        raise mistake.Mistake(
            f"the failing batch is of property {failure.name!r}; one of {', '.join(check.PROPERTIES)} was "
            "wanted."
        )
    return check.problem(algorithm, failure.name, failure.samples)
