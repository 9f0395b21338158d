"""From options to compiled graphs: what is compiled, how many at most, and what run.json says of it."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
import transformers

from adapters import compiling, transformers_lm
from shell import choose, forecast, mistake, options, prepare


def check(ready: prepare.Ready) -> None:
    """Refuse what a graph cannot hold, before the model is loaded.

    Args:
        ready: what is known by then.

    Raises:
        mistake.Mistake: names the option that stands in the way.
    """
    chosen, device = ready.command.options, ready.device
    if not chosen.compile:
        return
    static = ready.packing.get("sizes") is not None
    reasons = {
        "activation_offloading": (chosen.activation_offloading, "a graph keeps what it saves to itself"),
        "chunk_size_feed_forward": (chosen.chunk_size_feed_forward > 0, "chunks are not one graph"),
        "gradient_checkpointing selective": (
            chosen.gradient_checkpointing == "selective",
            "a graph decides itself what is kept; true makes whole layers again",
        ),
        "dtype float64": (
            ready.packing["dtype"] == torch.float64,
            "its exactness rests on what a compiler passes over",
        ),
        "pad_to_multiple_of none": (
            device.static_shapes and not static,
            f"{device.name} compiles no symbolic shapes; auto plans sizes",
        ),
    }
    for what, (stands, why) in reasons.items():
        if stands:
            raise mistake.Mistake(f"compile: {what} does not go with it: {why}; leave one out")


def compiled(model: transformers_lm.TransformersLM, ready: prepare.Ready) -> transformers_lm.TransformersLM:
    """Return a model whose decoder is compiled as its shapes come, where that was asked for.

    Args:
        model: as it was loaded.
        ready: says what was asked for, which sizes are planned and where it runs.
    """
    chosen, sizes = ready.command.options, ready.packing.get("sizes")
    if not chosen.compile:
        return model
    _settle(model.module)
    each = compiling.FREE_GRAPHS if sizes is None else len(sizes.nodes)
    return attrs.evolve(
        model,
        compiled=compiling.Decoder(
            model.decode,
            backend=ready.device.compile.get("backend", "inductor"),
            static=sizes is not None,
            limit=each * _modes(model, ready),
            beyond=chosen.compile_beyond,
        ),
    )


def _settle(module: transformers.PreTrainedModel) -> None:
    """Leave the mode of training where nothing is dropped: each mode has graphs of its own."""
    parts = list(module.modules())
    if choose.dropouts(module.config) or any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in parts):
        return
    for part in parts:  # that a layer is made again in backward depends on its mode
        part.training = bool(part.training and getattr(part, "gradient_checkpointing", False))


def _modes(model: transformers_lm.TransformersLM, ready: prepare.Ready) -> int:
    """Count what a size may be compiled for: training; without dropout; without the adapter."""
    referred = "reference_logprobs" in ready.algorithm.needs
    return 1 + bool(model.module.training) + bool(model.adapter is not None and referred)


def facts(
    model: transformers_lm.TransformersLM, ready: prepare.Ready, drawing: compiling.Counts | None = None
) -> Mapping[str, Any]:
    """Return what run.json tells of shapes and graphs.

    Args:
        model: that was trained.
        ready: with the plan.
        drawing: what was compiled to draw completions with; None: nothing.
    """
    decoder = model.compiled
    counts = compiling.Counts() if decoder is None else decoder.counts
    return {
        "sizes_planned": forecast.told(ready.packing.get("sizes")),
        "graphs": {
            "forward": counts.forward,
            "backward": counts.backward,
            "most": 0 if decoder is None else decoder.limit,
            "drawing": 0 if drawing is None else drawing.forward,
        },
        "compile_seconds": counts.seconds,
        "fallbacks": counts.fallbacks,
    }


@contextlib.contextmanager
def told(chosen: options.Options) -> Iterator[None]:
    """Tell what could not be compiled as the caller's to decide.

    Args:
        chosen: the options.
    """
    try:
        yield
    except compiling.Unplanned as problem:
        raise mistake.Mistake(f"compile: model {chosen.model}: {problem}") from problem
