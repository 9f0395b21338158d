"""A forest over the budget, cut into pieces, gives what each sample alone gives, whatever the loss."""

import pytest
import torch

from adapters import in_pieces, loading, shapes
from core import pack
from core.plan import memory
from tests.adapters import zoo
from tests.devices import emulated


def coupled(scores):
    """Couple everything: a pair of samples, and the exponential of a mean."""
    half = len(scores.logprobs) // 2
    first, second = scores.logprobs[:half].sum(), scores.logprobs[half:].sum()
    return -torch.nn.functional.logsigmoid(0.3 * (first - second)) + scores.logprobs.mean().exp(), {}


def of_rows(kind, loss, **options):
    """Return loss and gradients of the rows, as one forest or in pieces of `budget` nodes."""
    chosen = {name: options.pop(name) for name in ("budget", "share") if name in options}
    model, params = loading.bind(zoo.build(kind), **options)
    return model, model.pull_back(params, zoo.packed(zoo.rows(stem=12), **chosen), 0, loss)


@pytest.mark.parametrize("kind", zoo.SERVED)
def test_pieces_equal_each_sample_alone_under_a_coupled_loss(kind):
    _, (want, _, want_grads) = of_rows(kind, coupled, share=False)
    _, (value, _, grads) = of_rows(kind, coupled, budget=16)
    assert abs(value - want) <= 1e-10 * abs(want)
    assert zoo.gap(grads, want_grads) <= 1e-10


def test_pieces_equal_each_sample_alone_under_a_token_loss():
    _, (want, _, want_grads) = of_rows("llama", zoo.nll, share=False)
    _, (value, _, grads) = of_rows("llama", zoo.nll, budget=16)
    assert abs(value - want) <= 1e-10 * abs(want)
    assert zoo.gap(grads, want_grads) <= 1e-10


@pytest.mark.parametrize("budget", [1, 2, 5, 16])
def test_the_size_of_the_pieces_changes_nothing(budget):
    _, (want, _, want_grads) = of_rows("mistral", coupled)
    _, (value, _, grads) = of_rows("mistral", coupled, budget=budget)
    assert abs(value - want) <= 1e-10 * abs(want)
    assert zoo.gap(grads, want_grads) <= 1e-10


def test_pieces_are_exact_under_the_dense_mask_and_with_layers_that_are_recomputed():
    _, (want, _, want_grads) = of_rows("gemma3_text", coupled)
    for options in ({"attention": "mask"}, {"gradient_checkpointing": True}):
        _, (value, _, grads) = of_rows("gemma3_text", coupled, budget=7, **options)
        assert abs(value - want) <= 1e-10 * abs(want)
        assert zoo.gap(grads, want_grads) <= 1e-10


def test_predicting_in_pieces_scores_every_row_as_the_whole_does():
    model, params = loading.bind(zoo.build("llama"))
    whole, cut = (zoo.packed(zoo.rows(), **options) for options in ({}, {"budget": 6}))
    assert len(cut.pieces) > 1
    gap = (model.predict(params, whole, 0).logprobs - model.predict(params, cut, 0).logprobs).abs().max()
    assert gap <= 1e-12


class Watched(in_pieces.Walk):
    """A walk that notes, as each piece runs, whose keys and values and whose gradients are held."""

    def _run(self, number, past):
        self.__dict__.setdefault("held", []).append((number, {*self._store}, {*self._owed}))
        return super()._run(number, past)


def watched(budget=4):
    """Walk through a forest forward alone, and forward and backward; the walks."""
    model, params = loading.bind(zoo.build("llama"))
    each = zoo.packed(zoo.rows(stem=12), budget=budget)
    made = []
    for pull in (False, True):
        with model.running(leaves := {n: p.requires_grad_() for n, p in params.items()}, 0):
            walk = Watched(model, leaves, each, 0)
            walk.pull_back(lambda f: (f["logprobs"].sum(), {})) if pull else walk.fields()
            made.append(walk)
    return made


def test_what_pieces_share_is_let_go_of_after_its_last_reader():
    forward, both = watched()
    readers = [{n for n, piece in enumerate(forward._sources) if any(s == source for s, _ in piece)}
               for source in range(len(forward._sources))]  # fmt: skip
    assert max(map(len, readers)) > 1
    for number, held, owed in forward.held:
        assert held == {s for s in range(number) if max(readers[s], default=-1) >= number}
        assert not owed
    total = len(readers)
    for number, held, owed in both.held[total:]:
        assert held == {s for s in range(number) if readers[s]}
        assert owed == {s for s in range(number + 1) if any(r > number for r in readers[s])}
    assert not both._store
    assert not both._owed


def test_what_pieces_are_owed_is_summed_in_float32_where_keys_and_values_are_bfloat16():
    model, params = loading.bind(zoo.build("llama", dtype=torch.bfloat16))
    with model.running(params, 0):
        walk = in_pieces.Walk(model, params, zoo.packed(zoo.rows(stem=12), budget=4), 0)
        walk.fields(keep=True)
    reader = max(number for number, sources in enumerate(walk._sources) if sources)
    ones = {layer: (torch.ones_like(k), torch.ones_like(v)) for layer, (k, v) in walk._past(reader).items()}
    for _ in range(300):
        walk._owe(reader, ones)
    for source, rows in walk._sources[reader]:
        for total in (total for both in walk._owed[source].values() for total in both):
            # In bfloat16 256 + 1 is 256.
            assert (total.index_select(2, rows) == 300).all()


def test_what_pieces_share_may_wait_in_host_memory():
    _, (want, _, want_grads) = of_rows("llama", coupled, share=False)
    _, (value, _, grads) = of_rows("llama", coupled, budget=7, activation_offloading=True)
    assert abs(value - want) <= 1e-10 * abs(want)
    assert zoo.gap(grads, want_grads) <= 1e-10


def _held_both_ways():
    """What is held, kept on the device and moved to the host."""
    return [_held(offloaded) for offloaded in (False, True)]


def _held(offloaded):
    """One step in pieces on the emulated device: distance from the CPU's, bytes held between its passes."""
    device_memory, results, held = torch.get_device_module("neuron"), [], []
    samples = zoo.rows(stem=200)
    for device in ("cpu", "neuron"):
        module = zoo.build("llama", max_position_embeddings=512, num_hidden_layers=4).float()
        model, params = loading.bind(
            module, device=device, attention="mask", activation_offloading=offloaded and device == "neuron"
        )
        each = pack.build(samples, pack.count(samples), device=device, budget=64)
        before = device_memory.memory_allocated()

        def loss(scores, before=before):
            held.append(device_memory.memory_allocated() - before)
            return coupled(scores)

        results.append(model.pull_back(params, each, 0, loss))
    (want, _, want_grads), (value, _, grads) = results
    return {
        "loss": abs(float(value) - float(want)) / abs(float(want)),
        "gap": zoo.gap({n: g.cpu() for n, g in grads.items()}, want_grads),
        "held": held[-1],
    }


def test_in_host_memory_it_takes_none_of_the_devices_and_changes_no_gradient():
    kept, moved = emulated.run(_held_both_ways)
    for found in (kept, moved):
        assert found["loss"] < 1e-5
        assert found["gap"] < 1e-4
    shape = shapes.shape(zoo.config("llama", num_hidden_layers=4), torch.float32)
    # What waits between the passes is keys and values; their gradients come after.
    assert kept["held"] - moved["held"] >= 0.9 * memory.dormant(shape, 192) / 2


def test_a_pack_within_the_budget_is_one_piece():
    samples = zoo.rows()
    size = len(pack.build(samples, pack.count(samples)).tokens)
    assert len(pack.build(samples, pack.count(samples), budget=size).pieces) == 1
