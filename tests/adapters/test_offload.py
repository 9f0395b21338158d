"""Activations that wait in host memory change no gradient, and take none of the device's memory meanwhile."""

import pytest
import torch

from adapters import loading
from core import pack
from tests.adapters import zoo
from tests.devices import emulated

KINDS = {
    "everything": {},
    "layers again": {"gradient_checkpointing": True},
    "chunks again": {"feed_forward_chunk": 64},
}
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "max_position_embeddings": 512}


def _steps(kinds):
    """Run a step of each kind in one process."""
    return [_step(modes) for modes in kinds]


def _step(modes):
    """One step on the emulated device: distance from the CPU's, and bytes held between its passes."""
    memory, results = torch.get_device_module("neuron"), []
    samples = zoo.rows(stem=400)
    for device in ("cpu", "neuron"):
        module = zoo.build("llama", **SIZES).float()
        asked = modes if device == "neuron" else {}
        model, params = loading.bind(module, device=device, attention="mask", **asked)
        each = pack.build(samples, pack.count(samples), device=device)
        model.predict(params, each, None)  # an evaluation before a step changes nothing
        before, held = memory.memory_allocated(), []

        def loss(scores, before=before, held=held):
            held.append(memory.memory_allocated() - before)
            return zoo.nll(scores)

        results.append(model.pull_back(params, each, 0, loss))
    (want, _, want_grads), (value, _, grads) = results
    return {
        "loss": abs(float(value) - float(want)) / float(want),
        "gap": zoo.gap({n: g.cpu() for n, g in grads.items()}, want_grads),
        "held": held[0],
    }


@pytest.fixture(scope="module")
def steps():
    """A step of each kind, its activations kept and moved, by the kind's name."""
    kinds = [
        {**modes, **moved} for modes in KINDS.values() for moved in ({}, {"activation_offloading": True})
    ]
    found = emulated.run(_steps, kinds)
    return {name: found[2 * i : 2 * i + 2] for i, name in enumerate(KINDS)}


@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_activations_give_the_same_gradients_in_less_device_memory(steps, kind):
    kept, moved = steps[kind]
    for found in (kept, moved):
        assert found["loss"] < 1e-6
        assert found["gap"] < 1e-5
    assert moved["held"] < 0.5 * kept["held"]
