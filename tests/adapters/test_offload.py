"""Activations that wait in host memory change no gradient, and take none of the device's memory meanwhile."""

import attrs
import pytest
import torch

from adapters import loading, lora, offload, shapes
from core import pack
from core.plan import memory
from tests.adapters import hosting, zoo
from tests.devices import emulated

KINDS = {
    "everything": {},
    "layers again": {"gradient_checkpointing": True},
    "all but attention again": {"gradient_checkpointing": "selective"},
    "chunks again": {"feed_forward_chunk": 64},
    "an adapter": {"adapter": 4},
}
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "max_position_embeddings": 512}


def _adapted(model, params, rank):
    """Put an adapter that does something beside every linear layer; the embedding is frozen."""
    model, params = lora.attach(model, params, lora.Settings(rank=rank), seed=1)
    draw = torch.Generator().manual_seed(7)
    noise = {n: torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in params.items()}
    return model, {n: p + 0.2 * noise[n].to(p.device) for n, p in params.items()}


def _steps(kinds):
    """Run a step of each kind in one process."""
    return [_step(modes) for modes in kinds]


def _step(modes):
    """One step on the emulated device: distance from the CPU's, and bytes held between its passes."""
    allocator, results = torch.get_device_module("neuron"), []
    samples = zoo.rows(stem=400)
    for device in ("cpu", "neuron"):
        module = zoo.build("llama", **SIZES).float()
        asked = {n: way for n, way in modes.items() if n != "adapter"} if device == "neuron" else {}
        model, params = loading.bind(module, device=device, attention="mask", **asked)
        if "adapter" in modes:
            model, params = _adapted(model, params, modes["adapter"])
        each = pack.build(samples, pack.count(samples), device=device)
        model.predict(params, each, None)  # an evaluation before a step changes nothing
        before, held = allocator.memory_allocated(), []
        allocator.reset_peak_memory_stats()

        def loss(scores, before=before, held=held):
            held.append(allocator.memory_allocated() - before)
            return zoo.nll(scores)

        results.append(model.pull_back(params, each, 0, loss))
    (want, _, want_grads), (value, _, grads) = results
    peak = allocator.max_memory_allocated() - before
    copied = _copies(model, params, each) if modes.get("activation_offloading") else []
    return {
        "copies": len(copied),
        "copied": len({id(host) for host in copied}),
        "loss": abs(float(value) - float(want)) / float(want),
        "gap": zoo.gap({n: g.cpu() for n, g in grads.items()}, want_grads),
        "held": held[0],
        "peak": peak,
        "nodes": len(each.tokens),
        "trained": sum(p.numel() for p in params.values()),
    }


def _copies(model, params, each):
    """What is moved in one more step, each held so that no other takes its place."""
    found = []

    class Noted(offload.Copies):
        def of(self, saved):
            found.append(super().of(saved))
            return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "Copies", Noted)
        model.pull_back(params, each, 0, zoo.nll)
    return found


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


def test_what_several_operations_save_is_copied_once(steps):
    found = steps["everything"][1]
    # Queries, keys and values are made of one tensor, and so are gate and up.
    assert found["copies"] - found["copied"] >= 4 * 3


@pytest.mark.parametrize("kind", KINDS)
def test_memory_falls_by_at_least_what_the_plan_promises(steps, kind):
    kept, moved = steps[kind]
    shape = shapes.shape(zoo.config("llama", **SIZES), torch.float32)
    levers = memory.Levers(
        one_pack=True,
        checkpointing=KINDS[kind].get("gradient_checkpointing", False),
        chunk=KINDS[kind].get("feed_forward_chunk", 0),
        adapter=kept["trained"] if "adapter" in KINDS[kind] else None,
    )

    def promised(**how):
        """Return what a pass takes beside the parameters at its highest."""
        plan = memory.plan(shape, kept["nodes"], attrs.evolve(levers, **how))
        return max(sum(p[n] for n in p if n not in memory.STATE) for m, p in plan.items() if m != "update")

    fall = promised() - promised(offloaded=True)
    # Of so few layers that are made again, the peak is that of one of them beside all gradients.
    assert (fall > 0) == (kind not in ("layers again", "all but attention again"))
    assert kept["peak"] - moved["peak"] >= 0.9 * fall - offload.SMALLEST
    waits = memory.hosted(shape, kept["nodes"], attrs.evolve(levers, offloaded=True))
    assert kept["held"] - moved["held"] >= 0.9 * waits > 0


@pytest.mark.parametrize("rank", [0, 4])
def test_what_runs_again_in_chunks_finds_its_inputs_laid_out_as_they_left(rank):
    each, found = zoo.packed(zoo.rows(stem=60)), []
    for offloaded in (False, True):
        model, params = loading.bind(
            zoo.build("llama", **SIZES), feed_forward_chunk=7, activation_offloading=offloaded
        )
        if rank:  # beside frozen weights strides decide which kernel runs, and what it saves
            model, params = _adapted(model, params, rank)
        with hosting.counted({**model.frozen, **params}) as moved:
            found.append(model.pull_back(params, each, 0, zoo.nll)[2])
    assert moved.copies
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
@pytest.mark.parametrize("rank", [0, 4])
def test_what_leaves_is_what_the_plan_says_and_neither_frozen_weights_nor_what_attention_gave(
    rank, checkpointing
):
    each, found = zoo.packed(zoo.rows(stem=60)), []
    for offloaded in (False, True):
        model, params = loading.bind(
            zoo.build("llama", **SIZES),
            gradient_checkpointing=checkpointing,
            activation_offloading=offloaded,
        )
        if rank:
            model, params = _adapted(model, params, rank)
        with hosting.counted({**model.frozen, **params}) as moved:
            found.append(model.pull_back(params, each, 0, zoo.nll)[2])
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
    shape = shapes.shape(zoo.config("llama", **SIZES), torch.float64)
    levers = memory.Levers(
        checkpointing=checkpointing,
        offloaded=True,
        adapter=sum(p.numel() for p in params.values()) if rank else None,
    )
    waits = memory.hosted(shape, len(each.tokens), levers)
    beyond = 3 * len(each.tokens) * shape.element_bytes * shape.hidden  # the last norm and the head
    assert 0.95 * waits <= moved.nbytes <= 1.05 * waits + beyond
    assert moved.frozen == 0
