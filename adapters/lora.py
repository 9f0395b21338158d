"""LoRA: what is trained is two small matrices beside each frozen one; read and written in PEFT's format.

    y = W x + bias + scale B A drop(x)        scale = alpha / rank, or alpha / sqrt(rank)

A is `[rank, in]`, B `[out, rank]`; B starts at 0. Hu et al. 2021 (arXiv:2106.09685), sec. 4.1; the square
root is Kalajdzievski 2023 (arXiv:2312.03732). The adapter's matrices are the model's only parameters: without
them, as in `model.predict({}, pack, None)`, it is the base.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import pytorch_utils

from adapters import scalar_head
from core import keys, pack, precision
from core.plan import sample

if TYPE_CHECKING:
    from adapters import transformers_lm

ALL = "all-linear"
"""In the place of names: every linear layer but the output head."""
LINEAR = (torch.nn.Linear, pytorch_utils.Conv1D)
DOWN, UP = "lora_A", "lora_B"


@attrs.frozen(kw_only=True)
class Settings:
    """What an adapter is made of.

    Attributes:
        rank: rows of A.
        alpha: the scale times the rank, or its square root.
        dropout: chance that a number of the layer's input is hidden from the adapter in training.
        rank_stabilized: divide alpha by the square root of the rank.
        targets: layers that get one: `all-linear`, ends of their paths, or patterns of whole paths.
        whole: ends of the paths of modules that are trained as they are, beside the adapter.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    rank_stabilized: bool = False
    targets: tuple[str, ...] = (ALL,)
    whole: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """Return the factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


@attrs.frozen(kw_only=True, eq=False)
class Adapter:
    """An adapter in its place.

    Attributes:
        settings: what it is made of.
        targets: paths of the layers that it stands beside.
        whole: paths of the modules that are trained as they are.
        leaves: names of its matrices; a swap without them leaves the base.
        whole_leaves: names of the parameters of the modules that are trained whole.
    """

    settings: Settings
    targets: tuple[str, ...]
    whole: tuple[str, ...]
    leaves: frozenset[str]
    whole_leaves: frozenset[str]


@attrs.frozen(kw_only=True)
class Trained:
    """How much an adapter trains.

    Attributes:
        num: parameters.
        head_columns: those of the output head's matrix that is trained: the rank where one stands beside the
            head, all where it is trained whole; 0: none is.
    """

    num: int
    head_columns: int


class Beside:
    """What a layer's forward is followed by: the adapter's part is added to what the layer gave."""

    def __init__(self, scale: float) -> None:
        """Stand beside a layer.

        Args:
            scale: factor of B A.
        """
        self.scale, self.calls = scale, 0

    def __call__(self, layer: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Return the sum; None, the layer's own, where no adapter is swapped in."""
        if not torch.compiler.is_compiling():  # a graph changes nothing outside of it
            self.calls += 1
        if layer._parameters[DOWN] is None:
            return None
        return torch.add(output, functional.linear(narrowed(layer, args[0]), up(layer, args[0])))

    def __repr__(self) -> str:
        return f"Beside({self.scale})"


def narrowed(layer: Any, hidden: Tensor) -> Tensor:
    """Return `scale A drop(x)` in the dtype of `x`: products run in the model's precision."""
    low = functional.linear(layer.lora_dropout(hidden), layer._parameters[DOWN].to(hidden.dtype))
    return low * layer.lora_beside.scale


def up(layer: torch.nn.Module, like: Tensor) -> Tensor:
    """Return B in the dtype of a tensor."""
    matrix = layer._parameters[UP]
    assert matrix is not None, "A came without B"
    return matrix.to(like.dtype)


def is_on(layer: torch.nn.Module) -> bool:
    """Say whether an adapter is swapped in beside a layer."""
    return layer._parameters.get(DOWN) is not None


def attach(
    model: transformers_lm.TransformersLM,
    params: Mapping[str, Tensor],
    settings: Settings,
    *,
    seed: int = 0,
) -> tuple[transformers_lm.TransformersLM, dict[str, Tensor]]:
    """Freeze a model's parameters and put an adapter beside its layers.

    Args:
        model: as it was loaded. Its module is changed: from here on only what is returned runs.
        params: its parameters; they become `frozen` and are never written to.
        settings: what the adapter is made of.
        seed: of A, drawn uniformly from +-1 / sqrt(in), each matrix by its own name.

    Returns:
        The model, and what is trained: A and B of every layer in float32 or better, and the modules that are
        trained whole, in their own dtype.

    Raises:
        ValueError: a name fits no layer, or one that cannot have an adapter.
    """
    targets, whole = resolve(model.module, settings)
    modules = dict(model.module.named_modules())
    held = {id(part): leaf for part, attribute, leaf in model.slots if attribute == "weight"}
    slots, new = list(model.slots), dict[str, Tensor]()
    for path in targets:
        layer: Any = modules[path]
        weight = params[held[id(layer)]]
        rows, columns = _sizes(layer, weight)
        kind = {"dtype": precision.wide(weight.dtype), "device": weight.device}
        new[f"{path}.{DOWN}.weight"] = _drawn((settings.rank, columns), seed, path).to(**kind)
        new[f"{path}.{UP}.weight"] = torch.zeros(rows, settings.rank, **kind)
        layer.lora_beside, layer.lora_dropout = Beside(settings.scale), torch.nn.Dropout(settings.dropout)
        layer.lora_dropout.train(settings.dropout > 0)
        layer.register_forward_hook(layer.lora_beside)
        for side in (DOWN, UP):
            layer.register_parameter(side, None)
            slots.append((layer, side, f"{path}.{side}.weight"))
    if settings.dropout:
        model.module.training = True  # alone, without what is below it: a pass then draws from its key
    inside = {id(part) for path in whole for part in modules[path].modules()}
    kept = {leaf: params[leaf].clone() for part, _, leaf in model.slots if id(part) in inside}
    adapter = Adapter(
        settings=settings,
        targets=targets,
        whole=whole,
        leaves=frozenset(new),
        whole_leaves=frozenset(kept),
    )
    new |= kept
    made = attrs.evolve(model, slots=tuple(slots), frozen=dict(params), adapter=adapter)
    _prove_called(made, new)
    return made, new


def resolve(
    module: transformers.PreTrainedModel, settings: Settings
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the paths of the layers that get an adapter, and of the modules that are trained whole.

    Args:
        module: on any device, meta too.
        settings: whose names are looked for.

    Raises:
        ValueError: a name fits no layer, or one that cannot have an adapter.
    """
    paths = {path: part for path, part in module.named_modules() if path}
    own = (scalar_head.WEIGHT.rpartition(".")[0],) if scalar_head.has(module) else ()
    whole = _fitting(paths, (*settings.whole, *own), module)
    linear = [path for path, part in paths.items() if isinstance(part, LINEAR)]
    heads = {id(module.get_output_embeddings()), *(id(paths[path]) for path in own)}
    named = tuple(name for name in settings.targets if name.lower() != ALL)
    found = set(_fitting(paths, named, module))
    if len(named) < len(settings.targets):
        found |= {path for path in linear if id(paths[path]) not in heads and not _below(path, whole)}
    odd = sorted(path for path in found if path not in linear)
    if odd:
        raise ValueError(
            f"lora_target_modules: {odd[0]} is a {type(paths[odd[0]]).__name__}, and only linear layers get "
            "an adapter; lora_modules_to_save trains a module whole."
        )
    held = set(linear if _tied_whole(module, paths, whole) else ())
    held = {path for path in held if id(paths[path]) in heads}
    twice = sorted(found & {path for path in linear if _below(path, whole) or path in held})
    if twice:
        raise ValueError(
            f"lora_modules_to_save trains {twice[0]} whole, and lora_target_modules gives it an adapter; "
            "keep one."
        )
    if not found:
        beside = " beside those that lora_modules_to_save trains whole" if whole else ""
        raise ValueError(
            f"lora_target_modules: a {module.config.model_type} model has no linear layer{beside}."
        )
    return tuple(path for path in linear if path in found), whole


def _tied_whole(
    module: transformers.PreTrainedModel, paths: Mapping[str, torch.nn.Module], whole: tuple[str, ...]
) -> bool:
    """Say whether an embedding that is the output head's weight too is trained whole."""
    words = next((path for path, part in paths.items() if part is module.get_input_embeddings()), "")
    return bool(module.config.get_text_config().tie_word_embeddings) and _below(words, whole)


def is_base(model: transformers_lm.TransformersLM, params: Mapping[str, Tensor]) -> bool:
    """Say whether a model with these parameters is its base: B is 0, and what is whole the base's."""
    adapter = model.adapter
    assert adapter is not None, "there is no adapter"
    ups = [params[leaf] for leaf in adapter.leaves if is_up(leaf)]
    same = all(torch.equal(params[leaf], model.frozen[leaf]) for leaf in adapter.whole_leaves)
    return same and not any(bool(up.any()) for up in ups)


def is_up(leaf: str) -> bool:
    """Say whether a parameter is a B, without which an adapter does nothing."""
    return leaf.endswith(f".{UP}.weight")


def trained(module: transformers.PreTrainedModel, settings: Settings) -> Trained:
    """Count what an adapter trains; Args and Raises as of `resolve`."""
    targets, whole = resolve(module, settings)
    paths = dict(module.named_modules())
    inside = {id(p): p.numel() for path in whole for p in paths[path].parameters()}
    low = sum(settings.rank * sum(_sizes(paths[path], paths[path].weight)) for path in targets)
    output: Any = module.get_output_embeddings()
    columns = 0
    if output is not None and any(paths[path] is output for path in targets):
        columns = settings.rank
    elif output is not None and id(output.weight) in inside:
        columns = output.weight.shape[1]
    return Trained(num=low + sum(inside.values()), head_columns=columns)


def merged(
    model: transformers_lm.TransformersLM, params: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Add an adapter to the weights that it stands beside, in float32 or better.

        W' = W + scale B A

    Args:
        model: with an adapter.
        params: what was trained.

    Returns:
        Every leaf of the model as it was before the adapter, in its own dtype; and the weight of the output
        head where it cannot be its leaf, because that is the embedding too.
    """
    assert model.adapter is not None, "there is no adapter to merge"
    leaves = {leaf: params.get(leaf, tensor) for leaf, tensor in model.frozen.items()}
    modules, apart = dict(model.module.named_modules()), dict[str, Tensor]()
    places = [(part, leaf) for part, attribute, leaf in model.slots if attribute == "weight"]
    for path in model.adapter.targets:
        layer: Any = modules[path]
        leaf = next(leaf for part, leaf in places if part is layer)
        down, up_ = (params[f"{path}.{side}.weight"] for side in (DOWN, UP))
        change = model.adapter.settings.scale * (up_ @ down)
        change = change.T if isinstance(layer, pytorch_utils.Conv1D) else change
        whole = leaves[leaf]
        total = (whole.to(change.dtype) + change).to(whole.dtype).contiguous()
        shared = sum(other == leaf for _, other in places) > 1
        (apart if shared else leaves)[f"{path}.weight" if shared else leaf] = total
    return leaves, apart


def save_merged(model: transformers_lm.TransformersLM, params: Mapping[str, Tensor], folder: str) -> None:
    """Write a Hugging Face folder of a model whose weights hold the adapter; see `merged`.

    Args:
        model: with an adapter.
        params: what was trained.
        folder: made if missing.
    """
    leaves, apart = merged(model, params)
    config = model.module.config
    tied = getattr(config, "tie_word_embeddings", None)
    try:
        with model.swap(leaves):
            for path, weight in apart.items():  # a swap of leaves cannot part what is tied
                place, _, attribute = path.rpartition(".")
                model.module.get_submodule(place)._parameters[attribute] = weight  # type: ignore[assignment]
                config.tie_word_embeddings = False
            model.module.save_pretrained(folder)
    finally:
        config.tie_word_embeddings = tied


def _fitting(
    paths: Mapping[str, torch.nn.Module], names: tuple[str, ...], module: transformers.PreTrainedModel
) -> tuple[str, ...]:
    """Return the paths that names fit, in the order of the modules; each must fit one."""
    found = set[str]()
    for name in names:
        fits = {path for path in paths if _fits(name, path)}
        if not fits:
            ends = sorted({path.rpartition(".")[2] for path, p in paths.items() if isinstance(p, LINEAR)})
            near = difflib.get_close_matches(name, [*ends, ALL], n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"no module of this {module.config.model_type} model is called {name}; its linear layers "
                f"are {', '.join(ends)}.{hint}"
            )
        found |= fits
    return tuple(path for path in paths if path in found)


def _fits(name: str, path: str) -> bool:
    """Say whether a name is the end of a path, or a pattern of all of it."""
    if path == name or path.endswith(f".{name}"):
        return True
    try:
        return re.fullmatch(name, path) is not None
    except re.error:
        return False


def _below(path: str, whole: tuple[str, ...]) -> bool:
    """Say whether a path is one of some modules, or inside of one."""
    return any(path == each or path.startswith(f"{each}.") for each in whole)


def _sizes(layer: torch.nn.Module, weight: Any) -> tuple[int, int]:
    """Return the width of what a linear layer gives, and of what it takes."""
    rows, columns = weight.shape
    return (columns, rows) if isinstance(layer, pytorch_utils.Conv1D) else (rows, columns)


def _drawn(size: tuple[int, int], seed: int, path: str) -> Tensor:
    """Draw A from its own name, so that no other layer moves it."""
    source = torch.Generator().manual_seed(keys.fold_in(keys.key(seed), DOWN, path))
    return (2.0 * torch.rand(size, generator=source, dtype=torch.float64) - 1.0) / math.sqrt(size[1])


def _prove_called(model: transformers_lm.TransformersLM, params: Mapping[str, Tensor]) -> None:
    """Refuse layers whose weights are used without their forward: an adapter there would do nothing."""
    one = sample.Sample(tokens=np.arange(2), trained=np.arange(2) > 0)
    device = next(iter(params.values())).device
    model.predict(params, pack.build([one], pack.count([one]), device=device), None)
    adapter, module = model.adapter, model.module
    assert adapter is not None
    for path in adapter.targets:
        layer: Any = module.get_submodule(path)
        # Which experts run hangs on the token; the head's product is made tile by tile.
        if layer.lora_beside.calls or layer is module.get_output_embeddings() or ".experts." in path:
            continue
        raise ValueError(
            f"{path} of this {module.config.model_type} model does not run as a layer, so an adapter beside "
            "it would do nothing; leave it out of lora_target_modules."
        )
