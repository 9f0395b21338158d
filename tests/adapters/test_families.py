"""A forest through each family of models equals every sample alone by the model's own plain forward."""

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention

from adapters import cache, loading, tree_attention
from core import blocks
from core.plan import sample, spans
from tests import paths
from tests.adapters import zoo
from tests.core import flash


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


@pytest.mark.parametrize("length", [5, 6, 7])
def test_a_window_hides_from_the_first_token_past_it_on(length):
    tokens = np.arange(3, 3 + length)
    samples = [sample.Sample(tokens=tokens, trained=tokens > 3)]
    assert zoo.SLIDING == {"sliding_window": 5}
    want, want_grads = zoo.alone(zoo.build("mistral", attention="sdpa"), samples)
    model, params = loading.bind(zoo.build("mistral"))
    value, _, grads = model.pull_back(params, zoo.packed(samples), 0, zoo.nll)
    assert value.item() == pytest.approx(want.item(), rel=1e-12)
    assert zoo.gap(grads, want_grads) <= 1e-10


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text"])
def test_blocks_and_the_dense_mask_give_the_same_gradients(kind):
    assert zoo.gap(of_a_forest(kind, attention="mask")[1], of_a_forest(kind)[1]) <= 1e-12


PRICES = {
    "each block by itself": (0.0, 1.0, 1.0),
    "some under masks": (1e4, 1.0, 1e9),
    "all under one mask": (1e6, 1.0, 1e9),
    "batches": (1e6, 1e12, 1.0),
    "batches and masks": (1e3, 1.0, 0.0),
}
PRICES = {
    name: spans.Price(
        launch=launch, head=0.0, pair=1.0, masked=masked, mask=1.0, row=1.0, key=1.0, item=item, moved=0.0
    )
    for name, (launch, masked, item) in PRICES.items()
}


@pytest.mark.parametrize("price", PRICES.values(), ids=PRICES)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss"])
def test_what_blocks_cost_changes_no_gradient(kind, price):
    want = of_a_forest(kind)[1]
    assert zoo.gap(of_a_forest(kind, price=price)[1], want) <= 1e-12
    model, params = loading.bind(zoo.build(kind), price=price)
    _, _, grads = model.pull_back(params, zoo.packed(zoo.rows(), budget=9), 0, zoo.nll)
    assert zoo.gap(grads, want) <= 1e-12


def test_blocks_on_a_device_without_a_kernel_are_refused_with_the_devices_that_have_one(monkeypatch):
    monkeypatch.setattr(blocks, "KERNELS", {"cuda": blocks.FLASH})
    told = "a llama model cannot be trained on trees: attention in blocks came on the device cpu; .* cuda"
    with pytest.raises(ValueError, match=told):
        loading.bind(zoo.build("llama"))


def test_small_blocks_are_run_together_where_they_are_dear(monkeypatch):
    seen = []
    plain = tree_attention.attention.rectangles
    monkeypatch.setattr(
        tree_attention.attention, "rectangles", lambda *a, **k: (seen.append(a[3]), plain(*a, **k))[1]
    )
    kinds = {}
    for name, price in PRICES.items():
        of_a_forest("llama", price=price)
        kinds[name] = {row[0] for row in seen[-1].tolist() if row[1] < row[2]}
    assert kinds["each block by itself"] == {spans.DENSE, spans.CAUSAL}
    assert kinds["all under one mask"] == {spans.MASKED}
    assert kinds["batches"] == {spans.DENSE, spans.BATCH}
    model, params = loading.bind(zoo.build("llama"), price=PRICES["all under one mask"])
    with torch.no_grad(), model.running(params, None):
        cache.prefill(model, params, [one.tokens for one in zoo.rows()], budget=1000)
    assert {row[0] for row in seen[-1].tolist() if row[1] < row[2]} == {spans.MASKED}


def test_nobody_but_a_model_makes_the_routes_of_its_forwards_for_it_knows_what_blocks_cost():
    made = ("tree_attention.route(", "tree_attention.piece_route(")
    files = {p.name for p in (paths.ROOT / "adapters").glob("*.py") if any(m in p.read_text() for m in made)}
    assert files == {"self_test.py", "transformers_lm.py"}


def test_layers_with_sinks_run_on_blocks(monkeypatch):
    monkeypatch.setattr(tree_attention.attention, "masked", None)
    want, want_grads = zoo.alone(zoo.build("gpt_oss", attention="eager"), zoo.rows())
    value, grads = of_a_forest("gpt_oss")
    assert abs(value - want) <= 1e-10 * want
    assert zoo.gap(grads, want_grads) <= 1e-10


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_flex_attention_gives_the_gradients_of_the_dense_mask(kind, monkeypatch):
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # its plain form runs anywhere
    want = of_a_forest(kind, attention="mask")[1]
    monkeypatch.setattr(tree_attention.attention, "masked", None)
    modes = (False,) if kind == "gemma2" else (False, True, "selective")
    for options in ({"gradient_checkpointing": mode} for mode in modes):
        assert zoo.gap(of_a_forest(kind, attention="flex", **options)[1], want) <= 1e-10


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("attention", "kept"),
    [("blocks", True), pytest.param("flex", False, marks=pytest.mark.plain), ("mask", False)],
)
def test_selective_keeps_what_blocks_gave_and_is_true_elsewhere(attention, kept):
    options = {"attention": attention, "gradient_checkpointing": "selective"}
    assert loading.bind(zoo.build("llama"), **options)[0].keep_attention is kept


@pytest.mark.parametrize("mode", [True, "selective"])
def test_a_soft_cap_in_layers_that_are_recomputed_is_not_left_to_flex_attention(mode):
    options = {"attention": "flex", "gradient_checkpointing": mode}
    assert loading.bind(zoo.build("gemma2"), **options)[0].attention == "mask"
    want = of_a_forest("gemma2", attention="mask")[1]
    assert zoo.gap(of_a_forest("gemma2", **options)[1], want) <= 1e-12


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_flash_kernels_give_the_gradients_of_the_dense_mask(kind, monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash.backward)
    monkeypatch.setattr(blocks, "KERNELS", {"cpu": blocks.FLASH._replace(dtypes=(torch.float64,))})
    want = of_a_forest(kind, attention="mask")[1]
    assert zoo.gap(of_a_forest(kind)[1], want) <= 1e-10
    model, params = loading.bind(zoo.build(kind), gradient_checkpointing="selective")
    _, _, grads = model.pull_back(params, zoo.packed(zoo.rows(), budget=9), 0, zoo.nll)
    assert zoo.gap(grads, want) <= 1e-10


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
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 11}
    else:  # which reads no other number than the model's
        rope |= {"original_max_position_embeddings": 5}
    held = 64 if rope_type == "longrope" else 11
    model, params = loading.bind(zoo.build("llama", rope_parameters=rope, max_position_embeddings=held))
    assert model.max_length == 11
    short = [s for s in zoo.rows() if len(s.tokens) <= 11]
    assert model.predict(params, zoo.packed(short), 0).logprobs.isfinite().all()
    with pytest.raises(ValueError, match="12 tokens; beyond 11 this llama model"):
        model.predict(params, zoo.packed(zoo.rows()), 0)
