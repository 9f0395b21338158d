"""LoRA on the command line: folders in PEFT's format, and options that follow from them or from each other.

Nothing here imports torch: it is all known before a model is.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import attrs
import safetensors

from adapters import peft_format
from shell import entries, hubs, mistake, options, written

DOWN = ".lora_A.weight"
LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_rslora")
OWN = ("use_peft", *(name for name in LORA if name != "lora_dropout"))
"""What an adapter that is there decides."""
Given = entries.Given


@attrs.frozen(kw_only=True)
class Found:
    """What a folder in PEFT's format says of its adapter.

    Attributes:
        base, revision: the model that it was trained over.
        rank, alpha, rank_stabilized: as `lora_r`, `lora_alpha`, `use_rslora`.
        targets: paths of the layers that it stands beside.
        whole: paths of the modules that it holds whole.
        scalar: it is a reward model's.
    """

    base: str
    revision: str | None
    rank: int
    alpha: float
    rank_stabilized: bool
    targets: tuple[str, ...]
    whole: tuple[str, ...]
    scalar: bool


def is_one(path: Any) -> bool:
    """Say whether a path is a folder in PEFT's format, or the hub id of one that the cache holds."""
    return hubs.folder(path) is not None


def read(folder: pathlib.Path | str) -> Found:
    """Read a folder in PEFT's format, but for the numbers of its tensors.

    Args:
        folder: has an `adapter_config.json`.

    Raises:
        mistake.Mistake: a file cannot be read, or the adapter is of a kind that is not here.
    """
    place = pathlib.Path(folder)
    try:
        told = json.loads((place / peft_format.CONFIG).read_text())
        with safetensors.safe_open(place / peft_format.WEIGHTS, framework="np") as file:
            paths = [path.removeprefix(peft_format.PREFIX) for path in file.keys()]  # noqa: SIM118  (it is no mapping)
        rank, alpha, base = int(told["r"]), float(told["lora_alpha"]), str(told["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as problem:
        line = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise mistake.Mistake(
            f"adapter {place} cannot be read ({line}); {peft_format.CONFIG} with r, lora_alpha and "
            f"base_model_name_or_path, and {peft_format.WEIGHTS} were wanted: copy the folder again"
        ) from problem
    came = peft_format.odd(told)
    if came is not None:
        raise mistake.Mistake(
            f"adapter {place} has {came}; plain LoRA is what is here. Merge it into its base with PEFT, and "
            "name the merged folder as model"
        )
    low = tuple(path.removesuffix(DOWN) for path in paths if path.endswith(DOWN))
    rest = {path.rpartition(".")[0] for path in paths if ".lora_" not in path}
    return Found(
        base=base,
        revision=told.get("revision"),
        rank=rank,
        alpha=alpha,
        rank_stabilized=bool(told.get("use_rslora")),
        targets=low,
        whole=tuple(sorted(rest)),
        scalar=told.get("task_type") == "SEQ_CLS",
    )


def settled(chosen: options.Options, given: Given) -> options.Options:
    """Let options follow from an adapter that `model` or `init_from` names, and packing from dropout.

    An adapter as `model` stands for its base with the adapter to start from. Dropout before the adapter hides
    other numbers from each sample, so samples that share a prefix run apart.

    Args:
        chosen: the options.
        given: those that were set.

    Raises:
        mistake.Mistake: options exclude each other, or say other than the adapter does.
    """
    by = "model"
    if hubs.folder(chosen.model, chosen.revision) is not None:
        if chosen.init_from is not None:
            raise mistake.Mistake(
                f"model {chosen.model} is an adapter, and init_from {chosen.init_from} came too; keep one"
            )
        made = opened(chosen)
    elif (start := hubs.folder(chosen.init_from)) is not None:
        made = attrs.evolve(chosen, init_from=str(start), **_own(read(start)), **_turned(chosen, start))
        by = "init_from"
    else:
        return _apart(chosen, given)
    if "rope_scaling" in given:
        made = attrs.evolve(made, rope_scaling=chosen.rope_scaling)
    for name in OWN:
        value = getattr(made, name)
        if name in given and getattr(chosen, name) != value and not _yields(given, name, by):
            has = f"{value}" if isinstance(value, int | float) else "its own"
            raise mistake.Mistake(
                f"{given[name].where}: {given[name].came()}; the adapter {made.init_from} has {has}: leave "
                f"{name} out"
            )
    return _apart(made, given)


def opened(chosen: options.Options) -> options.Options:
    """Let an adapter as `model` stand for its base, with the adapter to start from; others are as they came.

    Args:
        chosen: the options; `revision` is of a hub id, and of the base where `model` is a folder.

    Raises:
        mistake.Mistake: the adapter cannot be read, or is of a kind that is not here.
    """
    folder = hubs.folder(chosen.model, chosen.revision)
    if folder is None:
        return chosen
    found = read(folder)
    if found.base.startswith((".", "/")) and not pathlib.Path(found.base).is_dir():
        raise mistake.Mistake(
            f"adapter {folder}: its base {found.base} is no folder here; put it there, or write where it is "
            f"into {peft_format.CONFIG} as base_model_name_or_path"
        )
    there = any((folder / name).is_file() for name in _WORDS)
    is_folder = folder == pathlib.Path(str(chosen.model))
    return attrs.evolve(
        chosen,
        model=found.base,
        revision=(is_folder and chosen.revision) or found.revision,
        init_from=str(folder),
        tokenizer=str(folder) if chosen.tokenizer is None and there else chosen.tokenizer,
        **_own(found),
        **_turned(chosen, folder),
    )


def check_kind(chosen: options.Options, *, scalar: bool) -> None:
    """Refuse an adapter to start from that is one of a reward model where none is trained, or the reverse.

    Args:
        chosen: the options, settled.
        scalar: a reward model is wanted.

    Raises:
        mistake.Mistake: names the adapter.
    """
    if not is_one(chosen.init_from) or read(str(chosen.init_from)).scalar == scalar:
        return
    kinds = ("language", "reward")
    raise mistake.Mistake(
        f"adapter {chosen.init_from} is of a {kinds[not scalar]} model; one of a {kinds[scalar]} model was "
        "wanted"
    )


def check(chosen: options.Options, given: Given) -> None:
    """Refuse options of precision and adapters that exclude each other.

    Raises:
        mistake.Mistake: names both.
    """
    if chosen.bf16 and chosen.dtype == "float64":
        raise mistake.Mistake(
            "bf16 and dtype: true and 'float64' came; one says bfloat16, the other what is wider: keep one"
        )
    if chosen.use_peft and chosen.lora_target_modules in ((), ""):
        raise mistake.Mistake("lora_target_modules: nothing came; names of layers or all-linear were wanted")


def remarks(algorithm: str, chosen: options.Options, given: Given) -> list[str]:
    """Say what a caller may not expect of options of adapters.

    Args:
        algorithm: a name.
        chosen: the options, settled.
        given: those that were set.
    """
    told = []
    idle = [name for name in LORA if options.asked(algorithm, chosen, given, name)]
    if idle and not chosen.use_peft:
        verb = "are" if len(idle) > 1 else "is"
        told.append(f"{', '.join(idle)} {verb} ignored: without use_peft there is no adapter.")
    if chosen.use_peft and chosen.rope_scaling is not None and "rope_scaling" not in given:
        told.append(f"rope_scaling is {chosen.rope_scaling}: adapter {chosen.init_from} has it by its run.")
    # Of a file that the command line's adapter outranks; of what that adapter is, its folder is the judge.
    for name in ("lora_r", "lora_alpha", "use_rslora"):
        came, now = given[name].read() if name in given else None, getattr(chosen, name)
        if chosen.use_peft and came not in (None, now, options.default(algorithm, name)):
            told.append(f"{given[name].where} is ignored: the adapter {chosen.init_from} has {now}.")
    if chosen.use_peft and chosen.lora_dropout and chosen.disable_dropout:
        told.append(f"lora_dropout {chosen.lora_dropout:g} is off: disable_dropout is on.")
    if drops(chosen) and "packing" not in given:
        told.append(
            f"packing is none: under lora_dropout {chosen.lora_dropout:g} samples that share a prefix would "
            "share its mask, so each runs alone; lora_dropout 0 lets them share."
        )
    return told


def drops(chosen: options.Options) -> bool:
    """Say whether an adapter has dropout before it."""
    return bool(chosen.use_peft and chosen.lora_dropout and not chosen.disable_dropout)


def _own(found: Found) -> dict[str, Any]:
    """Return the options that an adapter decides."""
    return {
        "use_peft": True,
        "lora_r": found.rank,
        "lora_alpha": found.alpha,
        "use_rslora": found.rank_stabilized,
        "lora_target_modules": found.targets,
        "lora_modules_to_save": found.whole or None,
    }


def run_file(folder: pathlib.Path) -> pathlib.Path | None:
    """Return the config.yaml of the run that left a model or an adapter; None where none did.

    Args:
        folder: that may be a run's `model/`.
    """
    file = folder.parent / written.CONFIG
    return file if folder.name == written.MODEL and file.is_file() else None


def _turned(chosen: options.Options, folder: pathlib.Path) -> dict[str, Any]:
    """Return how the run that left an adapter scaled positions, which PEFT's format has no place for."""
    file = run_file(folder)
    if chosen.rope_scaling is not None or file is None:
        return {}
    told = {one.key: one.value for one in entries.from_file(str(file))}.get("rope_scaling")
    return {"rope_scaling": told} if isinstance(told, Mapping) else {}


def _yields(given: Given, name: str, other: str) -> bool:
    """Say whether an option of a file gives way to another on the command line, which it was not written for.

    A run's own file lists every option, those that nobody set among them.
    """
    return other in given and given[name].rank < given[other].rank


_WORDS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def _apart(chosen: options.Options, given: Given) -> options.Options:
    """Let samples run apart under dropout, which nothing that they share could have."""
    if not drops(chosen) or chosen.packing != "tree":
        return chosen
    if "packing" in given and not _yields(given, "packing", "lora_dropout"):
        raise mistake.Mistake(
            f"{given['packing'].where}: packing tree and lora_dropout {chosen.lora_dropout:g} came; samples "
            "that share a prefix would share its mask. Set lora_dropout 0, or packing none"
        )
    return attrs.evolve(chosen, packing="none")
