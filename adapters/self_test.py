"""Kinds of attention are tried at start: the first that is right on this machine is the one that runs."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from adapters import tree_attention
from core import blocks, pack, ports
from core.plan import sample

# Two branches off one prefix, one of them forked again, and a tree that shares nothing with them.
SEQUENCES = ((1, 2, 3, 4, 5), (1, 2, 3, 6, 7, 8), (1, 2, 3, 6, 7, 9, 9), (4, 4))
HEADS, KV, WIDTH = 4, 2, 64
# What layers ask of their attention beside the forest; the dense mask serves what a kind does not.
LOOKS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    " under a window": {"sliding_window": 3},
    " with sinks": {"s_aux": (-1.0, 0.0, 0.5, 2.0)},
    " with a soft cap": {"softcap": 2.0},
}
TOLERANCES = {torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float32: 1e-3, torch.float64: 1e-10}


def tested(device: ports.Device, dtype: torch.dtype) -> tuple[ports.Device, tuple[str, ...]]:
    """Return a device whose preferred kind of attention has passed, and what to tell of those that did not.

    A kind behind the first that passes is tried when it is asked for. Where each new shape is compiled,
    nothing is tried: a test would take minutes, and the dense mask has nothing to fall back to.

    Args:
        device: ready for tensors.
        dtype: of the products that will run.

    Raises:
        ValueError: none passes.
    """
    if device.static_shapes:
        return device, ()
    notes = []
    for place, kind in enumerate(device.attention):
        wrong = fault(kind, device, dtype)
        if wrong is None:
            left = device.attention[place:]
            return (attrs.evolve(device, attention=left) if place else device), tuple(notes)
        notes.append(f"attention {kind} fails its self-test on {device.name} ({wrong})")
    raise ValueError(f"device {device.name}: no attention is right here: {'; '.join(notes)}.")


def fault(kind: str, device: ports.Device, dtype: torch.dtype) -> str | None:
    """Run a small forest forward and backward, against the dense mask on the CPU; say what is wrong.

    Args:
        kind: of attention.
        device: where to run it.
        dtype: of the products that will run.
    """
    try:
        if kind == "blocks" and not blocks.takes(device.type, dtype):
            return f"its kernel takes no {str(dtype).removeprefix('torch.')}"
        found = {said: _run(kind, device.type, dtype, look) for said, look in LOOKS.items()}
    except Exception as problem:  # whatever a kernel, or the compiler of one, raises
        first = (str(problem).strip().splitlines() or [""])[0]
        return f"{type(problem).__name__}: {first}"
    bound = TOLERANCES[dtype]
    for said, look in LOOKS.items():
        wanted = _run("mask", "cpu", torch.float64, look)
        for name, one, right in zip(("output", "query", "key", "value"), found[said], wanted, strict=True):
            if not torch.allclose(one, right, rtol=bound, atol=bound):
                what = "its output" if name == "output" else f"its gradient of the {name}"
                return f"{what}{said} is {float((one - right).abs().max()):.2g} off"
    return None


def _run(kind: str, place: str, dtype: torch.dtype, look: Mapping[str, Any]) -> list[Tensor]:
    """Return the output of a layer and its gradients, as the CPU holds them."""
    samples = [
        sample.Sample(tokens=np.array(tokens), trained=np.arange(len(tokens)) > 0) for tokens in SEQUENCES
    ]
    each = pack.build(samples, pack.count(samples), device=place)
    draw = _draws(len(each.tokens))
    query, key, value = (draw(heads).to(place, dtype).requires_grad_() for heads in (HEADS, KV, KV))
    route = tree_attention.route(each, kind=kind)
    asked: dict[str, Any] = {
        name: torch.tensor(v).to(place, dtype) if name == "s_aux" else v for name, v in look.items()
    }
    out, _ = tree_attention.attend(torch.nn.Module(), query, key, value, None, tree=route, **asked)
    gradients = torch.autograd.grad(out, (query, key, value), draw(HEADS).transpose(1, 2).to(out))
    return [one.detach().cpu().double() for one in (out, *gradients)]


def _draws(num_nodes: int) -> Callable[[int], Tensor]:
    """Return what draws the same heads in the same order each time."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        # Values that bfloat16 holds exactly, so that both sides start from the same.
        drawn = torch.randint(-8, 9, (1, heads, num_nodes, WIDTH), generator=generator)
        return drawn.float() / 8

    return draw
