"""Drawing on an emulated device that compiles each new shape: how many graphs, and which operations."""

import attrs
import numpy as np
import torch

from adapters import loading, pick, sampling, static_cache
from core import ports
from tests.adapters import zoo
from tests.devices import emulated

# Lengths of prompts, most tokens, completions of each.
CALLS = (((9,), 3, 2), ((2, 5, 11), 17, 2), ((1,), 31, 4), ((17, 1, 7), 6, 2), ((33,), 5, 6))


def _inside(compiled: bool):
    """Draw on the device and on the CPU; graphs, new signatures by call, and whether tokens are the same."""
    device = pick.device("neuron")
    engines = []
    for place in ("neuron", "cpu"):
        module = zoo.build("llama", dtype=torch.float32)
        model, params = loading.bind(module.to(place), attention="mask")
        engines.append((sampling.Sampler(model), params))
    shapes = static_cache.Shapes(
        rows=6, length=40, chunk=4, on_host=device.generation["on_host"],
        compiled=static_cache.one_graph(**device.compile) if compiled else None,
    )  # fmt: skip
    engines[0] = attrs.evolve(engines[0][0], static=shapes), engines[0][1]
    emulated.forget()
    found = {"same": [], "new": []}
    known: set[str] = set()
    for lengths, max_tokens, num_samples in CALLS:
        rows = [np.random.default_rng(n).integers(3, zoo.VOCAB, n) for n in lengths]
        rule = ports.Sampling(max_tokens=max_tokens, stop_ids=(5,), temperature=0.8, top_p=0.9)
        drawn = [
            engine.generate(params, rows, range(len(rows)), num_samples=num_samples, sampling=rule, key=1)
            for engine, params in engines
        ]
        tokens = [[c.tokens.tolist() for group in groups for c in group] for groups in drawn]
        found["same"].append(tokens[0] == tokens[1])
        now = set(emulated.counts()["signatures"])
        found["new"].append(sorted(now - known))
        known |= now
    counts = emulated.counts()
    return {**found, "forward": counts["forward"], "backward": counts["backward"]}


def test_two_graphs_serve_every_length_on_the_emulated_device():
    found = emulated.run(_inside, True)
    assert all(found["same"])
    assert (found["forward"], found["backward"]) == (2, 0)
    # What runs outside of graphs meets every shape in the first call, too, and no float64.
    assert found["new"][0]
    assert found["new"][1:] == [[]] * (len(CALLS) - 1)
    assert not [one for one in found["new"][0] if "Double" in one]


def test_without_a_compiler_the_first_call_meets_every_shape_on_the_emulated_device():
    found = emulated.run(_inside, False)
    assert all(found["same"])
    assert found["forward"] == 0
    assert found["new"][1:] == [[]] * (len(CALLS) - 1)
