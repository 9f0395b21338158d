"""A forest through each family of models equals every sample alone by the model's own plain forward."""

import pytest

from adapters import loading, tree_attention
from tests.adapters import zoo


def of_a_forest(kind, **options):
    """Return loss and gradients of the rows as one forest."""
    model, params = loading.bind(zoo.build(kind), **options)
    value, _, grads = model.pull_back(params, zoo.packed(zoo.rows()), 0, zoo.nll)
    return value, grads


@pytest.mark.parametrize("kind", zoo.SERVED)
def test_a_forest_equals_each_sample_alone_by_the_models_own_forward(kind):
    own = "eager" if kind in ("gemma2", "gpt_oss") else "sdpa"  # scaled dot products have no cap, no sinks
    want, want_grads = zoo.alone(zoo.build(kind, attention=own), zoo.rows())
    value, grads = of_a_forest(kind)
    assert abs(value - want) <= 1e-10 * want
    assert zoo.gap(grads, want_grads) <= 1e-10


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text"])
def test_rectangles_and_the_dense_mask_give_the_same_gradients(kind):
    assert zoo.gap(of_a_forest(kind, attention="mask")[1], of_a_forest(kind)[1]) <= 1e-12


@pytest.mark.parametrize("kind", zoo.REFUSED)
def test_a_model_that_cannot_serve_trees_is_refused_by_its_type(kind):
    with pytest.raises(ValueError, match=f"a {kind} model"):
        loading.bind(zoo.build(kind))


def test_a_window_that_layers_keep_to_themselves_is_refused(monkeypatch):
    plain = tree_attention.attend
    module = zoo.build("mistral")
    monkeypatch.setitem(
        tree_attention.AttentionInterface._global_mapping,
        tree_attention.NAME,
        lambda *args, sliding_window=None, **kwargs: plain(*args, **kwargs),
    )
    with pytest.raises(ValueError, match=r"a mistral model .* how far it may look back"):
        loading.bind(module)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_rotary_table_that_hangs_on_the_longest_sequence_bounds_the_length(rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 11}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model, params = loading.bind(zoo.build("llama", rope_parameters=rope))
    assert model.max_length == 11
    short = [s for s in zoo.rows() if len(s.tokens) <= 11]
    assert model.predict(params, zoo.packed(short), 0).logprobs.isfinite().all()
    with pytest.raises(ValueError, match="12 tokens; beyond 11 this llama model"):
        model.predict(params, zoo.packed(zoo.rows()), 0)
