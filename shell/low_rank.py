"""From options to an adapter over a model that was loaded, and what a run with one leaves."""

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import attrs
import torch
import transformers
from torch import Tensor

from adapters import lora, peft_files, transformers_lm
from core import ports
from shell import adapter, checkpoint, files, mistake, options, places, written


def settings(chosen: options.Options) -> lora.Settings:
    """Return what the adapter is made of."""
    named = chosen.lora_target_modules or lora.ALL
    return lora.Settings(
        rank=chosen.lora_r,
        alpha=chosen.lora_alpha,
        dropout=chosen.lora_dropout if adapter.drops(chosen) else 0.0,
        rank_stabilized=chosen.use_rslora,
        targets=(named,) if isinstance(named, str) else tuple(named),
        whole=tuple(chosen.lora_modules_to_save or ()),
    )


def trained(
    chosen: options.Options, described: transformers.PretrainedConfig, *, scalar: bool
) -> lora.Trained | None:
    """Count what an adapter trains before the model is loaded, and refuse names that fit no layer.

    Args:
        chosen: the options.
        described: the model's config.
        scalar: the model has a scalar head in the place of the one over the vocabulary.

    Returns:
        None: all parameters are trained.

    Raises:
        mistake.Mistake: a name fits no layer, or one that cannot have an adapter.
    """
    if not chosen.use_peft:
        return None
    adapter.check_kind(chosen, scalar=scalar)
    kind: Any = transformers.AutoModelForCausalLM
    if scalar:
        kind, described = transformers.AutoModelForSequenceClassification, copy.deepcopy(described)
        described.num_labels = 1
    with torch.device("meta"):
        module = kind.from_config(described, trust_remote_code=chosen.trust_remote_code)
    try:
        return lora.trained(module, settings(chosen))
    except ValueError as problem:
        raise mistake.Mistake(f"model {chosen.model}: {problem}") from problem


def beside(
    chosen: options.Options,
    model: transformers_lm.TransformersLM,
    params: dict[str, Tensor],
    *,
    training: bool,
) -> tuple[transformers_lm.TransformersLM, dict[str, Tensor]]:
    """Put a new adapter beside a model's layers where that was asked for.

    Args:
        chosen: the options.
        model, params: as they were loaded.
        training: False: without dropout.

    Raises:
        ValueError: a layer cannot have one.
    """
    if not chosen.use_peft:
        return model, params
    asked = settings(chosen)
    asked = asked if training else attrs.evolve(asked, dropout=0.0)
    return lora.attach(model, params, asked, seed=chosen.seed)


def start(model: transformers_lm.TransformersLM, params: ports.Params) -> ports.Params:
    """Return what a reference has for parameters: none of an adapter that is new, which is the base.

    Args:
        model: of the policy.
        params: that the policy starts from.
    """
    return {} if model.adapter is not None and lora.is_base(model, params) else params


def off(model: transformers_lm.TransformersLM, params: ports.Params) -> dict[str, Tensor]:
    """Return an adapter's parameters with which it does nothing: B is 0, and what is whole is the base's.

    Args:
        model: with the adapter.
        params: of it.
    """
    return {
        n: model.frozen[n] if n in model.frozen else torch.zeros_like(p) if lora.is_up(n) else p
        for n, p in params.items()
    }


def merged(model: transformers_lm.TransformersLM, params: dict[str, Tensor], what: str) -> dict[str, Tensor]:
    """Return the parameters of a whole model, an adapter's added to those that it stands beside.

    Args:
        model: with an adapter or without.
        params: its parameters.
        what: it is, for messages.

    Raises:
        mistake.Mistake: the adapter unties a head, so that the whole has other parameters.
    """
    if model.adapter is None:
        return params
    leaves, apart = lora.merged(model, params)
    if apart:
        raise mistake.Mistake(
            f"{what} has an adapter beside {next(iter(apart))}, which is tied to the embedding and cannot be "
            "both; one without it was wanted"
        )
    return leaves


def write(
    model: transformers_lm.TransformersLM,
    params: ports.Params,
    folder: pathlib.Path,
    chosen: options.Options,
    tokenizer: transformers.PreTrainedTokenizerBase,
    note: Callable[[str], None],
) -> None:
    """Write a model folder: a whole model, or an adapter in PEFT's format over a base that it names.

    Args:
        model: what was trained.
        params: its parameters.
        folder: to write to.
        chosen: the options. The built-in model is in no folder, so it is written beside the output folder's
            `model`, as `base`; another one that stands there is set aside.
        tokenizer: written beside the weights.
        note: told where that is now.
    """
    base = pathlib.Path(str(chosen.model))
    if model.adapter is None:
        model.save(params, str(folder))
    else:
        if chosen.model == "tiny":
            base = folder.parent / written.BASE
            with files.whole(base) as made:
                model.save({}, str(made))
                tokenizer.save_pretrained(made)
                places.make_way(base, made, note, same=True)
        named = str(base.resolve()) if base.is_dir() else str(chosen.model)
        peft_files.write(model, params, str(folder), base=named)
    tokenizer.save_pretrained(folder)


def check(base: str, saved: checkpoint.Saved, chosen: options.Options) -> None:
    """Refuse to go on over other weights than those that a run's adapter was trained over.

    Args:
        base: names the weights that were loaded; empty without an adapter.
        saved: the checkpoint that the run goes on from.
        chosen: the options.

    Raises:
        mistake.Mistake: the weights differ.
    """
    if base != saved.values.get("base", base):
        raise mistake.Mistake(
            f"model {chosen.model} holds other weights than when the run in {chosen.output_dir} began, and "
            "its adapter is of those. Put the old ones back, or name another output_dir to begin anew"
        )


def read(
    model: transformers_lm.TransformersLM, params: ports.Params, folder: pathlib.Path
) -> dict[str, Tensor]:
    """Read the adapter of a folder in PEFT's format.

    Args:
        model, params: with an adapter of the same layers.
        folder: is read only.

    Raises:
        mistake.Mistake: it is the adapter of another model.
    """
    try:
        return peft_files.read(model, params, str(folder))
    except (OSError, ValueError) as problem:
        raise mistake.Mistake(f"init_from {folder}: {' '.join(str(problem).split())}") from problem
