"""Where a run begins: anew, from a checkpoint of its own folder, or from another run's weights."""

import pathlib
from collections.abc import Callable, Mapping

import attrs
import yaml
from torch import Tensor

from shell import checkpoint, config, mistake

# What a start that was killed before its first checkpoint leaves behind.
SCRAPS = {"prepared", "config.yaml", "metrics.jsonl", "run.json", ".lock"}


def find(
    command: config.Command, folder: pathlib.Path, note: Callable[[str], None]
) -> checkpoint.Saved | None:
    """Return the checkpoint that a run goes on from, None when it begins anew.

    Args:
        command: what was asked for.
        folder: the output folder.
        note: told what was passed over, and what a continued run does differently.

    Raises:
        mistake.Mistake: the folder is in use and `resume` is never, or the run there was made with other
            options.
    """
    chosen = command.options
    taken = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    if chosen.resume == "never" and taken - SCRAPS:
        raise mistake.Mistake(
            f"output_dir {folder} holds a run and resume is never; name another folder, or say --resume auto"
        )
    newest = checkpoint.newest(folder, note=note)
    if newest is None:
        return None
    saved = checkpoint.load(newest, check=False)
    old = yaml.safe_load(saved.values["options"])
    changed = config.changes(old, chosen)
    if saved.values["algorithm"] != command.algorithm:
        changed = ["algorithm", *changed]
    if changed and chosen.resume != "force":
        raise mistake.Mistake(_other_run(folder, changed, command, old, saved.values["algorithm"]))
    if changed:
        note(f"resume is force: going on under new {', '.join(changed)}")
    if any(old.get(name) != getattr(chosen, name) for name in ("max_steps", "num_train_epochs")):
        note("the length of the run changed: the learning rate follows the new schedule from here on")
    return saved


def weights(chosen: config.Options, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of the checkpoint that `init_from` names.

    Args:
        chosen: the options.
        params: of the model, for names and shapes.

    Raises:
        mistake.Mistake: the checkpoint has other parameters.
    """
    saved = checkpoint.load(str(chosen.init_from))
    found = {n.removeprefix("params/"): t for n, t in saved.tensors.items() if n.startswith("params/")}
    if {n: t.shape for n, t in found.items()} != {n: t.shape for n, t in params.items()}:
        odd = sorted(found.keys() ^ params.keys()) or [n for n in params if found[n].shape != params[n].shape]
        raise mistake.Mistake(
            f"init_from {chosen.init_from} holds the weights of another model ({odd[0]} differs); "
            f"name a checkpoint of {chosen.model}"
        )
    return {n: found[n].to(device=p.device, dtype=p.dtype) for n, p in params.items()}


def _other_run(
    folder: pathlib.Path,
    changed: list[str],
    command: config.Command,
    old: Mapping[str, object],
    algorithm: str,
) -> str:
    """Say which option differs from the run in the folder, and how to go on."""
    name = changed[0]
    before = (
        algorithm if name == "algorithm" else old.get(name, attrs.fields_dict(config.Options)[name].default)
    )
    now = command.algorithm if name == "algorithm" else getattr(command.options, name)
    more = f" (and {', '.join(changed[1:])})" if changed[1:] else ""
    return (
        f"output_dir {folder} holds a run with {name} {before}; {now} came{more}. Name another output_dir to begin "
        f"anew (init_from starts from its weights), or say --resume force to go on under the new options"
    )
