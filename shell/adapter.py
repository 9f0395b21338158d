"""LoRA on the command line: folders in PEFT's format, and options that follow from them or from each other.

Nothing here imports torch: it is all known before a model is.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import attrs
import safetensors

from shell import entries, mistake, options

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, DOWN = "base_model.model.", ".lora_A.weight"
LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_rslora")
# Parts of PEFT's LoRA that change what an adapter computes, and the values with which they do not.
UNREAD: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "velora_config": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}

Given = Mapping[str, entries.Entry]


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
    """Say whether a path is a folder in PEFT's format."""
    return path is not None and (pathlib.Path(str(path)) / CONFIG).is_file()


def read(folder: pathlib.Path | str) -> Found:
    """Read a folder in PEFT's format, but for the numbers of its tensors.

    Args:
        folder: has an `adapter_config.json`.

    Raises:
        mistake.Mistake: a file cannot be read, or the adapter is of a kind that is not here.
    """
    place = pathlib.Path(folder)
    try:
        told = json.loads((place / CONFIG).read_text())
        with safetensors.safe_open(place / WEIGHTS, framework="np") as file:
            paths = [path.removeprefix(PREFIX) for path in file.keys()]  # noqa: SIM118  (it is no mapping)
        rank, alpha, base = int(told["r"]), float(told["lora_alpha"]), str(told["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as problem:
        line = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise mistake.Mistake(
            f"adapter {place} cannot be read ({line}); {CONFIG} with r, lora_alpha and "
            f"base_model_name_or_path, and {WEIGHTS} were wanted: copy the folder again"
        ) from problem
    kind = told.get("peft_type")
    odd = [name for name, fine in UNREAD.items() if told.get(name) not in fine]
    if kind != "LORA" or odd:
        came = f"{odd[0]} {told[odd[0]]!r}" if odd else f"peft_type {kind}"
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
    changed: dict[str, Any] = {}
    if is_one(chosen.model):
        if chosen.init_from is not None:
            raise mistake.Mistake(
                f"model {chosen.model} is an adapter, and init_from {chosen.init_from} came too; keep one"
            )
        found = read(str(chosen.model))
        there = any((pathlib.Path(str(chosen.model)) / name).is_file() for name in _WORDS)
        words = chosen.model if chosen.tokenizer is None and there else chosen.tokenizer
        changed = {"init_from": chosen.model, "model": found.base, "tokenizer": words}
        changed |= {"revision": found.revision} if "revision" not in given else {}
    elif is_one(chosen.init_from):
        found = read(str(chosen.init_from))
    else:
        return _apart(chosen, given)
    where = changed.get("init_from", chosen.init_from)
    own = {
        "use_peft": True,
        "lora_r": found.rank,
        "lora_alpha": found.alpha,
        "use_rslora": found.rank_stabilized,
        "lora_target_modules": found.targets,
        "lora_modules_to_save": found.whole or None,
    }
    for name, value in own.items():
        if name in given and getattr(chosen, name) != value:
            has = f"{value}" if isinstance(value, int | float) else "its own"
            raise mistake.Mistake(
                f"{given[name].where}: {given[name].came()}; the adapter {where} has {has}: leave {name} out"
            )
    return _apart(attrs.evolve(chosen, **changed, **own), given)


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


def remarks(chosen: options.Options, given: Given) -> list[str]:
    """Say what a caller may not expect of options of adapters.

    Args:
        chosen: the options, settled.
        given: those that were set.
    """
    told = []
    idle = [name for name in LORA if name in given] if not chosen.use_peft else []
    if idle:
        told.append(f"{', '.join(idle)} is ignored: without use_peft there is no adapter.")
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


_WORDS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def _apart(chosen: options.Options, given: Given) -> options.Options:
    """Let samples run apart under dropout, which nothing that they share could have."""
    if not drops(chosen) or chosen.packing != "tree":
        return chosen
    if "packing" in given:
        raise mistake.Mistake(
            f"{given['packing'].where}: packing tree and lora_dropout {chosen.lora_dropout:g} came; samples "
            "that share a prefix would share its mask. Set lora_dropout 0, or packing none"
        )
    return attrs.evolve(chosen, packing="none")
