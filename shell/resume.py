"""Where a run begins: anew, from a checkpoint of its own folder, or from another run's weights."""

import pathlib
from collections.abc import Callable, Mapping

import attrs
import torch
import yaml
from torch import Tensor

from adapters import loading, scalar_head, transformers_lm
from shell import adapter, checkpoint, config, feed, folders, low_rank, mistake, places, states

MASTERS = "optimizer/masters/"


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
    if chosen.resume == "never" and taken - places.SCRAPS:
        raise mistake.Mistake(
            f"output_dir {folder} holds a run and resume is never; name another folder, or say --resume auto"
        )
    places.check(folder)
    passed: list[str] = []
    newest = checkpoint.newest(folder, note=passed.append)
    if newest is None and passed:
        raise mistake.Mistake(
            f"output_dir {folder} holds a run none of whose {len(passed)} checkpoints is whole: "
            f"{passed[0].partition(';')[0]}. Remove the folder to begin anew, or name another output_dir"
        )
    for line in passed:
        note(line)
    if newest is None:
        places.check_anew(folder, command.algorithm, chosen)
        return None
    saved = checkpoint.load(newest, check=False)
    with states.reading(newest):
        old = dict(yaml.safe_load(saved.values["options"]))
        changed = _changed(saved, old, command)
    if changed and chosen.resume != "force":
        raise mistake.Mistake(_other_run(folder, changed, command, old, saved.values["algorithm"]))
    if changed:
        note(f"resume is force: going on under new {', '.join(changed)}")
    return saved


def compare(
    saved: checkpoint.Saved,
    rows: feed.Feed,
    chosen: config.Options,
    num_ranks: int,
    note: Callable[[str], None],
) -> None:
    """Tell what a run that goes on does differently than before.

    Args:
        saved: the checkpoint that it goes on from.
        rows: what is there now; a stream is known by its sources.
        chosen: the options.
        num_ranks: processes that share the steps now.
        note: told.

    Raises:
        mistake.Mistake: the rows are others under the same name.
    """
    _check_rows(saved, rows, chosen)
    old = yaml.safe_load(saved.values["options"])
    lengths = (
        old.get("max_steps") or f"{old.get('num_train_epochs')} epochs",
        chosen.max_steps or f"{chosen.num_train_epochs} epochs",
    )
    if lengths[0] != lengths[1]:
        note("the length of the run changed: the learning rate follows the new schedule from here on")
    before = saved.values.get("ranks", num_ranks)
    if before != num_ranks:
        who = "1 process shares" if num_ranks == 1 else f"{num_ranks} processes share"
        note(
            f"{who} the steps, {before} did before: sums are taken in another order, "
            "so numbers agree up to rounding only"
        )


def budget(
    fits: int, saved: checkpoint.Saved | None, chosen: config.Options, note: Callable[[str], None]
) -> int:
    """Return the most unique tokens of a forward: those that the run planned, where nobody set a number.

    What fits follows the memory that is free, the ranks and what is offloaded; other packs would round other
    sums, and plan other sizes.

    Args:
        fits: by the estimate now, or as asked for.
        saved: the checkpoint that the run goes on from; None: it begins.
        chosen: the options.
        note: told where the run began with more than fits now.
    """
    before = None if saved is None else saved.values.get("token_budget")
    if saved is None or chosen.token_budget is not None or not before:
        return fits
    if yaml.safe_load(saved.values["options"]).get("token_budget") is not None:
        return fits  # it was asked for then, not planned
    if fits < before:
        note(
            f"token_budget is {before}, as the run began with, and by the estimate {fits} fit now; where "
            f"memory runs out, say --token_budget {fits} --resume force"
        )
    return before


def _check_rows(saved: checkpoint.Saved, rows: feed.Feed, chosen: config.Options) -> None:
    """Refuse to go on with rows that are others under the same name."""
    with states.reading(pathlib.Path(str(chosen.output_dir)) / f"checkpoint-{saved.step}"):
        before = saved.values["rows"]["digest"]
    if chosen.resume != "force" and rows.digest is not None and before not in (None, rows.digest):
        raise mistake.Mistake(
            f"dataset {chosen.dataset} gives other samples than when the run in {chosen.output_dir} began. "
            "Name another output_dir to begin anew (init_from starts from its weights), or say "
            "--resume force to go on"
        )


def unchanged(
    saved: checkpoint.Saved, chosen: config.Options, what: str, found: str | None, source: str
) -> None:
    """Refuse to go on beside other frozen weights than those that a run began with.

    Args:
        saved: the checkpoint that the run goes on from.
        chosen: the options.
        what: the weights are: `reference` or `teacher`.
        found: names to the bit what was loaded; None: there is none.
        source: where it came from.

    Raises:
        mistake.Mistake: the weights differ.
    """
    if found is None or chosen.resume == "force" or saved.values.get(what) in (None, found):
        return
    raise mistake.Mistake(
        f"{source} holds other weights than when the run in {chosen.output_dir} began, and they are its "
        f"{what}. Put the old ones back, name another output_dir to begin anew, or say --resume force to go "
        f"on with the new ones as the {what}"
    )


def check_source(chosen: config.Options) -> None:
    """Refuse an `init_from` that cannot be started from, before anything is loaded."""
    if chosen.init_from is None:
        return
    folder = pathlib.Path(chosen.init_from)
    if adapter.is_one(folder):
        return  # it was read with the options
    if (folder / "config.json").is_file():
        folders.check(f"init_from {folder}", folder)
        if chosen.use_peft:
            raise mistake.Mistake(
                f"init_from {folder} holds whole weights, and use_peft freezes those of model "
                f"{chosen.model}; name it as model: --model {folder}"
            )
        return
    problem = checkpoint.fault(folder, deep=False) if folder.is_dir() else "there is no such folder"
    if problem:
        near = [path for path in (folder / "model", *folder.glob("checkpoint-*")) if path.is_dir()]
        hint = f". Did you mean {near[0]}?" if near else ""
        raise mistake.Mistake(
            f"init_from {folder} is neither a whole checkpoint nor a model folder: {problem}{hint}"
        )


def weights(
    chosen: config.Options, model: transformers_lm.TransformersLM, params: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the parameters of the checkpoint or model folder that `init_from` names; it is only read.

    Args:
        chosen: the options.
        model, params: what is begun with, for names and shapes.

    Raises:
        mistake.Mistake: they are other parameters.
    """
    folder = pathlib.Path(str(chosen.init_from))
    if adapter.is_one(folder):
        return low_rank.read(model, params, folder)
    if (folder / "config.json").is_file():
        found = _of_model(folder, chosen, scalar=scalar_head.WEIGHT in params)
    else:
        found = _of_checkpoint(folder, chosen)
    if {n: t.shape for n, t in found.items()} != {n: t.shape for n, t in params.items()}:
        odd = sorted(found.keys() ^ params.keys()) or [n for n in params if found[n].shape != params[n].shape]
        raise mistake.Mistake(
            f"init_from {chosen.init_from} holds the weights of another model ({odd[0]} differs); "
            f"name a checkpoint or folder of {chosen.model}"
        )
    return {n: found[n].to(device=p.device, dtype=p.dtype) for n, p in params.items()}


def _of_checkpoint(folder: pathlib.Path, chosen: config.Options) -> Mapping[str, Tensor]:
    """Load the parameters of a checkpoint, in float32 where it has them so beside those that ran."""
    saved = checkpoint.load(folder)
    found = {n: t for n, t in saved.tensors.items() if n.startswith(("params/", MASTERS))}
    if chosen.use_peft:
        with states.reading(folder):
            old = dict(yaml.safe_load(saved.values["options"]))
        usual = config.plain(config.Options())
        for name in ("lora_r", "lora_alpha", "use_rslora"):
            if (before := old.get(name, usual[name])) != (now := getattr(chosen, name)):
                raise mistake.Mistake(
                    f"{name} {now} came, and init_from {folder} holds an adapter with {before}; keep that"
                )
    # Those that ran come first, so that the others take their places.
    return {n.removeprefix("params/").removeprefix(MASTERS): found[n] for n in sorted(found, reverse=True)}


def _of_model(folder: pathlib.Path, chosen: config.Options, *, scalar: bool) -> Mapping[str, Tensor]:
    """Load the parameters of a model folder."""
    try:
        seed = chosen.seed if scalar else None
        trusted = chosen.trust_remote_code
        return loading.load(str(folder), dtype=torch.float32, trust_remote_code=trusted, scalar_seed=seed)[1]
    except (OSError, ValueError) as problem:
        raise mistake.Mistake(f"init_from {folder}: {' '.join(str(problem).split())}") from problem


def _changed(saved: checkpoint.Saved, old: Mapping[str, object], command: config.Command) -> list[str]:
    """Name what a run was made with otherwise than is asked for now."""
    changed = config.changes(old, command.options)
    if command.options.max_length == saved.values.get("max_length", old.get("max_length")):
        changed = [name for name in changed if name != "max_length"]  # what ran: its config.yaml says so
    return ["algorithm", *changed] if saved.values["algorithm"] != command.algorithm else changed


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
        f"output_dir {folder} holds a run with {name} {before}; {now} came{more}. Name another output_dir to "
        "begin anew (init_from starts from its weights), or say --resume force to go on under the new options"
    )
