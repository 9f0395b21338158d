"""From a folder or hub id to a bound model that has been proved to serve trees."""

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.utils import logging

from adapters import chunks, kinds, recompute, scalar_head, shapes, transformers_lm, tree_attention
from core import head, pack, precision
from core.plan import cost, sample, spans

TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-3}
ROUGH = 6e-2
PROBE_CHUNK = 3
"""Chunks that the sequences of `prove` have several of."""
SERVED = {"full_attention", "sliding_attention"}


def load(
    path: str,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    attention: str = "blocks",
    autocast: torch.dtype | None = None,
    dropout: bool = False,
    gradient_checkpointing: cost.Checkpointing = False,
    activation_offloading: bool = False,
    feed_forward_chunk: int = 0,
    price: spans.Price | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    scalar_seed: int | None = None,
    config: transformers.PretrainedConfig | None = None,
) -> tuple[transformers_lm.TransformersLM, dict[str, Tensor]]:
    """Load a causal language model, or a reward model on its decoder, and bind it.

    Args:
        path: a folder in Hugging Face's format, or a hub id.
        dtype: of the parameters.
        device: torch's name of the device.
        attention: one of `tree_attention.KINDS`.
        autocast: the dtype that products run in, whatever the parameters are; None: theirs.
        dropout: keep the model's own dropout.
        gradient_checkpointing: recompute each layer in backward and keep only its input, or, when this is
            `selective`, its input and what its attention gave where it runs in blocks.
        activation_offloading: keep what backward needs in host memory, but for what `selective` keeps.
        feed_forward_chunk: positions that a feed-forward part runs at a time; 0: all.
        price: what blocks of attention cost on the device; None: each runs by itself.
        revision: of a hub id.
        trust_remote_code: run code that comes with the model.
        scalar_seed: load it with a scalar head in the place of the one over the vocabulary, drawn from this
            seed where the folder has none. None: a language model.
        config: in the place of the folder's own; None: that one.

    Returns:
        The model and its parameters by name.

    Raises:
        ValueError: trees cannot be served, with the model's type and what stands in the way.
    """
    module, told = _read(
        path,
        scalar=scalar_seed is not None,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        **({} if config is None else {"config": copy.deepcopy(config)}),
    )
    _complete(module, path, told, scalar_seed)
    return bind(
        module, device=device, attention=attention, autocast=autocast, dropout=dropout, price=price,
        gradient_checkpointing=gradient_checkpointing, activation_offloading=activation_offloading,
        feed_forward_chunk=feed_forward_chunk,
    )  # fmt: skip


def _complete(module: Any, path: str, told: Mapping[str, Any], scalar_seed: int | None) -> None:
    """Refuse weights that are missing or unlike; draw a scalar head that the folder has none of."""
    if told["mismatched_keys"]:
        name, there, wanted = sorted(told["mismatched_keys"])[0]
        raise ValueError(
            f"{path} holds weights of another shape than its config says: {name} is {list(there)}, and "
            f"{list(wanted)} was wanted; mend the folder."
        )
    missing = sorted(told["missing_keys"])
    if scalar_seed is not None and missing == [scalar_head.WEIGHT]:
        scalar_head.draw(module, scalar_seed)
    elif missing:
        raise ValueError(
            f"{path} lacks {len(missing)} of the weights that its config asks for, {missing[0]} the first, "
            "and they would be drawn at random; mend the folder."
        )
    known = {_unnumbered(name) for name, _ in module.named_parameters()}
    if more := sorted(name for name in told["unexpected_keys"] if _unnumbered(name) in known):
        raise ValueError(
            f"{path} holds {len(more)} weights of layers that its config does not have, {more[0]} the first, "
            "and they would be left out; mend the config."
        )


def _unnumbered(name: str) -> str:
    """Return a weight's name without the number of its layer."""
    return re.sub(r"\.\d+\.", ".", name)


def _read(path: str, *, scalar: bool, **asked: Any) -> Any:
    """Let transformers read a folder; return the module and what it found missing or unlike."""
    _check_kind(path, scalar=scalar, asked=asked)
    kind: Any = transformers.AutoModelForCausalLM
    if scalar:
        kind = transformers.AutoModelForSequenceClassification
        if "config" in asked:
            asked["config"].num_labels = 1
        else:
            asked["num_labels"] = 1
    try:
        with _quiet():
            return kind.from_pretrained(
                path,
                output_loading_info=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are refused by name
                attn_implementation=tree_attention.NAME,
                **asked,
            )
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as problem:  # whatever a folder, or a package that it names, makes transformers raise
        if isinstance(problem, KeyError) and problem.args == (tree_attention.NAME,):
            raise ValueError("it cannot be trained on trees: its attention is one of its own.") from problem
        told = (str(problem).strip().splitlines() or [""])[0]
        raise ValueError(
            f"it cannot be loaded ({type(problem).__name__}: {told}); mend the folder, or install what it "
            "asks for."
        ) from problem


def _check_kind(path: str, *, scalar: bool, asked: Mapping[str, Any]) -> None:
    """Refuse a kind of model that is never served, before its weights are read."""
    given = {name: asked[name] for name in ("revision", "trust_remote_code")}
    try:
        described = asked.get("config") or transformers.AutoConfig.from_pretrained(path, **given)
    except Exception:  # whatever a folder makes transformers raise; loading meets it again, and tells it
        return
    kinds.check(described, scalar=scalar)


def _check_attention(module: transformers.PreTrainedModel) -> None:
    """Refuse a module that was loaded for another attention."""
    loaded = getattr(module.config.get_text_config(), "_attn_implementation", None)
    if loaded != tree_attention.NAME:
        raise ValueError(
            f"the module was loaded with attn_implementation {loaded!r}, which knows no trees; load it with "
            f"attn_implementation={tree_attention.NAME!r}, adapters.tree_attention.NAME."
        )


def bind(
    module: transformers.PreTrainedModel,
    *,
    device: str | torch.device | None = None,
    attention: str = "blocks",
    autocast: torch.dtype | None = None,
    dropout: bool = False,
    gradient_checkpointing: cost.Checkpointing = False,
    activation_offloading: bool = False,
    feed_forward_chunk: int = 0,
    price: spans.Price | None = None,
) -> tuple[transformers_lm.TransformersLM, dict[str, Tensor]]:
    """Take a module apart into a model without weights and its parameters, and prove that it serves trees.

    Args and Raises as in `load`; the module's attention implementation must be `tree_attention.NAME`. With no
    device it stays where it is. Afterwards the module is empty: save with `model.save(params, folder)`.
    """
    scalar = scalar_head.has(module)
    if module.base_model is module or not (scalar or module.get_output_embeddings() is not None):
        raise ValueError(
            f"a {module.config.model_type} model has no decoder with an output head; name a causal model."
        )
    _check_attention(module)
    if scalar:
        module.config.pad_token_id = None  # no token is padding here; whoever saves it names one
    leaves = {id(p): n for n, p in module.named_parameters()}
    named = module.named_parameters(remove_duplicate=False)
    slots = tuple((*_place(module, path), leaves[id(p)]) for path, p in named)
    # Not `module.to`: on some devices every place of a tied weight would become a leaf of its own.
    params = {n: p.detach().to(device or p.device) for n, p in module.named_parameters()}
    for submodule in module.modules():
        submodule._buffers.update(
            {n: b.to(device or b.device) for n, b in submodule._buffers.items() if b is not None}
        )
    kind = _attention(module.config, attention, recomputed=bool(gradient_checkpointing))
    model = transformers_lm.TransformersLM(
        module=module,
        slots=slots,
        shape=_head_shape(module.config),
        attention=kind,
        autocast=autocast,
        max_length=max_length(module.config),
        chunked=chunks.install(module, PROBE_CHUNK) if feed_forward_chunk else (),
        offloaded=activation_offloading,
        keep_attention=gradient_checkpointing == "selective" and kind == "blocks",
        rates=None if price is None else shapes.rates(module.config, price),
    )
    for submodule, attribute, name in slots:
        empty = torch.empty_like(params[name], device="meta")
        submodule._parameters[attribute] = torch.nn.Parameter(empty, requires_grad=False)
    module.eval()
    prove(model, params)
    for part in model.chunked:
        part.size = feed_forward_chunk
    if gradient_checkpointing:
        _recompute_layers(module, dropout=dropout)
    if dropout:
        module.train()
    _prove_draws(model, params, dropout=dropout)
    return model, params


def prove(model: transformers_lm.TransformersLM, params: Mapping[str, Tensor]) -> None:
    """Run a small forest and each of its sequences alone; refuse a model for which they differ.

    Raises:
        ValueError: names the model's type and what stands in the way.
    """
    module, kind = model.module, model.module.config.model_type
    broken = next((n for n, p in params.items() if not bool(p.isfinite().all())), None)
    if broken is not None:
        raise ValueError(f"its weights are not finite: {broken} holds NaN or infinity; mend the folder.")
    samples = _two_branches(module)
    device = next(iter(params.values())).device
    together = pack.build(samples, pack.count(samples), device=device)
    alone = [pack.build([s], pack.count([s]), device=device) for s in samples]
    unknown = set(_layer_types(module.config)) - SERVED
    if unknown:
        raise ValueError(
            f"a {kind} model cannot be trained on trees: it has layers of {', '.join(sorted(unknown))}."
        )
    try:
        field = "values" if model.scalar else "logprobs"
        forest = getattr(model.predict(params, together, 0), field)
        chains = [getattr(model.predict(params, each, 0), field) for each in alone]
        single = torch.cat(chains)
        with torch.no_grad(), model.running(params, 0):
            own = [_own_scores(model, each) for each in alone]
        # A reward model's own forward tells the last token's score alone.
        shown = [chain[-len(told) :] for chain, told in zip(chains, own, strict=True)]
    except (TypeError, ValueError, RuntimeError, AttributeError) as problem:
        raise ValueError(
            f"a {kind} model cannot be trained on trees: {str(problem).splitlines()[0]}"
        ) from problem
    if not bool(torch.cat(own).isfinite().all()):
        raise ValueError(
            f"a {kind} model gives scores that are not finite, though its weights are; look for a number in "
            "its config that it cannot have."
        )
    tolerance = TOLERANCES.get(model.autocast or next(iter(params.values())).dtype, ROUGH)
    if not torch.allclose(torch.cat(shown), torch.cat(own), rtol=tolerance, atol=tolerance):
        raise ValueError(f"a {kind} model changes its logits after the head in a way that is not known here.")
    if not torch.allclose(forest, single, rtol=tolerance, atol=tolerance):
        raise ValueError(f"a {kind} model cannot be trained on trees: a branch sees its neighbors.")


def _own_scores(model: transformers_lm.TransformersLM, each: pack.Pack) -> Tensor:
    """Score one chain with the model's own forward, head included."""
    route = model.route(each)
    with model.casting(each.tokens.device):
        logits = model.module(
            input_ids=each.tokens[None], position_ids=each.depths[None], use_cache=False, tree=route
        ).logits[0]
    types = _layer_types(model.module.config)
    if route.calls != len(types):
        raise ValueError(f"{route.calls} of its {len(types)} layers use transformers' attention interface.")
    if route.windows < types.count("sliding_attention"):
        raise ValueError("its layers do not tell their attention how far it may look back.")
    if model.scalar:
        return precision.widened(logits)
    wide = precision.widened(logits).log_softmax(-1)
    return wide.index_select(0, each.edge_nodes).gather(-1, each.edge_tokens[:, None])[:, 0]


def _head_shape(config: transformers.PretrainedConfig) -> head.Shape:
    """Read what a config does to the head's product; `prove` checks it on the model's own logits."""
    text = config.get_text_config()
    scale = float(getattr(text, "logit_scale", None) or 1.0)
    divisor = float(getattr(text, "logits_scaling", None) or 1.0)
    softcap = float(getattr(text, "final_logit_softcapping", None) or 0.0)
    return head.Shape(scale=scale / divisor, softcap=softcap)


def _place(module: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    """Return the submodule and the attribute that a parameter's path names."""
    parent, _, attribute = path.rpartition(".")
    return module.get_submodule(parent), attribute


def _layer_types(config: transformers.PretrainedConfig) -> list[str]:
    """Name the kind of each layer, from the config's own list or from its window."""
    text = config.get_text_config()
    types = getattr(text, "layer_types", None)
    if types:
        return list(types)
    windowed = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    return ["sliding_attention" if windowed else "full_attention"] * text.num_hidden_layers


def _attention(config: transformers.PretrainedConfig, kind: str, *, recomputed: bool) -> str:
    """Return the kind of attention that runs: FlexAttention, but for a soft cap in layers that run again.

    Its plain form takes the backward of a cap inside of the backward, and a layer that was made again there
    got wrong gradients. Whether its compiled form would is not known.
    """
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return "mask" if kind == "flex" and capped and recomputed else kind


def max_length(config: transformers.PretrainedConfig) -> int:
    """Return the length up to which a rotary table does not depend on the longest sequence; 0: at any.

    Args:
        config: of the model.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    tables = [t for t in rope.values() if isinstance(t, dict)] or [rope]
    # `dynamic` turns by the positions that the config holds, and reads no others.
    limits = [
        (t.get("rope_type") == "longrope" and t.get("original_max_position_embeddings"))
        or text.max_position_embeddings
        for t in tables
        if t.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=0)


def _two_branches(module: transformers.PreTrainedModel) -> list[sample.Sample]:
    """Make two sequences that part after five tokens."""
    words: Any = module.get_input_embeddings()
    draw = np.random.default_rng(0).integers(0, words.weight.shape[0], 14)
    sequences = [draw[:9], np.concatenate([draw[:5], draw[9:]])]
    return [sample.Sample(tokens=s, trained=np.arange(len(s)) > 0) for s in sequences]


def _recompute_layers(module: transformers.PreTrainedModel, *, dropout: bool) -> None:
    """Let each layer, and no more of the module, know that it trains: recomputation hangs on that.

    Layers that drop out by a rate of their own, rather than by a module, are told not to where nobody asked.
    """
    layers = recompute.layers(module)
    if not module.supports_gradient_checkpointing or not layers:
        raise ValueError(
            f"a {module.config.model_type} model has no gradient checkpointing; drop the option."
        )
    module._set_gradient_checkpointing(True)
    for layer in layers:
        layer.training = True
        rates = [n for n, value in vars(layer).items() if "dropout" in n and isinstance(value, float)]
        for name in rates if not dropout else ():
            setattr(layer, name, 0.0)


def _prove_draws(
    model: transformers_lm.TransformersLM, params: Mapping[str, Tensor], *, dropout: bool
) -> None:
    """Run once as in training: with dropout one key gives one mask, without it nothing is drawn."""
    samples = _two_branches(model.module)
    device = next(iter(params.values())).device
    each = pack.build(samples, pack.count(samples), device=device)
    field = "values" if model.scalar else "logprobs"
    keys = (0, 0 if dropout else 1)
    first, second = (getattr(model.predict(params, each, key), field) for key in keys)
    if not torch.equal(first, second):
        kind = model.module.config.model_type
        raise ValueError(
            f"a {kind} model draws random numbers that its keys do not decide; drop the options."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Load without progress bars: they would break into the lines of a run."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
