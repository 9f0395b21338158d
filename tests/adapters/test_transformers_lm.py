"""A bound model is two pure functions of its parameters, whatever the module under it remembers."""

import gc
import json
import weakref

import pytest
import safetensors
import torch
import transformers

from adapters import loading, transformers_lm, tree_attention
from core import blocks
from tests import paths
from tests.adapters import zoo


def bound(kind="llama", **options):
    """Bind a tiny model; its parameters are the caller's."""
    changes = options.pop("changes", {})
    return loading.bind(zoo.build(kind, **changes), **options)


def moved(params):
    """Parameters that are not those the module came with."""
    draw = torch.Generator().manual_seed(5)
    return {n: p + 0.1 * torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in params.items()}


def test_tied_weights_are_one_leaf_in_two_places():
    model, params = bound()
    assert "lm_head.weight" not in params
    places = [attribute for _, attribute, name in model.slots if name == "model.embed_tokens.weight"]
    assert places == ["weight", "weight"]


def test_the_module_keeps_no_second_copy_of_the_weights():
    model, params = bound()
    assert all(p.is_meta for p in model.module.parameters())
    assert not any(b.is_meta for b in model.module.buffers())
    assert not any(p.is_meta or p.requires_grad for p in params.values())


def test_a_swap_puts_tensors_in_every_place_and_takes_them_out_even_after_an_error():
    model, params = bound()
    embedding = params["model.embed_tokens.weight"]

    def fail():
        with model.swap(params):
            assert model.module.lm_head.weight is embedding
            assert model.module.model.embed_tokens.weight is embedding
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert all(p.is_meta for p in model.module.parameters())


def test_other_parameters_give_what_a_module_with_those_parameters_gives():
    model, params = bound()
    other = moved(params)
    module = zoo.build("llama", attention="sdpa")
    with torch.no_grad():
        for n, p in module.named_parameters():
            p.copy_(other[n])
    want, want_grads = zoo.alone(module, zoo.rows())
    value, _, grads = model.pull_back(other, zoo.packed(zoo.rows()), 0, zoo.nll)
    assert abs(value - want) <= 1e-10 * want
    assert zoo.gap(grads, want_grads) <= 1e-10


def test_predict_gives_the_scores_that_pull_back_differentiates():
    model, params = bound()
    pack = zoo.packed(zoo.rows(), needs=("entropies", "top1"))
    seen = []
    model.pull_back(params, pack, 0, lambda scores: (seen.append(scores), zoo.nll(scores))[1])
    scores = model.predict(params, pack, 0)
    for name in ("logprobs", "entropies", "top1"):
        assert torch.equal(getattr(scores, name), getattr(seen[0], name).detach())
    assert not scores.logprobs.requires_grad


def test_two_passes_give_the_same_bits_and_leave_the_parameters_alone():
    model, params = bound("gemma2")
    before = {n: p.clone() for n, p in params.items()}
    first, second = (model.pull_back(params, zoo.packed(zoo.rows()), 0, zoo.nll)[2] for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in params)
    assert all(torch.equal(params[n], before[n]) for n in params)
    assert all(p.grad is None for p in params.values())


def test_a_parameter_without_influence_gets_a_gradient_of_zero():
    model, params = bound("gpt2")
    grads = model.pull_back(params, zoo.packed(zoo.rows()[:1]), 0, lambda s: (s.logprobs.sum() * 0.0, {}))[2]
    assert grads.keys() == params.keys()
    assert all((g == 0).all() for g in grads.values())


def test_a_pack_in_which_nobody_trains_gives_zero_gradients_of_every_shape():
    model, params = bound()
    pack = zoo.packed([], needs=("entropies",))
    value, _, grads = model.pull_back(params, pack, 0, zoo.nll)
    assert value == 0.0
    assert {n: g.shape for n, g in grads.items()} == {n: p.shape for n, p in params.items()}
    assert all((g == 0).all() for g in grads.values())


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "phi3", "opt", "biogpt"])
def test_recomputing_layers_changes_no_bit_with_parameters_that_are_not_the_modules(kind, monkeypatch):
    routes = []
    plain = tree_attention.route
    monkeypatch.setattr(tree_attention, "route", lambda *a, **k: routes.append(plain(*a, **k)) or routes[-1])
    calls = []
    found = []
    for recompute in (False, True):
        model, params = bound(kind, gradient_checkpointing=recompute)
        routes.clear()
        found.append(model.pull_back(moved(params), zoo.packed(zoo.rows()), 0, zoo.nll)[2])
        calls.append(sum(route.calls for route in routes))
    assert calls == [2, 4]
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "phi3", "gpt_oss"])
def test_keeping_what_attention_gave_changes_no_gradient_and_runs_attention_once(kind, monkeypatch):
    ran = []
    kernel = blocks.HOST._replace(walk=lambda *given: (ran.append(1), blocks.HOST.walk(*given))[1])
    monkeypatch.setattr(blocks, "KERNELS", {"cpu": kernel})
    counts, found = {}, {}
    for mode in (False, True, "selective"):
        model, params = bound(kind, gradient_checkpointing=mode)
        ran.clear()
        found[mode] = model.pull_back(moved(params), zoo.packed(zoo.rows()), 0, zoo.nll)[2]
        counts[mode] = len(ran)
    assert zoo.gap(found["selective"], found[False]) <= 1e-12
    # A walk forward and one backward a layer; full recomputation walks forward once more.
    layers = 0 if kind == "gemma2" else 2  # its cap keeps it on the dense mask
    assert counts == {False: 2 * layers, True: 3 * layers, "selective": 2 * layers}


def test_keeping_what_attention_gave_holds_in_pieces_in_chunks_and_under_dropout():
    for options, changes in (({"dropout": True}, DROPOUT), ({"feed_forward_chunk": 4}, {})):
        found = []
        for mode in (False, "selective"):
            model, params = bound("gpt2", gradient_checkpointing=mode, changes=changes, **options)
            pack = zoo.packed(zoo.rows(), budget=9)
            assert len(pack.pieces) > 1
            found.append(model.pull_back(moved(params), pack, 3, zoo.nll)[2])
        assert zoo.gap(found[1], found[0]) <= 1e-12


def test_an_evaluation_in_between_leaves_recomputation_on(monkeypatch):
    model, params = bound(gradient_checkpointing=True)
    pack = zoo.packed(zoo.rows())
    model.predict(params, pack, None)
    routes = []
    plain = tree_attention.route
    monkeypatch.setattr(tree_attention, "route", lambda *a, **k: routes.append(plain(*a, **k)) or routes[-1])
    model.pull_back(params, pack, 0, zoo.nll)
    assert routes[0].calls == 4


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"feed_forward_chunk": 4}])
def test_what_runs_again_lets_go_of_the_parameters_after_the_pass(options):
    model, params = bound(**options)
    given = moved(params)
    held = [weakref.ref(p) for p in given.values()]
    model.pull_back(given, zoo.packed(zoo.rows()), 0, zoo.nll)
    del given
    gc.collect()
    assert not [ref for ref in held if ref() is not None]


def test_recomputing_leaves_the_rest_of_the_module_in_evaluation():
    model, _ = bound("gpt2", gradient_checkpointing=True)
    assert not model.module.training
    assert not any(m.training for m in model.module.modules() if isinstance(m, torch.nn.Dropout))


def test_recomputation_is_refused_where_a_model_has_none():
    module = zoo.build("llama")
    module.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match="a llama model has no gradient checkpointing"):
        loading.bind(module, gradient_checkpointing=True)


DROPOUT = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.0}


def test_dropout_is_drawn_from_the_key_and_from_nothing_else():
    model, params = bound("gpt2", dropout=True, changes=DROPOUT)
    pack = zoo.packed(zoo.rows())
    seen = []
    state = torch.get_rng_state()
    model.pull_back(params, pack, 3, lambda scores: (seen.append(scores.logprobs), zoo.nll(scores))[1])
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(model.predict(params, pack, 3).logprobs, seen[0].detach())
    assert not torch.equal(model.predict(params, pack, 4).logprobs, seen[0].detach())


def test_each_piece_draws_dropout_of_its_own_and_draws_it_again(monkeypatch):
    model, params = bound("gpt2", dropout=True, changes=DROPOUT)
    pack = zoo.packed(zoo.rows(), budget=9)
    seeds = []
    plain = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or plain(seed))
    model.pull_back(params, pack, 3, zoo.nll)
    drawn = [seed for seed in set(seeds) if seeds.count(seed) >= 2]
    assert len(drawn) == len(pack.pieces) > 1


def test_recomputation_draws_the_same_dropout():
    found = []
    for recompute in (False, True):
        model, params = bound("gpt2", dropout=True, gradient_checkpointing=recompute, changes=DROPOUT)
        found.append(model.pull_back(params, zoo.packed(zoo.rows()), 3, zoo.nll)[2])
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_without_dropout_nothing_is_drawn():
    model, params = bound("gpt2", changes=DROPOUT)
    pack = zoo.packed(zoo.rows())
    assert torch.equal(model.predict(params, pack, 0).logprobs, model.predict(params, pack, 1).logprobs)


def test_a_prediction_without_a_key_drops_nothing_and_training_goes_on():
    model, params = bound("gpt2", dropout=True, changes=DROPOUT)
    still, still_params = bound("gpt2", changes=DROPOUT)
    pack = zoo.packed(zoo.rows())
    before = model.predict(params, pack, 3).logprobs
    assert torch.equal(
        model.predict(params, pack, None).logprobs, still.predict(still_params, pack, 0).logprobs
    )
    assert torch.equal(model.predict(params, pack, 3).logprobs, before)


def test_dropout_inside_attention_is_refused_when_binding():
    with pytest.raises(ValueError, match=r"attention dropout is 0\.2"):
        bound("gpt2", dropout=True, changes={**DROPOUT, "attn_pdrop": 0.2})


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_saved_folder_loads_in_transformers_with_the_same_logits(kind, tmp_path):
    model, params = bound(kind, changes={"dtype": torch.float32})
    other = moved(params)
    model.save(other, str(tmp_path))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(3, 13)[None]
    with torch.no_grad(), model.swap(other):
        assert plain.config._attn_implementation != tree_attention.NAME
        route = tree_attention.route(zoo.packed([one_chain(tokens)]), kind="mask")
        want = model.module(
            input_ids=tokens, position_ids=torch.arange(10)[None], use_cache=False, tree=route
        )
        torch.testing.assert_close(plain(tokens).logits, want.logits, rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(params)
    again, loaded = loading.load(str(tmp_path), dtype=torch.float32)
    assert all(torch.equal(loaded[n], other[n]) for n in params)
    assert len(again.slots) == len(model.slots)


def one_chain(tokens):
    """A sample of these tokens."""
    numbers = tokens[0].numpy()
    return zoo.sample.Sample(tokens=numbers, trained=numbers != numbers[0])


def test_loading_prints_nothing(tmp_path, capfd):
    model, params = bound(changes={"dtype": torch.float32})
    model.save(params, str(tmp_path))
    transformers.utils.logging.enable_progress_bar()
    capfd.readouterr()
    loading.load(str(tmp_path), dtype=torch.float32)
    assert capfd.readouterr() == ("", "")
    assert transformers.utils.logging.is_progress_bar_enabled()


def test_double_precision_survives_casts_that_are_meant_for_half_precision():
    wide, narrow = torch.tensor([1 / 3], dtype=torch.float64), torch.tensor([1 / 3], dtype=torch.float32)
    with transformers_lm.KeepDouble():
        for cast in (
            lambda x: x.float(),
            lambda x: x.to(torch.float32),
            lambda x: x.to(dtype=torch.float32),
            lambda x: x.type(torch.float32),
            lambda x: x.softmax(-1, dtype=torch.float32),
        ):
            assert cast(wide).dtype == torch.float64
            assert cast(narrow).dtype == torch.float32
        assert narrow.double().dtype == torch.float64
        assert torch.zeros(1, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_follow_double(dtype):
    model, params = bound()
    pack = zoo.packed(zoo.rows())
    want = model.predict(params, pack, 0).logprobs
    low, low_params = loading.bind(zoo.build("llama", dtype=dtype))
    got = low.predict(low_params, pack, 0).logprobs
    assert got.dtype == torch.float32
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_a_trained_model_is_served_as_exactly():
    folder = str(paths.shared("models", "stories260K"))
    model, params = loading.load(folder, dtype=torch.float64)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="sdpa"
    )
    want, want_grads = zoo.alone(plain, zoo.rows())
    value, _, grads = model.pull_back(params, zoo.packed(zoo.rows()), 0, zoo.nll)
    assert abs(value - want) <= 1e-10 * want
    assert zoo.gap(grads, want_grads) <= 1e-10
