"""From a folder or hub id to a bound model that has been proved to serve trees."""

from collections.abc import Mapping

import numpy as np
import torch
import transformers
from torch import Tensor

from adapters import transformers_lm, tree_attention
from core import head, pack
from core.plan import sample

TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-3}
ROUGH = 6e-2


def load(
    path: str,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    attention: str = "rectangles",
    dropout: bool = False,
    gradient_checkpointing: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[transformers_lm.TransformersLM, dict[str, Tensor]]:
    """Load a causal language model and bind it.

    Args:
        path: a folder in Hugging Face's format, or a hub id.
        dtype: of the parameters.
        device: torch's name of the device.
        attention: `rectangles` or `mask`; see `core.attention`.
        dropout: keep the model's own dropout.
        gradient_checkpointing: recompute each layer in backward and keep only its input.
        revision: of a hub id.
        trust_remote_code: run code that comes with the model.

    Returns:
        The model and its parameters by name.

    Raises:
        ValueError: trees cannot be served, with the model's type and what stands in the way.
    """
    module = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        attn_implementation=tree_attention.NAME,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    return bind(
        module.to(device), attention=attention, dropout=dropout, gradient_checkpointing=gradient_checkpointing
    )


def bind(
    module: transformers.PreTrainedModel,
    *,
    attention: str = "rectangles",
    dropout: bool = False,
    gradient_checkpointing: bool = False,
) -> tuple[transformers_lm.TransformersLM, dict[str, Tensor]]:
    """Take a module apart into a model without weights and its parameters, and prove that it serves trees.

    Args and Raises as in `load`; the module's attention implementation must be `tree_attention.NAME`.
    """
    if module.base_model is module or module.get_output_embeddings() is None:
        raise ValueError(
            f"a {module.config.model_type} model has no decoder with an output head; name a causal model."
        )
    leaves = {id(p): n for n, p in module.named_parameters()}
    named = module.named_parameters(remove_duplicate=False)
    slots = tuple((*_place(module, path), leaves[id(p)]) for path, p in named)
    params = {n: p.detach() for n, p in module.named_parameters()}
    model = transformers_lm.TransformersLM(
        module=module, slots=slots, shape=_head_shape(module.config), attention=attention
    )
    for submodule, attribute, name in slots:
        empty = torch.empty_like(params[name], device="meta")
        submodule._parameters[attribute] = torch.nn.Parameter(empty, requires_grad=False)
    module.eval()
    prove(model, params)
    _set_modes(module, dropout=dropout, gradient_checkpointing=gradient_checkpointing)
    return model, params


def prove(model: transformers_lm.TransformersLM, params: Mapping[str, Tensor]) -> None:
    """Run a small forest and each of its sequences alone; refuse a model for which they differ.

    Raises:
        ValueError: names the model's type and what stands in the way.
    """
    module, kind = model.module, model.module.config.model_type
    vocab = module.get_output_embeddings().weight.shape[0]
    draw = np.random.default_rng(0).integers(0, vocab, 14)
    sequences = [draw[:9], np.concatenate([draw[:5], draw[9:]])]
    samples = [sample.Sample(tokens=s, trained=np.arange(len(s)) > 0) for s in sequences]
    device = next(iter(params.values())).device
    together = pack.build(samples, pack.count(samples), device=device)
    alone = [pack.build([s], pack.count([s]), device=device) for s in samples]
    try:
        forest = model.predict(params, together, 0).logprobs
        single = torch.cat([model.predict(params, each, 0).logprobs for each in alone])
        with torch.no_grad(), model._run(params, 0):
            own = [_own_logprobs(model, each) for each in alone]
    except (TypeError, ValueError, RuntimeError, AttributeError) as problem:
        raise ValueError(
            f"a {kind} model cannot be trained on trees: {str(problem).splitlines()[0]}"
        ) from problem
    tolerance = TOLERANCES.get(next(iter(params.values())).dtype, ROUGH)
    if not torch.allclose(single, torch.cat(own), rtol=tolerance, atol=tolerance):
        raise ValueError(f"a {kind} model changes its logits after the head in a way that is not known here.")
    if not torch.allclose(forest, single, rtol=tolerance, atol=tolerance):
        raise ValueError(
            f"a {kind} model cannot be trained on trees: a branch sees its neighbours (layers {_layer_types(module)})."
        )


def _own_logprobs(model: transformers_lm.TransformersLM, each: pack.Pack) -> Tensor:
    """Score one chain with the model's own forward, head included."""
    route = tree_attention.route(each, kind=model.attention)
    logits = model.module(
        input_ids=each.tokens[None], position_ids=each.depths[None], use_cache=False, tree=route
    ).logits[0]
    if route.calls == 0:
        raise ValueError("its layers do not use transformers' attention interface.")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return wide.index_select(0, each.edge_nodes).gather(-1, each.edge_tokens[:, None])[:, 0]


def _head_shape(config: transformers.PretrainedConfig) -> head.Shape:
    """Read from a config what is done to the head's product; `prove` checks it against the model's own
    logits."""
    text = config.get_text_config()
    scale = float(getattr(text, "logit_scale", None) or 1.0)
    divisor = float(getattr(text, "logits_scaling", None) or 1.0)
    softcap = float(getattr(text, "final_logit_softcapping", None) or 0.0)
    return head.Shape(scale=scale / divisor, softcap=softcap)


def _place(module: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    """Return the submodule and the attribute that a parameter's path names."""
    parent, _, attribute = path.rpartition(".")
    return module.get_submodule(parent), attribute


def _layer_types(module: transformers.PreTrainedModel) -> str:
    """Name what the layers are, as far as the config says."""
    types = getattr(module.config.get_text_config(), "layer_types", None)
    return ", ".join(dict.fromkeys(types)) if types else type(module.base_model).__name__


def _set_modes(module: transformers.PreTrainedModel, *, dropout: bool, gradient_checkpointing: bool) -> None:
    """Leave the module in the mode that it trains in: dropout and recomputation both hang on `training`."""
    if gradient_checkpointing:
        if not module.supports_gradient_checkpointing:
            raise ValueError(
                f"a {module.config.model_type} model has no gradient checkpointing; drop the option."
            )
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not dropout:
        for submodule in module.modules():
            if isinstance(submodule, torch.nn.Dropout):
                submodule.p = 0.0
            if isinstance(getattr(submodule, "attention_dropout", None), float):
                submodule.attention_dropout = 0.0
    module.train(dropout or gradient_checkpointing)
