"""However a step is run, it is the same step: random forests under random ways of saving time and memory."""

import functools

import attrs
import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from adapters import loading, lora
from core import algorithms, pack, padded, steps
from core.plan import sample, sizes
from tests.adapters import hosting, zoo

STEMS = st.lists(st.integers(3, 12), min_size=1, max_size=5)
TAILS = st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=4), min_size=1, max_size=6)
WAYS = st.fixed_dictionaries(
    {
        "share": st.booleans(),
        "cut": st.sampled_from(["whole", "pieces", "padded"]),
        "again": st.sampled_from([False, True, "selective"]),
        "chunk": st.sampled_from([0, 1, 3, 100]),
        "offloaded": st.booleans(),
        "attention": st.sampled_from(["blocks", "mask"]),
        "apart": st.booleans(),
    }
)
LOSSES = {"linear": algorithms.sft, "not linear": algorithms.dft}
LADDER = (16, 64, 128)


@functools.cache
def bound(adapted, again=False, chunked=False):
    """A model of random weights, or an adapter that does something over frozen ones; bound once a kind."""
    model, params = loading.bind(
        zoo.build("llama"), gradient_checkpointing=again, feed_forward_chunk=int(chunked)
    )
    if adapted:
        model, params = lora.attach(model, params, lora.Settings(rank=2, whole=("norm",)), seed=1)
        draw = torch.Generator().manual_seed(7)
        params = {n: p + 0.3 * torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in params.items()}
    return model, params


def forest(data):
    """Draw samples that share prefixes, repeat and end in each other, some of whose tokens are trained."""
    stem, tails = data.draw(STEMS, label="stem"), data.draw(TAILS, label="tails")
    source = np.random.default_rng(data.draw(st.integers(0, 2**31), label="seed"))
    found = []
    for unit, tail in enumerate([*tails, tails[0]]):
        tokens = np.array([*stem[: source.integers(1, len(stem) + 1)], *tail])
        trained = source.random(len(tokens)) < 0.5
        trained[0], trained[-1] = False, True
        found.append(sample.Sample(tokens=tokens, trained=trained, unit=unit))
    return found


def packs(samples, algorithm, way, budget):
    """Build the packs of a step, one or two of them."""
    counts = pack.count(samples)
    options = {"needs": algorithm.reads, "share": way["share"], "dtype": torch.float64}
    parts = [samples[:1], samples[1:]] if way["apart"] else [samples]
    if way["cut"] == "padded":
        planned = sizes.Sizes(nodes=LADDER, edges=LADDER)
        budget = max(budget, *(len(one.tokens) for one in samples))
        return [padded.build(part, counts, planned=planned, budget=budget, **options) for part in parts]
    budget = budget if way["cut"] == "pieces" else None
    return [pack.build(part, counts, budget=budget, **options) for part in parts]


@pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "an adapter"])
@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data(), way=WAYS, budget=st.integers(1, 20), loss=st.sampled_from([*LOSSES]))
def test_a_step_is_the_same_however_it_is_run(adapted, data, way, budget, loss):
    samples, algorithm = forest(data), LOSSES[loss]
    model, params = bound(adapted)
    whole = pack.build(samples, pack.count(samples), needs=algorithm.reads, share=False, dtype=torch.float64)
    want, _, true_grads = steps.loss_and_grad(model, algorithm, params, [whole], 0)
    ran, _ = bound(adapted, bool(way["again"]), way["chunk"] > 0)
    ran = attrs.evolve(
        ran,
        keep_attention=way["again"] == "selective",
        offloaded=way["offloaded"],
        attention=way["attention"],
    )
    for part in ran.chunked:
        part.size = way["chunk"]
    with hosting.counted({**ran.frozen, **params}) as moved:
        value, _, grads = steps.loss_and_grad(
            ran, algorithm, params, packs(samples, algorithm, way, budget), 0
        )
    assert bool(moved.copies) == way["offloaded"]
    assert moved.frozen == 0
    assert abs(value - want) <= 1e-10 * abs(want)
    assert zoo.gap(grads, true_grads) <= 1e-10
