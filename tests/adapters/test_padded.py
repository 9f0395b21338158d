"""At planned sizes each algorithm gives the loss, metrics and gradients that it gives without them."""

import attrs
import hypothesis
import numpy as np
import pytest
import torch
import transformers
from hypothesis import strategies as st

from adapters import loading, teacher, tree_attention
from core import algorithms, check, metrics, pack, steps
from core import padded as padding
from core.plan import padding as ladders
from core.plan import sample, sizes, spans
from tests.adapters import zoo

ALL = {n: a for n, a in vars(algorithms).items() if isinstance(a, algorithms.Algorithm)}
ALL |= {f"{name} preference": one for name, one in algorithms.preferences.items()}
EACH = pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL)
SHAPE = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FEW = hypothesis.settings(max_examples=12)
PLANNED = sizes.Sizes(nodes=(12, 24, 48, 128), edges=(8, 24, 48, 128))


def bound(kind, seed=0, **options):
    torch.manual_seed(seed)
    described = transformers.LlamaConfig(**SHAPE, initializer_range=0.5, num_labels=1)
    module = kind.from_config(described, dtype=torch.float64, attn_implementation=tree_attention.NAME)
    return loading.bind(module, **options)


WORDS, WORD_PARAMS = bound(transformers.AutoModelForCausalLM)
VALUES, VALUE_PARAMS = bound(transformers.AutoModelForSequenceClassification)


def model(algorithm):
    """Return what scores for an algorithm: words, values, or words beside a teacher's."""
    if "values" in algorithm.needs:
        return VALUES, VALUE_PARAMS
    if "divergences" in algorithm.needs:
        other, params = bound(transformers.AutoModelForCausalLM, seed=1)
        return attrs.evolve(WORDS, teacher=teacher.Teacher(model=other, params=params, beta=0.5)), WORD_PARAMS
    return WORDS, WORD_PARAMS


def plain(parts, algorithm):
    counts = pack.count([s for part in parts for s in part])
    return [pack.build(part, counts, needs=algorithm.reads, dtype=torch.float64) for part in parts]


def at_sizes(parts, algorithm, *, budget=128, share=True, planned=PLANNED):
    counts = pack.count([s for part in parts for s in part])
    return [
        padding.build(
            part,
            counts,
            planned=planned,
            budget=budget,
            share=share,
            needs=algorithm.reads,
            dtype=torch.float64,
        )
        for part in parts
    ]


def assert_same(algorithm, got, want):
    """Loss, metrics and gradients of a step over two ways of packing it."""
    ran, params = model(algorithm)
    found = [steps.loss_and_grad(ran, algorithm, params, packs, 0) for packs in (got, want)]
    (value, means, grads), (true_value, true_means, true_grads) = found
    scale = max(abs(true_value.item()), *(g.norm().item() for g in true_grads.values()), 1e-12)
    assert abs(value - true_value) <= 1e-10 * scale
    for name, grad in true_grads.items():
        assert (grads[name] - grad).norm() <= 1e-10 * max(grad.norm().item(), 1e-3 * scale), name
    assert metrics.values(means) == pytest.approx(metrics.values(true_means), rel=1e-9, abs=1e-12)
    scored = [steps.evaluate(ran, algorithm, params, packs)[0].item() for packs in (got, want)]
    assert scored[0] == pytest.approx(scored[1], rel=1e-10)


@EACH
def test_a_padded_step_is_the_step(algorithm):
    samples = check.draw(algorithm, 0)
    parts = check.units(algorithm, samples)
    assert_same(algorithm, at_sizes(parts, algorithm), plain(parts, algorithm))


@EACH
def test_a_step_over_the_budget_runs_in_several_padded_forests(algorithm):
    samples = check.draw(algorithm, 0)
    packs = at_sizes([samples], algorithm, budget=13)
    assert len(packs[0].padded) > 1
    assert_same(algorithm, packs, plain([samples], algorithm))


def rows(lengths, *, trained=1.0, seed=0):
    """Draw samples of these lengths that train a part of their tokens."""
    draw = np.random.default_rng(seed)
    made = []
    for i, length in enumerate(lengths):
        mask = draw.random(length) < trained
        mask[0], mask[-1] = False, True
        made.append(sample.Sample(tokens=draw.integers(0, 11, length), trained=mask, unit=i))
    return made


def test_several_forests_side_by_side_are_a_forest_with_a_table_of_its_own():
    (each,) = at_sizes([rows([20, 9, 14])], algorithms.sft, budget=24)
    assert len(each.padded) > 1
    size, place = len(each.tokens), torch.arange(len(each.tokens))
    seen = torch.zeros(size, size, dtype=torch.int64)
    for kind, a, b, x, y in each.table.tolist():
        block = torch.ones(b - a, y - x, dtype=torch.int64)
        seen[a:b, x:y] += block.tril() if kind == spans.CAUSAL else block
    assert torch.equal(seen, ((place[:, None] >= place) & (place[:, None] < each.ends)).long())
    assert (each.table[:, 0].diff() <= 0).all()


def test_a_row_of_5_padded_to_128_is_the_row():
    wide = sizes.Sizes(nodes=(128,), edges=(128,))
    packs = at_sizes([rows([5])], algorithms.sft, planned=wide)
    assert len(packs[0].padded[0].tokens) == len(packs[0].padded[0].edge_nodes) == 128
    assert_same(algorithms.sft, packs, plain([rows([5])], algorithms.sft))


@FEW
@hypothesis.given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=5),
    trained=st.sampled_from([0.0, 0.3, 1.0]),
    share=st.booleans(),
    budget=st.sampled_from([40, 48, 300]),
)
def test_any_lengths_and_masks_are_padded_exactly_and_stay_within_the_plan(lengths, trained, share, budget):
    ladder = ladders.ladder(budget, multiple=16)
    planned = sizes.Sizes(nodes=ladder, edges=ladder)
    samples = rows(lengths, trained=trained)
    packs = at_sizes([samples], algorithms.sft, budget=budget, share=share, planned=planned)
    for part in packs[0].padded:
        assert (len(part.tokens), len(part.edge_nodes)) in zip(ladder, ladder, strict=True)
        assert len(part.table) == 2 * len(part.tokens)
    assert_same(algorithms.sft, packs, plain([samples], algorithms.sft))


def test_37_trained_tokens_give_loss_accuracy_and_entropy_of_the_unpadded_row():
    row = rows([38])
    assert row[0].trained.sum() == 37
    in_chunks = sizes.Sizes(nodes=(48,), edges=(48,))
    assert_same(
        algorithms.sft, at_sizes([row], algorithms.sft, planned=in_chunks), plain([row], algorithms.sft)
    )


def test_two_micro_batches_at_one_size_are_one_step():
    samples = rows([7, 30, 12, 21])
    halves = [samples[:2], samples[2:]]
    packs = at_sizes(halves, algorithms.sft, planned=sizes.Sizes(nodes=(48,), edges=(48,)))
    assert {len(part.tokens) for each in packs for part in each.padded} == {48}
    assert_same(algorithms.sft, packs, plain([samples], algorithms.sft))


def test_a_rank_without_work_gives_nothing_and_runs_nothing():
    samples = rows([9])
    counts = pack.count(samples)
    empty = padding.build([], counts, planned=PLANNED, budget=128, dtype=torch.float64)
    value, _, grads = steps.loss_and_grad(WORDS, algorithms.sft, WORD_PARAMS, [empty], 0)
    assert value == 0
    assert all(not grad.any() for grad in grads.values())


def test_a_sample_longer_than_a_forward_is_refused_by_its_length():
    with pytest.raises(ValueError, match="a sample has 60 tokens; at planned sizes one forward holds 48"):
        at_sizes([rows([60, 9])], algorithms.sft, budget=48)


def test_a_forward_larger_than_the_plan_is_refused():
    with pytest.raises(ValueError, match="the largest planned size is 128 with 128"):
        at_sizes([rows([200])], algorithms.sft, budget=300)


WIDE = sizes.Sizes(nodes=(128,), edges=(128,))


def test_padding_reads_no_position_that_the_true_tokens_do_not():
    each = at_sizes([rows([5, 3])], algorithms.sft, planned=WIDE)[0].padded[0]
    assert int(each.depths.max()) == 4
    assert each.pieces == ((0, 8),)


@pytest.mark.parametrize(("kind", "holds"), [("gpt2", "n_positions"), ("opt", "max_position_embeddings")])
def test_padding_is_longer_than_the_positions_that_a_model_learned_and_changes_nothing(kind, holds):
    ran, params = loading.bind(zoo.build(kind, **{holds: 12}))
    samples = rows([12, 7])
    (want,) = plain([samples], algorithms.sft)
    (padded,) = at_sizes([samples], algorithms.sft, planned=WIDE)
    value, _, grads = ran.pull_back(params, padded, 0, zoo.nll)
    true_value, _, true_grads = ran.pull_back(params, want, 0, zoo.nll)
    assert abs(value - true_value) <= 1e-10 * true_value
    assert zoo.gap(grads, true_grads) <= 1e-10


@pytest.fixture(scope="module")
def dropping():
    """A model that drops out, its parameters, and a pack whose two forests hold one row."""
    rates = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.0}
    (row,) = rows([9])
    (each,) = at_sizes([[row, attrs.evolve(row, unit=1)]], algorithms.sft, budget=9, share=False)
    assert len(each.padded) == 2
    return *loading.bind(zoo.build("gpt2", **rates), dropout=True), each


def test_equal_forests_of_a_pack_draw_apart_by_the_key_and_alike_without_one(dropping):
    ran, params, each = dropping
    drawn = {key: ran.predict(params, each, key).logprobs.chunk(2) for key in (3, 4, None)}
    assert not torch.equal(*drawn[3])
    assert torch.equal(*drawn[None])
    assert not any(torch.equal(one, other) for one, other in zip(drawn[3], drawn[4], strict=True))


def test_the_second_run_of_each_forest_draws_what_its_first_drew(dropping):
    ran, params, each = dropping
    draw = torch.Generator().manual_seed(5)
    way = {n: torch.randn(p.shape, generator=draw, dtype=torch.float64) for n, p in params.items()}

    def value(step):
        moved = {n: p + step * way[n] for n, p in params.items()}
        return float(zoo.nll(ran.predict(moved, each, 3))[0])

    told, _, grads = ran.pull_back(params, each, 3, zoo.nll)
    assert float(told) == pytest.approx(value(0.0), rel=1e-14)
    slope = (value(1e-5) - value(-1e-5)) / 2e-5
    assert sum(float((grads[n] * way[n]).sum()) for n in way) == pytest.approx(slope, rel=1e-6)


def test_the_kinds_of_attention_agree_on_padding():
    samples = rows([20, 9])
    found = []
    for kind in ("blocks", "mask"):
        ran = attrs.evolve(WORDS, attention=kind)
        packs = at_sizes([samples], algorithms.sft)
        found.append(steps.loss_and_grad(ran, algorithms.sft, WORD_PARAMS, packs, 0))
    assert found[0][0] == pytest.approx(found[1][0].item(), rel=1e-12)
    for name, grad in found[0][2].items():
        torch.testing.assert_close(grad, found[1][2][name], rtol=1e-9, atol=1e-12)
        assert grad.isfinite().all()
