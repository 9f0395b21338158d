"""An adapter's gradients are the merged model's chain rule; its folder is one of PEFT's."""

import json
import pathlib

import peft
import pytest
import torch
import transformers
from transformers import pytorch_utils

from adapters import loading, lora, peft_files, peft_format
from core import algorithms, keys, optimizers, pack, record, steps
from tests.adapters import zoo

FAMILIES = ("llama", "gpt2", "gemma2", "phi3", "qwen3")


def adapted(kind="llama", *, changes=None, bind=None, **settings):
    """Bind a tiny model with an adapter whose B is not 0, so that it does something."""
    model, base = loading.bind(zoo.build(kind, **(changes or {})), **(bind or {}))
    settings = {"rank": 3, "alpha": 5.0, **settings}
    model, params = lora.attach(model, base, lora.Settings(**settings), seed=1)
    draw = torch.Generator().manual_seed(7)
    moved = {
        n: p + 0.2 * torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype)
        for n, p in params.items()
    }
    return model, moved, base


def merged_module(model, params, kind, **changes):
    """The plain module of transformers with the adapter added to its weights."""
    leaves, apart = lora.merged(model, params)
    module = zoo.build(kind, attention="eager", **changes)
    if apart:
        module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone())
    with torch.no_grad():
        for n, p in module.named_parameters():
            p.copy_(apart.get(n, leaves.get(n, p)))
    return module


def chain_rule(model, params, by_weight):
    """dL/dB = s dW A^T, dL/dA = s B^T dW; of a Conv1D the weight lies the other way."""
    wanted = {}
    for path in model.adapter.targets:
        layer = model.module.get_submodule(path)
        dw = by_weight[f"{path}.weight"]
        dw = dw.T if isinstance(layer, pytorch_utils.Conv1D) else dw
        a, b = params[f"{path}.lora_A.weight"], params[f"{path}.lora_B.weight"]
        scale = model.adapter.settings.scale
        wanted |= {f"{path}.lora_A.weight": scale * b.T @ dw, f"{path}.lora_B.weight": scale * dw @ a.T}
    return wanted


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"budget": 9}])
def test_loss_and_gradients_are_those_of_the_merged_model(kind, options):
    model, params, _ = adapted(kind)
    value, _, grads = model.pull_back(params, zoo.packed(zoo.rows(), **options), 0, zoo.nll)
    want, by_weight = zoo.alone(merged_module(model, params, kind), zoo.rows())
    assert abs(value - want) <= 1e-10 * want
    assert zoo.gap(grads, chain_rule(model, params, by_weight)) <= 1e-10


@pytest.mark.parametrize("target", [r".*layers\.1.*proj", "o_proj", "lm_head"])
def test_pieces_are_exact_where_lower_layers_and_their_keys_hang_on_no_parameter(target):
    model, params, _ = adapted(targets=(target,))
    want = model.pull_back(params, zoo.packed(zoo.rows()), 0, zoo.nll)
    value, _, grads = model.pull_back(params, zoo.packed(zoo.rows(), budget=6), 0, zoo.nll)
    assert abs(value - want[0]) <= 1e-10 * want[0]
    assert zoo.gap(grads, want[2]) <= 1e-10


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", [{}, {"budget": 9}])
def test_an_adapter_of_the_output_head_is_seen_by_the_head_and_not_by_the_embedding(tied, options):
    changes = {"tie_word_embeddings": tied}
    model, params, base = adapted(changes=changes, targets=("all-linear", "lm_head"))
    value, _, grads = model.pull_back(params, zoo.packed(zoo.rows(), **options), 0, zoo.nll)
    module = merged_module(model, params, "llama", **changes)
    want, by_weight = zoo.alone(module, zoo.rows())
    assert torch.equal(module.model.embed_tokens.weight.detach(), base["model.embed_tokens.weight"])
    assert abs(value - want) <= 1e-10 * want
    assert zoo.gap(grads, chain_rule(model, params, by_weight)) <= 1e-10
    assert grads["lm_head.lora_B.weight"].norm() > 0


def test_fields_beside_the_log_probability_see_an_adapter_of_the_head():
    model, params, _ = adapted(targets=("lm_head",), changes={"tie_word_embeddings": False})
    needs = ("entropies", "log_sum_squares", "mean_logits", "top1")
    got = model.predict(params, zoo.packed(zoo.rows(), needs=needs), None)
    plain, base = loading.bind(zoo.build("llama", tie_word_embeddings=False))
    want = plain.predict(lora.merged(model, params)[0], zoo.packed(zoo.rows(), needs=needs), None)
    for name in ("logprobs", *needs):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-11, atol=1e-12)
    assert base.keys() == lora.merged(model, params)[0].keys()


def test_without_its_parameters_the_model_is_the_base_to_the_bit():
    model, params, base = adapted(targets=("all-linear", "lm_head"))
    plain, _ = loading.bind(zoo.build("llama"))
    for options in ({}, {"budget": 6}):
        each = zoo.packed(zoo.rows(), **options)
        assert torch.equal(model.predict({}, each, None).logprobs, plain.predict(base, each, None).logprobs)
        assert not torch.equal(
            model.predict(params, each, None).logprobs, plain.predict(base, each, None).logprobs
        )


def test_an_adapter_that_is_new_changes_no_bit_and_one_that_lacks_a_matrix_is_an_error():
    model, base = loading.bind(zoo.build("llama"))
    model, params = lora.attach(model, base, lora.Settings(rank=4, targets=("all-linear", "lm_head")))
    each = zoo.packed(zoo.rows())
    assert torch.equal(model.predict(params, each, None).logprobs, model.predict({}, each, None).logprobs)
    params.popitem()
    with pytest.raises(KeyError):
        model.predict(params, each, None)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_layers_changes_no_bit(kind, dropout):
    found = []
    for recompute in (False, True):
        model, params, _ = adapted(kind, bind={"gradient_checkpointing": recompute}, dropout=dropout)
        found.append(model.pull_back(params, zoo.packed(zoo.rows(), share=False), 3, zoo.nll)[2])
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


@pytest.mark.parametrize("way", [{"feed_forward_chunk": 3}, {"attention": "mask"}], ids=str)
def test_the_ways_to_save_memory_leave_gradients_as_they_are(way):
    found = []
    for bind in ({}, {**way, "gradient_checkpointing": True}):
        model, params, _ = adapted(bind=bind, targets=("all-linear", "lm_head"), whole=("norm",))
        model.predict({}, zoo.packed(zoo.rows()), None)
        found.append(model.pull_back(params, zoo.packed(zoo.rows()), 0, zoo.nll)[2])
    assert zoo.gap(*found) <= 1e-12


def test_dropout_before_the_adapter_is_drawn_from_the_key_alone_and_never_without_one():
    model, params, _ = adapted(dropout=0.4, targets=("all-linear", "lm_head"))
    still, _, _ = adapted(targets=("all-linear", "lm_head"))
    each, seen = zoo.packed(zoo.rows(), share=False), []
    model.pull_back(params, each, 3, lambda scores: (seen.append(scores.logprobs), zoo.nll(scores))[1])
    torch.rand(1)
    assert torch.equal(model.predict(params, each, 3).logprobs, seen[0].detach())
    assert not torch.equal(model.predict(params, each, 4).logprobs, seen[0].detach())
    assert torch.equal(model.predict(params, each, None).logprobs, still.predict(params, each, 3).logprobs)
    # The base is not dropped: with the adapter off nothing is drawn.
    assert torch.equal(model.predict({}, each, 3).logprobs, model.predict({}, each, None).logprobs)


def test_dropout_keeps_the_mean_of_what_the_adapter_adds():
    layer = torch.nn.Linear(4, 3)
    layer.lora_beside, layer.lora_dropout = lora.Beside(2.0), torch.nn.Dropout(0.5)
    layer.register_parameter("lora_A", torch.nn.Parameter(torch.ones(1, 4)))
    torch.manual_seed(0)
    low = lora.narrowed(layer, torch.ones(20_000, 4))
    assert low.mean().item() == pytest.approx(8.0, rel=0.02)
    assert set(low.flatten().tolist()) == {0.0, 4.0, 8.0, 12.0, 16.0}


@pytest.mark.parametrize("whole", [(), ("norm", "embed_tokens")], ids=str)
def test_training_moves_the_adapter_and_what_is_trained_whole_and_no_bit_of_the_base(whole):
    model, base = loading.bind(zoo.build("llama", dtype=torch.float32))
    before = record.tree.map(torch.clone, dict(base))
    model, params = lora.attach(model, base, lora.Settings(rank=2, whole=whole))
    optimizer = optimizers.adamw(rate=lambda done: 0.01)
    state = steps.init(params, optimizer, algorithms.sft, key=keys.key(0))
    start = record.tree.map(torch.clone, dict(params))
    packs = [pack.build(zoo.rows(), pack.count(zoo.rows()))]
    losses = []
    for _ in range(4):
        state, means = steps.train_step(model, algorithms.sft, optimizer, state, packs, donate=True)
        losses.append(float(means["loss"].total))
    assert losses[-1] < losses[0]
    assert all(not torch.equal(state.params[n], start[n]) for n in start)
    assert all(torch.equal(model.frozen[n], before[n]) for n in before)
    assert set(state.optimizer.first) == set(params)


def test_each_matrix_is_drawn_from_its_own_name():
    def drawn(**settings):
        model, base = loading.bind(zoo.build("llama"))
        return lora.attach(model, base, lora.Settings(rank=2, **settings), seed=3)[1]

    few, many = drawn(targets=("q_proj",)), drawn()
    assert few.keys() < many.keys()
    assert all(torch.equal(few[n], many[n]) for n in few)
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert not torch.equal(few[name], few[name.replace("layers.0", "layers.1")])
    assert few[name].abs().max() <= 16**-0.5
    assert few[name].abs().mean().item() == pytest.approx(0.5 * 16**-0.5, rel=0.3)


def test_the_scale_is_alpha_over_the_rank_or_over_its_square_root():
    assert lora.Settings(rank=4, alpha=8.0).scale == 2.0
    assert lora.Settings(rank=4, alpha=8.0, rank_stabilized=True).scale == 4.0


def test_adapters_over_bfloat16_are_float32_and_products_stay_in_bfloat16():
    model, base = loading.bind(zoo.build("llama", dtype=torch.bfloat16))
    model, params = lora.attach(model, base, lora.Settings(rank=2, whole=("norm",)))
    whole = {"model.norm.weight"}
    assert {p.dtype for n, p in params.items() if n not in whole} == {torch.float32}
    assert params["model.norm.weight"].dtype == torch.bfloat16
    value, _, grads = model.pull_back(params, zoo.packed(zoo.rows()), 0, zoo.nll)
    assert value.dtype == torch.float32
    assert {n: g.dtype for n, g in grads.items()} == {n: p.dtype for n, p in params.items()}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"targets": ("q_prj",)}, r"called q_prj; its linear layers are .*Did you mean q_proj\?"),
        ({"targets": ("embed_tokens",)}, "embed_tokens is a Embedding, and only linear layers"),
        ({"whole": ("nothing",)}, "called nothing"),
        ({"targets": ("lm_head",), "whole": ("lm_head",)}, "lm_head whole"),
        ({"targets": ("all-linear", "up_proj"), "whole": ("mlp",)}, r"mlp\.up_proj whole, .*; keep one"),
        ({"whole": ("layers",)}, "no linear layer beside those that lora_modules_to_save trains whole"),
    ],
)
def test_names_that_fit_no_layer_or_the_wrong_one_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        lora.resolve(zoo.build("llama"), lora.Settings(**settings))


def test_an_adapter_beside_a_head_that_is_trained_whole_as_the_embedding_is_refused():
    settings = lora.Settings(targets=("q_proj", "lm_head"), whole=("embed_tokens",))
    with pytest.raises(ValueError, match="lm_head whole, and lora_target_modules gives it an adapter; keep"):
        lora.resolve(zoo.build("llama", tie_word_embeddings=True), settings)
    assert lora.resolve(zoo.build("llama", tie_word_embeddings=False), settings)[1] == ("model.embed_tokens",)


def test_targets_are_names_patterns_or_all_linear_layers_but_the_head():
    module = zoo.build("llama")

    def found(*targets):
        return lora.resolve(module, lora.Settings(targets=targets))[0]

    assert len(found("all-linear")) == 14
    assert found("q_proj") == tuple(f"model.layers.{i}.self_attn.q_proj" for i in range(2))
    assert found(r".*layers\.1.*\.(up|down)_proj") == tuple(
        f"model.layers.1.mlp.{side}_proj" for side in ("up", "down")
    )
    assert found("layers.0.mlp.up_proj") == ("model.layers.0.mlp.up_proj",)
    for whole, left in (("mlp",), 8), (("model.layers.0",), 7), (("up_proj",), 12):
        targets, _ = lora.resolve(module, lora.Settings(whole=whole))
        assert (len(targets), [t for t in targets if any(name in t for name in whole)]) == (left, [])
    assert lora.trained(module, lora.Settings(rank=3, targets=("q_proj",))).num == 2 * 3 * (16 + 32)


def test_a_layer_whose_forward_is_passed_by_is_refused(monkeypatch):
    module = zoo.build("llama")
    gate = module.model.layers[0].mlp.gate_proj
    module.model.layers[0].mlp.gate_proj.__dict__["_call_impl"] = lambda x: torch.nn.functional.linear(
        x, gate.weight
    )
    gate.__class__ = type("Passed", (torch.nn.Linear,), {"__call__": lambda self, x: self._call_impl(x)})
    model, base = loading.bind(module)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_proj .*does not run as a layer"):
        lora.attach(model, base, lora.Settings())


def saved(tmp_path, kind="llama", *, changes=None, **settings):
    """Write a base and an adapter over it; return the model and what PEFT makes of the two."""
    changes = {"dtype": torch.float32, **(changes or {})}
    model, params, _ = adapted(kind, changes=changes, **settings)
    base, folder = str(tmp_path / "base"), str(tmp_path / "adapter")
    with model.swap({}):
        model.module.save_pretrained(base)
    peft_files.write(model, params, folder, base=base)
    return model, params, folder


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("gpt2", {}),
        ("llama", {"rank_stabilized": True, "targets": (r".*layers\.1.*q_proj",)}),
        ("llama", {"targets": ("all-linear", "lm_head"), "changes": {"tie_word_embeddings": False}}),
        ("llama", {"targets": ("all-linear", "lm_head")}),
        ("llama", {"whole": ("embed_tokens",)}),
        ("llama", {"whole": ("lm_head", "norm"), "changes": {"tie_word_embeddings": False}}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_peft_loads_the_folder_and_gives_the_same_logits(tmp_path, kind, options):
    model, params, folder = saved(tmp_path, kind, **options)
    plain = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "base"))
    theirs = peft.PeftModel.from_pretrained(plain, folder)
    for row in zoo.rows():
        tokens = torch.from_numpy(row.tokens)[None]
        with torch.no_grad():
            logits = theirs(tokens).logits[0, :-1].log_softmax(-1)
        want = logits.gather(-1, tokens[0, 1:, None])[row.trained[1:], 0]
        got = model.predict(params, zoo.packed([row]), None).logprobs
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_what_peft_wrote_is_read_back(tmp_path):
    model, params, folder = saved(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "base"))
    peft.PeftModel.from_pretrained(plain, folder).save_pretrained(str(tmp_path / "again"))
    blank = {n: torch.zeros_like(p) for n, p in params.items()}
    for place in (folder, str(tmp_path / "again")):
        found = peft_files.read(model, blank, place)
        assert all(torch.equal(found[n], params[n]) for n in params)
    theirs = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    ours = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert sorted(theirs["target_modules"]) == ours["target_modules"]
    assert {n: theirs[n] for n in ours if n != "target_modules"} == {
        n: v for n, v in ours.items() if n != "target_modules"
    }


def test_an_adapter_of_another_model_is_refused(tmp_path):
    _, _, folder = saved(tmp_path)
    other, params, _ = adapted(targets=("q_proj",))
    with pytest.raises(ValueError, match=r"not one of this model: .*down_proj"):
        peft_files.read(other, params, folder)
    other, params, _ = adapted(rank=4)
    with pytest.raises(ValueError, match=r"not one of this model: .*lora_A"):
        peft_files.read(other, params, folder)


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({"lora_alpha": 7}, "has lora_alpha 7, and this model's has "),
        ({"use_rslora": True}, "has use_rslora True"),
        ({"peft_type": "LOHA"}, "has peft_type 'LOHA'; plain LoRA"),
        ({"alpha_pattern": {"q_proj": 3}}, "has alpha_pattern"),
        ({"use_dora": True}, "has use_dora True"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights 'pissa'"),
    ],
)
def test_an_adapter_of_another_scale_or_kind_is_refused_where_its_matrices_fit(tmp_path, told, line):
    _, _, folder = saved(tmp_path)
    model, params, _ = adapted()
    path = pathlib.Path(folder) / peft_format.CONFIG
    written = json.loads(path.read_text())
    peft_files.read(model, params, folder)
    path.write_text(json.dumps({**written, **told}))
    with pytest.raises(ValueError, match=line):
        peft_files.read(model, params, folder)
