"""A compiled decoder: as many graphs as planned, whatever is trained, measured or updated."""

import importlib

import attrs
import numpy as np
import pytest
import torch
import transformers

from adapters import compiling, loading, tree_attention
from core import algorithms, pack, padded, steps
from core.plan import sample, sizes

pytestmark = pytest.mark.plain

PLANNED = sizes.Sizes(nodes=(32, 64), edges=(32, 64))
SHAPE = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def bound():
    return made()


def made(num_layers=2, **options):
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(**SHAPE, num_hidden_layers=num_layers)
    module = transformers.AutoModelForCausalLM.from_config(
        shape, dtype=torch.float32, attn_implementation=tree_attention.NAME
    )
    return loading.bind(module, **options)


def compiled(model, *, static=True, limit=2, beyond="stop"):
    decoder = compiling.Decoder(model.decode, backend="aot_eager", static=static, limit=limit, beyond=beyond)
    return attrs.evolve(model, compiled=decoder)


def packs(*steps_, static=True):
    """Return a pack a step, each of samples of these lengths."""
    draw, found = np.random.default_rng(0), []
    for lengths in steps_:
        samples = [
            sample.Sample(tokens=draw.integers(0, 11, n), trained=np.arange(n) > 0, unit=i)
            for i, n in enumerate(lengths)
        ]
        counts = pack.count(samples)
        if static:
            found.append(padded.build(samples, counts, planned=PLANNED, budget=64))
        else:
            found.append(pack.build(samples, counts))
    return found


def assert_equal(model, graph, params, each):
    """Loss and gradients with and without graphs."""
    (value, _, grads), (true, _, true_grads) = (
        steps.loss_and_grad(one, algorithms.sft, params, [each], 0) for one in (graph, model)
    )
    torch.testing.assert_close(value, true, rtol=1e-6, atol=1e-6)
    for name, grad in true_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-6, msg=name)


def test_updates_are_seen_and_bring_no_graph(bound):
    model, params = bound
    graph = compiled(model)
    for each in packs([9, 4], [5], [20, 21], [30], [7, 7, 7]):
        assert_equal(model, graph, params, each)
        params = {n: p + 0.1 * torch.randn_like(p) for n, p in params.items()}
    assert (graph.compiled.counts.forward, graph.compiled.counts.backward) == (2, 2)
    assert graph.compiled.counts.fallbacks == 0
    assert graph.compiled.counts.seconds > 0


def test_measuring_and_a_frozen_reference_bring_no_graph(bound):
    model, params = bound
    graph = compiled(model)
    steps.loss_and_grad(graph, algorithms.sft, params, packs([9]), 0)
    before = attrs.evolve(graph.compiled.counts)
    frozen = {n: p.detach().clone() for n, p in params.items()}
    scored = steps.evaluate(graph, algorithms.sft, frozen, packs([11, 3]))[0]
    assert (graph.compiled.counts.forward, graph.compiled.counts.backward) == (
        before.forward,
        before.backward,
    )
    assert scored == pytest.approx(steps.evaluate(model, algorithms.sft, frozen, packs([11, 3]))[0].item())
    assert not scored.requires_grad


def test_the_longest_sequence_of_a_pack_makes_no_graph(bound):
    model, params = bound
    graph = compiled(model)
    for longest in (7, 9, 13, 21):
        steps.evaluate(graph, algorithms.sft, params, packs([longest, 4]))
    assert graph.compiled.counts.forward == 1


def test_a_shape_beyond_the_plan_stops_the_run(bound):
    model, params = bound
    graph = compiled(model, limit=1)
    steps.evaluate(graph, algorithms.sft, params, packs([9]))
    with pytest.raises(compiling.Unplanned, match="graph 2 was asked for by a forward of 64 tokens"):
        steps.evaluate(graph, algorithms.sft, params, packs([40]))


def test_a_shape_beyond_the_plan_runs_without_a_graph_where_that_was_asked_for_and_is_counted(bound):
    model, params = bound
    graph = compiled(model, limit=1, beyond="eager")
    for each in packs([9], [40], [41]):
        assert_equal(model, graph, params, each)
    assert (graph.compiled.counts.forward, graph.compiled.counts.fallbacks) == (1, 2)


def test_symbols_serve_every_length_with_a_bounded_number_of_graphs():
    model, params = made(num_layers=1)
    graph = compiled(model, static=False, limit=compiling.FREE_GRAPHS)
    for each in packs([9], [5, 6], [20, 21], [30], [7, 7, 7], [2], [64], static=False):
        assert_equal(model, graph, params, each)
    assert 1 <= graph.compiled.counts.forward <= 2
    assert graph.compiled.counts.fallbacks == 0


def test_layers_that_are_made_again_in_backward_are_so_in_a_graph():
    model, params = made(gradient_checkpointing=True)
    graph = compiled(model)
    for each in packs([9, 4], [8]):
        assert_equal(model, graph, params, each)
        params = {n: p + 0.1 for n, p in params.items()}
    assert (graph.compiled.counts.forward, graph.compiled.counts.backward) == (1, 1)


def test_pieces_of_a_pack_run_without_a_graph_and_are_counted(bound):
    model, params = bound
    graph = compiled(model, static=False)
    samples = [sample.Sample(tokens=np.arange(30) % 11, trained=np.arange(30) > 0)]
    each = pack.build(samples, pack.count(samples), budget=16)
    steps.evaluate(graph, algorithms.sft, params, [each])
    assert graph.compiled.counts.fallbacks == 2


def test_inductors_graphs_are_counted_once_whether_it_makes_them_or_has_them_on_disk(monkeypatch):
    made_anew = importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(made_anew, "compile_fx_inner", lambda graph, examples, **_: graph)
    counts, given = compiling.Counts(), [torch.ones(2), torch.ones(2, requires_grad=True)]
    backend = compiling.counted("inductor", counts)

    def both(graph, examples, inner_compile):
        inner_compile(graph, examples)
        return inner_compile(graph, examples, is_backward=True)

    monkeypatch.setattr(made_anew, "compile_fx", both)
    backend(None, given)
    assert (counts.forward, counts.backward) == (1, 1)
    monkeypatch.setattr(made_anew, "compile_fx", lambda graph, examples, inner_compile: graph)
    backend(None, given)
    assert (counts.forward, counts.backward) == (2, 2)
    backend(None, given[:1])  # nothing to differentiate
    assert (counts.forward, counts.backward) == (3, 2)
