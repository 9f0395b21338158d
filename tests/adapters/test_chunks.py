"""Feed-forward parts in chunks give the same losses and gradients, whatever else is recomputed."""

import pytest
import torch

from adapters import loading
from tests.adapters import zoo

WITHOUT = ("opt", "biogpt")  # their layers hold the matrices themselves


def gradients(kind, **modes):
    """Loss and gradients with parameters that are not those the module came with."""
    model, params = loading.bind(zoo.build(kind), **modes)
    draw = torch.Generator().manual_seed(5)
    params = {n: p + 0.1 * torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in params.items()}
    value, _, grads = model.pull_back(params, zoo.packed(zoo.rows()), 0, zoo.nll)
    return value, grads


@pytest.mark.parametrize("kind", [kind for kind in zoo.SERVED if kind not in WITHOUT])
def test_every_family_in_chunks_gives_what_it_gives_at_once(kind):
    want, want_grads = gradients(kind)
    value, grads = gradients(kind, feed_forward_chunk=2)
    assert abs(value - want) <= 1e-10 * abs(want)
    assert zoo.gap(grads, want_grads) <= 1e-10


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_chunks_inside_recomputed_layers_give_the_same_gradients(kind):
    want, want_grads = gradients(kind)
    value, grads = gradients(kind, feed_forward_chunk=3, gradient_checkpointing=True)
    assert abs(value - want) <= 1e-10 * abs(want)
    assert zoo.gap(grads, want_grads) <= 1e-10


def saved_bytes(**modes):
    """Bytes that a forward saves for its backward."""
    model, params = loading.bind(zoo.build("llama", intermediate_size=512), **modes)
    own = {p.untyped_storage().data_ptr() for p in params.values()}
    held = {}

    def leave(saved):
        if saved.untyped_storage().data_ptr() not in own:
            held[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    def look(scores):
        return zoo.nll(scores)

    with torch.autograd.graph.saved_tensors_hooks(leave, lambda saved: saved):
        model.pull_back(params, zoo.packed(zoo.rows()), 0, look)
    return sum(held.values())


def test_chunks_hold_less_of_the_inner_width():
    assert saved_bytes(feed_forward_chunk=2) < saved_bytes() / 2


@pytest.mark.parametrize("kind", WITHOUT)
def test_layers_without_a_feed_forward_part_of_their_own_are_refused_by_name(kind):
    with pytest.raises(ValueError, match=rf"a {kind} model.*chunk_size_feed_forward"):
        loading.bind(zoo.build(kind), feed_forward_chunk=2)
