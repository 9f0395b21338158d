"""From options to the values that a run is made of: algorithm, schedule, optimizer, precision, model."""

import pathlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from adapters import kinds, loading, peft_format, scalar_head, shapes, transformers_lm, tree_attention
from core import algorithms, optimizers, ports, schedules
from core.plan import cost
from shell import adapter, folders, low_rank, methods, mistake, options, own, rope, states, tiny
from shell import config as config_

OF_OTHER_HEADS = ("classifier_", "summary_", "seq_classif_", "qa_", "pooler_")
# What is meant by each name, the first that a device has; kinds as in `tree_attention.KINDS`.
ATTENTION: Mapping[str, tuple[str, ...]] = {
    "auto": (),
    "eager": ("mask",),
    "sdpa": ("blocks",),
    "flash_attention_2": ("blocks",),
    "flex_attention": ("flex",),
}


def algorithm(name: str, chosen: options.Options) -> algorithms.Algorithm:
    """Return the algorithm that a name and its `loss_type` stand for.

    Args:
        name: one of the built-in names, or `module:name` of the caller's own.
        chosen: the options.
    """
    return own.algorithm(name) if ":" in name else methods.BUILT[name](chosen)


def optimizer(
    chosen: options.Options, num_steps: int, norm: optimizers.Norm = optimizers.global_norm
) -> optimizers.Optimizer:
    """Return AdamW under the schedule that was asked for.

    Args:
        chosen: the options.
        num_steps: optimizer steps of the whole run.
        norm: of gradients.
    """
    factor = schedule(chosen, num_steps)
    rule = optimizers.adamw(
        rate=lambda done: chosen.learning_rate * factor(done),
        beta1=chosen.adam_beta1,
        beta2=chosen.adam_beta2,
        epsilon=chosen.adam_epsilon,
        weight_decay=chosen.weight_decay,
        max_norm=chosen.max_grad_norm,
        norm=norm,
    )
    return optimizers.with_masters(rule)


def schedule(chosen: options.Options, num_steps: int) -> schedules.Schedule:
    """Return the schedule that was asked for, as a factor of the learning rate."""
    warmup = num_warmup(chosen, num_steps)
    numbers = chosen.lr_scheduler_kwargs or {}
    floor = numbers.get("min_lr_rate", numbers.get("min_lr", 0.0) / (chosen.learning_rate or 1.0))
    return {
        "constant": partial(schedules.constant),
        "constant_with_warmup": partial(schedules.constant, num_warmup=warmup),
        "linear": partial(schedules.linear, num_updates=num_steps, num_warmup=warmup),
        "cosine": partial(schedules.cosine, num_updates=num_steps, num_warmup=warmup),
        "cosine_with_min_lr": partial(
            schedules.cosine, num_updates=num_steps, num_warmup=warmup, floor=floor
        ),
    }[chosen.lr_scheduler_type]()


def num_warmup(chosen: options.Options, num_steps: int) -> int:
    """Return the steps over which the learning rate rises."""
    return chosen.warmup_steps or config_.whole((chosen.warmup_ratio or 0.0) * num_steps)


def dtype(chosen: options.Options, device: ports.Device) -> torch.dtype:
    """Return what the parameters are.

    Args:
        chosen: the options.
        device: where they are.

    Raises:
        mistake.Mistake: the device lacks it.
    """
    wanted = device.dtype if chosen.dtype == "auto" else getattr(torch, chosen.dtype)
    if wanted not in device.dtypes:
        have = ", ".join(str(d).removeprefix("torch.") for d in device.dtypes)
        raise mistake.Mistake(f"dtype {chosen.dtype} does not exist on {device.name}; use one of {have}")
    return wanted


def products(chosen: options.Options, device: ports.Device) -> torch.dtype:
    """Return what products run in: parameters of float32 may leave them to bfloat16.

    Args:
        chosen: the options.
        device: where they run.

    Raises:
        mistake.Mistake: the device lacks the parameters' dtype.
    """
    wanted = dtype(chosen, device)
    return torch.bfloat16 if chosen.bf16 and wanted == torch.float32 else wanted


def shape(
    chosen: options.Options,
    described: transformers.PretrainedConfig,
    wanted: torch.dtype,
    *,
    scalar: bool = False,
) -> cost.ModelShape:
    """Read the model's sizes from its config.

    Args:
        chosen: the options.
        described: the model's config.
        wanted: dtype of the parameters.
        scalar: whether a scalar head is wanted in the place of the one over the vocabulary.

    Raises:
        mistake.Mistake: it is no decoder that generates text, or one without the head that is wanted.
    """
    _check_head(chosen, scalar=scalar)
    try:
        if reason := kinds.unserved(described, scalar=scalar):
            raise ValueError(reason)
        return shapes.shape(described, wanted, trust_remote_code=chosen.trust_remote_code)
    except Exception as problem:  # whatever a config makes transformers raise
        raise mistake.Mistake(
            f"model {chosen.model} ({described.model_type}) is no causal language model that can be trained "
            f"on trees ({folders.first_line(problem)}); name one with --model"
        ) from problem


def tokenizer(chosen: options.Options) -> transformers.PreTrainedTokenizerBase:
    """Load the tokenizer, the one of the model where no other is named.

    Raises:
        mistake.Mistake: there is none.
    """
    path = chosen.tokenizer or chosen.model
    if path == "tiny":
        return tiny.tokenizer()
    try:
        return transformers.AutoTokenizer.from_pretrained(
            path,
            revision=chosen.revision if chosen.tokenizer is None else None,
            trust_remote_code=chosen.trust_remote_code,
        )
    except Exception as problem:  # whatever the files of others make transformers raise
        raise mistake.Mistake(
            f"{path} has no tokenizer that can be loaded ({folders.first_line(problem)}); "
            "name a folder or hub id that has one with --tokenizer"
        ) from problem


def config(chosen: options.Options) -> transformers.PretrainedConfig:
    """Read the model's config, its positions scaled where that was asked for."""
    described = _config(chosen)
    return described if chosen.rope_scaling is None else rope.scaled(described, chosen.rope_scaling)


def _config(chosen: options.Options) -> transformers.PretrainedConfig:
    """Read the model's config; the first thing that a missing or broken model folder fails at."""
    path = str(chosen.model)
    if path == "tiny":
        return tiny_config(chosen)
    try:
        return transformers.AutoConfig.from_pretrained(
            path, revision=chosen.revision, trust_remote_code=chosen.trust_remote_code
        )
    except Exception as problem:  # whatever the files of others make transformers raise
        where = "folder" if pathlib.Path(path).exists() else "folder or hub id"
        raise mistake.Mistake(
            f"model {path} cannot be loaded: no {where} with a model that transformers knows "
            f"({folders.first_line(problem)}); {_instead(pathlib.Path(path))}"
        ) from problem


def _instead(folder: pathlib.Path) -> str:
    """Say what to name in the place of a folder that is none of a model."""
    if _is_model(folder / "model"):
        return f"did you mean {folder / 'model'}?"
    trained = states.run_options(folder)
    if trained is None:
        return "name one with --model"
    if trained.get("use_peft"):
        return "it is a checkpoint of an adapter, and model/ is written when its run ends"
    return f"it is a checkpoint: say --model {trained.get('model')} --init_from {folder}"


def _is_model(folder: pathlib.Path) -> bool:
    """Say whether a folder is one of a model or of an adapter."""
    return any((folder / name).is_file() for name in ("config.json", peft_format.CONFIG))


def check_weights(chosen: options.Options) -> None:
    """Refuse a model folder whose weights are missing, cut or unreadable, before rows are tokenized."""
    folder = pathlib.Path(str(chosen.model))
    if chosen.model != "tiny" and folder.is_dir():
        folders.check(f"model {chosen.model}", folder)


def tiny_config(chosen: options.Options) -> transformers.LlamaConfig:
    """Return the shape of the built-in model: a Llama of 1.1 million parameters over bytes."""
    words: Any = tiny.tokenizer() if chosen.tokenizer is None else tokenizer(chosen)
    return transformers.LlamaConfig(
        vocab_size=-(-len(words) // 64) * 64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )


def attention(chosen: options.Options, device: ports.Device) -> str:
    """Return the kind of tree attention: what was asked for where the device has it, else what it prefers."""
    meant = ATTENTION[chosen.attn_implementation]
    return next((kind for kind in device.attention if kind in meant), device.attention[0])


def checkpointing(chosen: options.Options, device: ports.Device) -> cost.Checkpointing:
    """Return what the backward makes again: attention can be kept where it runs in blocks alone."""
    asked = chosen.gradient_checkpointing
    return asked if attention(chosen, device) == "blocks" else bool(asked)


def data_seed(chosen: options.Options) -> int | None:
    """Return the seed of the order of rows, None when they are taken as they come."""
    if not chosen.shuffle_dataset:
        return None
    return chosen.seed if chosen.data_seed is None else chosen.data_seed


def max_length(
    command: config_.Command, described: transformers.PretrainedConfig, note: Callable[[str], None]
) -> int | None:
    """Return the most tokens of a sequence: what was asked for, and no more than the model holds.

    Args:
        command: what was asked for.
        described: the model's config.
        note: told when the model holds fewer than the default.
    """
    wanted, holds = command.options.max_length, _holds(described)
    if wanted is None or holds is None or wanted <= holds:
        return holds if wanted is None else wanted
    why = " (beyond it positions turn by the longest sequence of a pack)"
    why = why if loading.max_length(described) else ""
    if options.asked(command.algorithm, command.options, command.given, "max_length"):
        raise mistake.Mistake(
            f"max_length {wanted} came; model {command.options.model} holds {holds}{why}: lower it"
        )
    note(f"max_length is {holds}, what model {command.options.model} holds{why}")
    return holds


def check_dropout(chosen: options.Options, described: transformers.PretrainedConfig) -> None:
    """Refuse dropout on trees, whose branches would share their prefix's mask, and inside of attention."""
    rates = dropouts(described) if not chosen.disable_dropout else {}
    inside = [f"{name} {rate}" for name, rate in rates.items() if name.startswith("att")]
    if inside:
        raise mistake.Mistake(
            f"model {chosen.model} has {', '.join(inside)}, and no kernel here drops attention; set it to 0 "
            "in config.json, or train without any dropout (--disable_dropout)"
        )
    if rates and chosen.packing == "tree":
        told = ", ".join(f"{name} {rate}" for name, rate in rates.items())
        raise mistake.Mistake(
            f"model {chosen.model} has {told}, and samples that share a prefix would share its mask; train "
            "without dropout (--disable_dropout) or without sharing (--packing none)"
        )


def model(
    chosen: options.Options, device: ports.Device, *, scalar: bool = False, training: bool = True
) -> tuple[transformers_lm.TransformersLM, dict[str, Tensor]]:
    """Load the model and its parameters.

    Args:
        chosen: the options.
        device: where it runs.
        scalar: give it a scalar head in the place of the one over the vocabulary.
        training: whether its parameters are updated.

    Raises:
        mistake.Mistake: it cannot be loaded, or cannot be trained on trees.
    """
    wanted, run = dtype(chosen, device), products(chosen, device)
    modes = {
        "attention": attention(chosen, device),
        "autocast": None if run == wanted else run,
        "price": device.price,
        "dropout": training and not chosen.disable_dropout,
        "gradient_checkpointing": training and chosen.gradient_checkpointing,
        "activation_offloading": training and chosen.activation_offloading,
        "feed_forward_chunk": chosen.chunk_size_feed_forward,
    }
    _check_head(chosen, scalar=scalar)
    try:
        if chosen.model == "tiny":
            module: Any = _tiny(chosen, wanted, scalar=scalar)
            made, params = loading.bind(module, device=device.type, **modes)
        else:
            made, params = _load(chosen, wanted, device, scalar=scalar, **modes)
        return low_rank.beside(chosen, made, params, training=training)
    except (OSError, ValueError) as problem:
        raise mistake.Mistake(f"model {chosen.model}: {folders.first_line(problem)}") from problem


def _check_head(chosen: options.Options, *, scalar: bool) -> None:
    """Refuse a reward model where one that writes is wanted: its head over the vocabulary is not trained."""
    adapter.check_kind(chosen, scalar=scalar)
    named: list[str] = [] if scalar or chosen.model == "tiny" else list(_config(chosen).architectures or [])
    if any(kind.endswith("ForSequenceClassification") for kind in named):
        raise mistake.Mistake(
            f"model {chosen.model} is a reward model ({named[0]}), which writes nothing; name a language "
            "model, or evaluate it with --algorithm reward"
        )


def _load(
    chosen: options.Options, wanted: torch.dtype, device: ports.Device, *, scalar: bool, **modes: Any
) -> tuple[transformers_lm.TransformersLM, dict[str, Tensor]]:
    """Load a model from a folder or the hub."""
    return loading.load(
        str(chosen.model),
        dtype=wanted,
        device=device.type,
        revision=chosen.revision,
        trust_remote_code=chosen.trust_remote_code,
        scalar_seed=chosen.seed if scalar else None,
        config=None if chosen.rope_scaling is None else config(chosen),
        **modes,
    )


def _tiny(chosen: options.Options, wanted: torch.dtype, *, scalar: bool) -> transformers.PreTrainedModel:
    """Draw the built-in model's weights from the seed."""
    kind: Any = transformers.AutoModelForCausalLM
    described: Any = config(chosen)
    if scalar:
        kind, described.num_labels = transformers.AutoModelForSequenceClassification, 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(chosen.seed)
        made = kind.from_config(described, dtype=wanted, attn_implementation=tree_attention.NAME)
    if scalar:
        scalar_head.draw(made, chosen.seed)
        return made
    made.generation_config = transformers.GenerationConfig.from_model_config(made.config)
    return made


def _holds(described: transformers.PretrainedConfig) -> int | None:
    """Return the positions that a model was made for, and of these as many as do not depend on each other."""
    text = described.get_text_config()
    made = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return min((number for number in (made, loading.max_length(described)) if number), default=None)


def dropouts(config: transformers.PretrainedConfig) -> Mapping[str, float]:
    """Return the dropout rates above 0 in a config, by name, without those of heads that a decoder lacks."""
    text = config.get_text_config()
    rates = {
        n: v
        for n, v in text.to_dict().items()
        if n.endswith(("dropout", "_pdrop", "dropout_prob")) and not n.startswith(OF_OTHER_HEADS)
    }
    return {n: float(v) for n, v in rates.items() if isinstance(v, int | float) and v > 0}
