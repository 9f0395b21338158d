"""TrainState to what a checkpoint holds, and back."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import safetensors
import yaml
from torch import Tensor

from core import record, steps
from shell import mistake, written

STATIC = ("step", "key", "place")
_LINE = 64  # bytes, as torch allocates on a CPU
INSTEAD = "Begin anew in another output_dir; --init_from takes the weights along"


@contextlib.contextmanager
def reading(folder: pathlib.Path) -> Iterator[None]:
    """Tell what a checkpoint lacks, or holds in another form, as the caller's mistake.

    Args:
        folder: the checkpoint whose values are read meanwhile.
    """
    try:
        yield
    except mistake.Mistake:
        raise
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        yaml.YAMLError,
        safetensors.SafetensorError,
    ) as problem:
        told = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise mistake.Mistake(
            f"{folder} cannot be resumed from: its values are not those that a run writes ({told}). Remove "
            "it, so that the one before is taken, or name another output_dir"
        ) from problem


def run_options(folder: pathlib.Path) -> dict[str, Any] | None:
    """Return the options of the run that a checkpoint is of, None where a folder is no checkpoint.

    Args:
        folder: any.
    """
    try:
        values = json.loads((folder / written.STATE).read_text(encoding="utf-8"))["values"]
        return dict(yaml.safe_load(values["options"]))
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError):
        return None


def aligned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors at addresses as an allocator gives them, copies of those that lie where a file had them.

    A CPU's products take another way, and round otherwise, where numbers begin within a line of its cache: a
    run that goes on would not be the run that never stopped.

    Args:
        tensors: by path.
    """
    return {path: t if t.data_ptr() % _LINE == 0 else t.clone() for path, t in tensors.items()}


def split(state: steps.TrainState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a state by path, and its numbers."""
    paths, leaves, _ = record.tree.flatten_with_path(state)
    named = {"/".join(map(str, path)): leaf for path, leaf in zip(paths, leaves, strict=True)}
    tensors = {path: leaf for path, leaf in named.items() if isinstance(leaf, Tensor)}
    numbers = {path: leaf for path, leaf in named.items() if path not in tensors}
    place = list(state.place) if isinstance(state.place, tuple) else state.place
    return tensors, {"step": state.step, "key": state.key, "place": place, "numbers": numbers}


def join(
    template: steps.TrainState, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> steps.TrainState:
    """Rebuild a state.

    Args:
        template: a state of the same structure, its contents unused.
        tensors: by path, as `split` returned them.
        values: the numbers of `split`.

    Raises:
        mistake.Mistake: a path is missing, or a shape, a dtype or the kind of place differs.
    """
    paths, leaves, structure = record.tree.flatten_with_path(template)
    found = []
    for path, leaf in zip(paths, leaves, strict=True):
        name = "/".join(map(str, path))
        stored = tensors[name] if name in tensors else values["numbers"].get(name)
        if stored is None:
            raise mistake.Mistake(
                f"the checkpoint has no {name}: it was written for another model or algorithm. {INSTEAD}"
            )
        if isinstance(leaf, Tensor) and (stored.shape, stored.dtype) != (leaf.shape, leaf.dtype):
            raise mistake.Mistake(
                f"{name} is {stored.dtype} {tuple(stored.shape)} in the checkpoint; the model has "
                f"{leaf.dtype} {tuple(leaf.shape)}. {INSTEAD}"
            )
        found.append(stored.to(leaf.device) if isinstance(leaf, Tensor) else stored)
    state = record.tree.unflatten(structure, found)
    place = values["place"]
    if isinstance(place, list) != isinstance(template.place, tuple):
        raise mistake.Mistake(f"a place in a stream is none in a list of rows, nor the reverse. {INSTEAD}")
    static = {n: values[n] for n in STATIC} | {"place": tuple(place) if isinstance(place, list) else place}
    return attrs.evolve(state, **static)
