"""A teacher in the same process: what its divergence is, under forests, pieces and paddings of the head."""

from functools import partial

import attrs
import numpy as np
import pytest
import torch

from adapters import loading, lora, teacher, transformers_lm
from core import algorithms, divergence, head, pack, steps
from tests.adapters import test_lora, zoo
from tests.core import test_distill

BETAS = (0.0, 0.4, 1.0)
NEEDS = {"needs": ("divergences",)}
UNTIED = {"tie_word_embeddings": False}


def total(scores: pack.Scores):
    """Weigh rows unlike, so that a row in another's place shows."""
    return (scores.divergences * torch.linspace(0.5, 1.5, len(scores.divergences)).double()).sum(), {}


def taught(kind="llama", teacher_kind="gemma2", *, temperature=1.0, changes=None, **options):
    """Return a student with a teacher, its parameters, and both as plain modules."""
    wide = {"hidden_size": 24, "head_dim": 6, **(changes or {})}
    modules = plain(kind), moved(plain(teacher_kind, **wide))
    other, other_params = loading.bind(moved(zoo.build(teacher_kind, **wide)))
    model, params = loading.bind(zoo.build(kind))
    model, other = (
        attrs.evolve(each, shape=attrs.evolve(each.shape, temperature=temperature)) for each in (model, other)
    )
    told = teacher.Teacher(model=other, params=other_params, **options)
    return attrs.evolve(model, teacher=told), params, modules


def plain(kind, **changes):
    """Return a module with transformers' own attention."""
    return zoo.build(kind, attention="eager", **changes)


def moved(module):
    """Return a module of other weights."""
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in module.parameters():
            p += 0.2 * torch.randn(p.shape, generator=draw, dtype=torch.float64)
    return module


def alone(modules, samples, beta, temperature=1.0, rows=None):
    """Return the weighed sum and its gradients, each sample by itself, from both modules' own logits."""
    found = []
    with transformers_lm.KeepDouble():
        for one in samples:
            tokens = torch.from_numpy(one.tokens)[None]
            z, t = (m(input_ids=tokens, use_cache=False).logits[0, :-1, :rows] for m in modules)
            each = test_distill.by_definition(z / temperature, t.detach() / temperature, beta)
            found.append(each[torch.from_numpy(one.trained[1:])])
        value = total(pack.Scores(logprobs=torch.cat(found), divergences=torch.cat(found)))[0]
        leaves = dict(modules[0].named_parameters())
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return value.detach(), dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize("budget", [None, 7])
@pytest.mark.parametrize("beta", BETAS)
def test_a_forest_whole_or_in_pieces_gives_what_each_sample_alone_gives(beta, budget):
    model, params, modules = taught(beta=beta, temperature=0.7)
    packed = zoo.packed(zoo.rows(stem=12), budget=budget, **NEEDS)
    assert (len(packed.pieces) > 1) == bool(budget)
    want, want_grads = alone(modules, zoo.rows(stem=12), beta, 0.7)
    value, _, grads = model.pull_back(params, packed, 0, total)
    assert abs(value - want) <= 1e-10 * abs(want)
    assert zoo.gap(grads, want_grads) <= 1e-10
    assert torch.equal(total(model.predict(params, packed, None))[0], value)


def test_packs_of_single_samples_add_up_to_the_forest():
    model, params, _ = taught(beta=0.5)
    samples = zoo.rows()
    counts = pack.count(samples)
    single = [pack.build([s], counts, dtype=torch.float64, **NEEDS) for s in samples]
    whole = steps.loss_and_grad(model, algorithms.distill, params, [zoo.packed(samples, **NEEDS)], 0)
    parts = steps.loss_and_grad(model, algorithms.distill, params, single, 0)
    assert abs(whole[0] - parts[0]) <= 1e-12
    assert zoo.gap(parts[2], whole[2]) <= 1e-10


@pytest.mark.parametrize("budget", [None, 9])
def test_the_teacher_reads_a_pack_once_and_without_gradients(budget, monkeypatch):
    model, params, _ = taught()
    seen = []
    hidden = transformers_lm.TransformersLM.hidden

    def watched(self, route, given):
        if self is model.teacher.model:
            seen.append((len(route.tokens), torch.is_grad_enabled()))
        return hidden(self, route, given)

    monkeypatch.setattr(transformers_lm.TransformersLM, "hidden", watched)
    packed = zoo.packed(zoo.rows(), budget=budget, **NEEDS)
    model.pull_back(params, packed, 0, total)
    assert sum(nodes for nodes, _ in seen) == len(packed.tokens)
    assert not any(grads for _, grads in seen)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind", ["gemma2", "phi"])
@pytest.mark.parametrize("larger", ["teacher", "student"])
def test_rows_that_pad_one_of_the_heads_take_no_part(larger, kind, beta):
    changes = {"vocab_size": zoo.VOCAB + 3}
    if larger == "teacher":
        # The head of phi has a bias; half of the numbers of each of its heads turn with the position.
        model, params, modules = taught(
            teacher_kind=kind, beta=beta, changes={**changes, "hidden_size": 32, "head_dim": 8}
        )
    else:
        narrow, params, modules = taught(kind, "llama", beta=beta)
        wide = plain(kind, **changes)
        model, params = loading.bind(zoo.build(kind, **changes))
        model, modules = attrs.evolve(model, teacher=narrow.teacher), (wide, modules[1])
    want, want_grads = alone(modules, zoo.rows(), beta, rows=zoo.VOCAB)
    value, _, grads = model.pull_back(params, zoo.packed(zoo.rows(), **NEEDS), 0, total)
    assert abs(value - want) <= 1e-10 * abs(want)
    assert zoo.gap(grads, want_grads) <= 1e-10


def coarse(z, t, beta, num):
    """Return the divergence of the distributions that know `num` tokens of a model, and the rest."""
    p, t = z.softmax(-1), t.softmax(-1)
    found = []
    for one, other in zip(p, t, strict=True):
        chosen = [x.topk(num).indices.tolist() for x, use in ((other, beta < 1), (one, beta > 0)) if use]
        kept = sorted({token for tokens in chosen for token in tokens})
        pair = [torch.cat([x[kept], (1 - x[kept].sum())[None]]).log() for x in (one, other)]
        found.append(test_distill.by_definition(*pair, beta))
    return torch.stack(found)


@pytest.mark.parametrize("beta", BETAS)
def test_the_likeliest_tokens_and_the_rest_are_the_divergence_of_the_coarser_distributions(beta):
    model, params, modules = taught(beta=beta, num_kept=4)
    (sample,) = zoo.rows()[:1]
    found = model.predict(params, zoo.packed([sample], **NEEDS), None).divergences
    with transformers_lm.KeepDouble():
        tokens = torch.from_numpy(sample.tokens)[None]
        z, t = (m(input_ids=tokens, use_cache=False).logits[0, :-1] for m in modules)
    want = coarse(z, t, beta, 4)[torch.from_numpy(sample.trained[1:])]
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)
    whole = attrs.evolve(model, teacher=attrs.evolve(model.teacher, num_kept=0))
    assert (found <= whole.predict(params, zoo.packed([sample], **NEEDS), None).divergences + 1e-12).all()


def test_all_tokens_kept_are_the_whole_vocabulary_to_the_gradient():
    whole, params, _ = taught(beta=0.5)
    kept, _, _ = taught(beta=0.5, num_kept=zoo.VOCAB - 1)
    packed = zoo.packed(zoo.rows(), **NEEDS)
    one, other = (model.pull_back(params, packed, 0, total) for model in (whole, kept))
    assert abs(one[0] - other[0]) <= 1e-9 * one[0]
    assert zoo.gap(other[2], one[2]) <= 1e-8


def test_the_logits_of_a_pack_never_exist_at_once(monkeypatch):
    model, params, _ = taught()
    sizes = []
    logits = head.logits
    monkeypatch.setattr(head, "logits", lambda of: sizes.append(len(of.hidden)) or logits(of))
    three = divergence.LIVE_TILES * zoo.VOCAB * 8 * 3
    small = {divergence: ("divergences", three), head: ("score", 1)}
    for module, (name, size) in small.items():
        monkeypatch.setattr(module, name, partial(getattr(module, name), tile_bytes=size))
    packed = zoo.packed(zoo.rows(), **NEEDS)
    model.pull_back(params, packed, 0, total)
    assert len(packed.edge_nodes) > 3
    assert max(sizes) == 3


@pytest.mark.parametrize("budget", [None, 7])
@pytest.mark.parametrize("num", [0, 5])
def test_a_pack_in_which_nobody_trains_gives_zero_gradients_and_runs_nothing(num, budget, monkeypatch):
    model, params, _ = taught()
    silent = [attrs.evolve(s, trained=np.zeros(len(s.tokens), np.bool_)) for s in zoo.rows()[:num]]
    each = zoo.packed(silent, budget=budget, **NEEDS)
    assert (len(each.pieces) > 1) == bool(num and budget)
    monkeypatch.setattr(transformers_lm.TransformersLM, "states", None)
    scores = model.predict(params, each, None)
    assert scores.divergences is not None
    assert len(scores.logprobs) == len(scores.divergences) == 0
    value, _, grads = model.pull_back(params, each, 0, total)
    assert value == 0.0
    assert all((g == 0).all() for g in grads.values())


def test_a_model_without_a_teacher_says_so():
    model, params = loading.bind(zoo.build("llama"))
    with pytest.raises(ValueError, match="the model has no teacher"):
        model.predict(params, zoo.packed(zoo.rows(), **NEEDS), None)


def test_a_teacher_of_the_same_weights_is_at_no_distance():
    model, params = loading.bind(zoo.build("llama"))
    model = attrs.evolve(model, teacher=teacher.Teacher(model=model, params=params, beta=0.5))
    scores = model.predict(params, zoo.packed(zoo.rows(), **NEEDS), None)
    assert scores.divergences is not None
    assert (scores.divergences == 0.0).all()


@pytest.mark.parametrize(
    ("beta", "num_kept", "budget"), [(0.0, 0, None), (0.4, 0, 9), (1.0, 0, None), (0.4, 4, 9)]
)
def test_adapters_of_both_heads_teach_as_the_merged_models_do(beta, num_kept, budget):
    changes = {"vocab_size": zoo.VOCAB + 3}
    other, told, _ = test_lora.adapted("phi3", targets=("qkv_proj", "lm_head"), changes=changes)
    model, params, _ = test_lora.adapted(changes=UNTIED, targets=("q_proj", "lm_head"))
    told = teacher.Teacher(model=other, params=told, beta=beta, num_kept=num_kept)
    model = attrs.evolve(model, teacher=told)
    packed = zoo.packed(zoo.rows(), budget=budget, **NEEDS)
    value, _, grads = model.pull_back(params, packed, 0, total)
    wide, _ = loading.bind(zoo.build("phi3", **changes))
    told = attrs.evolve(told, model=wide, params=lora.merged(other, told.params)[0])
    merged = attrs.evolve(loading.bind(zoo.build("llama", **UNTIED))[0], teacher=told)
    want, _, by_weight = merged.pull_back(lora.merged(model, params)[0], packed, 0, total)
    assert abs(value - want) <= 1e-10 * want
    assert zoo.gap(grads, test_lora.chain_rule(model, params, by_weight)) <= 1e-10


def test_a_teacher_beside_the_students_own_base_hides_nothing_from_its_adapter():
    found = []
    for own in (True, False):
        model, params, _ = test_lora.adapted(changes=UNTIED, targets=("lm_head",), dropout=0.5)
        other = model if own else test_lora.adapted(changes=UNTIED, targets=("lm_head",))[0]
        told = teacher.Teacher(model=other, params={n: 2.0 * p for n, p in params.items()}, beta=0.5)
        packed = zoo.packed(zoo.rows(), share=False, **NEEDS)
        found.append(attrs.evolve(model, teacher=told).pull_back(params, packed, 3, total))
    assert found[0][0] == found[1][0] > 0.0
    assert all(torch.equal(found[0][2][n], found[1][2][n]) for n in params)
