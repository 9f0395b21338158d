"""Adapters as PEFT keeps them: `adapter_model.safetensors` and `adapter_config.json` in a folder."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from transformers import pytorch_utils

from adapters import lora, peft_format

if TYPE_CHECKING:
    from adapters import transformers_lm


def write(
    model: transformers_lm.TransformersLM, params: Mapping[str, Tensor], folder: str, *, base: str
) -> None:
    """Write an adapter as a folder that PEFT and vLLM load.

    Args:
        model: with the adapter.
        params: what was trained.
        folder: made if missing.
        base: what the folder names as its base model.
    """
    assert model.adapter is not None, "there is no adapter to write"
    place = pathlib.Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    # Of a tied weight every place is written: PEFT gives each its own module.
    tensors = {
        f"{peft_format.PREFIX}{path}": params[leaf].contiguous().cpu() for path, leaf in _places(model)
    }
    apart = {path: tensor.clone() for path, tensor in tensors.items()}
    safetensors.torch.save_file(apart, place / peft_format.WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(_config(model, model.adapter, base), indent=2, sort_keys=True)
    (place / peft_format.CONFIG).write_text(f"{text}\n")


def read(
    model: transformers_lm.TransformersLM, params: Mapping[str, Tensor], folder: str
) -> dict[str, Tensor]:
    """Read the adapter of a folder.

    Args:
        model: with an adapter of the same layers.
        params: its parameters, whose dtypes and devices are taken.
        folder: in PEFT's format.

    Raises:
        ValueError: the folder holds another kind of adapter, or other tensors than the model has room for.
    """
    told = json.loads((pathlib.Path(folder) / peft_format.CONFIG).read_text())
    other = peft_format.odd(told)
    if other is not None:
        raise ValueError(f"its adapter has {other}; plain LoRA is what is here.")
    stored = safetensors.torch.load_file(pathlib.Path(folder) / peft_format.WEIGHTS)
    wanted = {f"{peft_format.PREFIX}{path}": leaf for path, leaf in _places(model)}
    odd = sorted(stored.keys() ^ wanted.keys())
    odd = odd or [path for path, leaf in wanted.items() if stored[path].shape != params[leaf].shape]
    if odd:
        raise ValueError(
            f"its adapter is not one of this model: {odd[0].removeprefix(peft_format.PREFIX)} differs."
        )
    assert model.adapter is not None, "there is no adapter"
    own = _config(model, model.adapter, "")
    for name in ("lora_alpha", "use_rslora"):
        if told.get(name, own[name]) != own[name]:
            raise ValueError(f"its adapter has {name} {told[name]}, and this model's has {own[name]}.")
    found: dict[str, Tensor] = {}
    for path, leaf in wanted.items():
        if leaf in found and not torch.equal(found[leaf], stored[path]):
            raise ValueError(
                f"{path.removeprefix(peft_format.PREFIX)} is tied in this model, and its adapter unties it."
            )
        found[leaf] = stored[path]
    return {n: found[n].to(device=p.device, dtype=p.dtype) for n, p in params.items()}


def _places(model: transformers_lm.TransformersLM) -> Iterator[tuple[str, str]]:
    """Return where each trained leaf stands: its path in PEFT's naming, and the leaf."""
    adapter = model.adapter
    assert adapter is not None, "there is no adapter"
    paths = {id(part): path for path, part in model.module.named_modules()}
    trained = set(adapter.whole_leaves)
    for part, attribute, leaf in model.slots:
        if leaf in adapter.leaves:
            yield leaf, leaf
        elif leaf in trained:
            yield f"{paths[id(part)]}.{attribute}", leaf


def _config(model: transformers_lm.TransformersLM, adapter: lora.Adapter, base: str) -> dict[str, Any]:
    """Return what PEFT's configuration of the adapter says."""
    settings, module = adapter.settings, model.module
    parts = dict(module.named_modules())
    kept = dict.fromkeys(adapter.whole)
    kept |= dict.fromkeys(
        path.rpartition(".")[0] for path, leaf in _places(model) if leaf in adapter.whole_leaves
    )
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": any(isinstance(parts[path], pytorch_utils.Conv1D) for path in adapter.targets),
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "modules_to_save": _short(kept) or None,
        "peft_type": "LORA",
        "r": settings.rank,
        "target_modules": _ends(adapter.targets, list(parts)),
        "task_type": "SEQ_CLS" if model.scalar else "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": settings.rank_stabilized,
    }


def _short(paths: Mapping[str, Any]) -> list[str]:
    """Leave out what stands inside of another of the paths."""
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]


def _ends(targets: tuple[str, ...], paths: list[str]) -> list[str]:
    """Return the last words of the paths, where they fit these and no others; else the paths."""
    ends = {path.rpartition(".")[2] for path in targets}
    fits = {path for path in paths if path.rpartition(".")[2] in ends}
    return sorted(ends if fits == set(targets) else targets)
