"""Shapes that never change draw what shapes that follow draw, in as many graphs as there are functions."""

import collections
import contextlib

import attrs
import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.utils import _python_dispatch, _pytree

from adapters import static_cache
from core import pack
from core.plan import sample
from tests.adapters import drawing

STOPS = tuple(range(3, 13))
KINDS = ("llama", "gpt2", "opt", "mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe")


def shapes(**changes):
    return static_cache.Shapes(**{"rows": 8, "length": 40, "chunk": 4, **changes})


def fixed(engine, **changes):
    """Return an engine of the same model whose shapes never change."""
    sampler, params = engine
    return attrs.evolve(sampler, static=shapes(**changes)), params


def ids(groups):
    return [[c.tokens.tolist() for c in group] for group in groups]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        assert all(drawing.same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_ids_equal_generate_alone_and_in_a_batch(kind):
    engine = fixed(drawing.sampler(kind, dtype=torch.float32))
    rows = drawing.prompts(*drawing.LENGTHS)
    together = drawing.generate(engine, rows, temperature=0.0, max_tokens=20)
    for row, group in zip(rows, together, strict=True):
        want = drawing.own(kind, row, 20)
        alone = drawing.generate(engine, [row], temperature=0.0, max_tokens=20)[0]
        assert all(np.array_equal(c.tokens, want) for c in (*group, *alone))


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_draw_the_same_as_loading_leaves_them_and_keep_the_way_that_they_run(kind, capfd):
    engine, rows = drawing.sampler(kind, dtype=torch.float32), drawing.prompts(2, 5)
    module = engine[0].model.module
    module.set_experts_implementation("grouped_mm")  # what a folder is loaded with; it has no form in float32
    want, got = (drawing.generate(e, rows, temperature=0.0, max_tokens=3) for e in (engine, fixed(engine)))
    assert ids(got) == ids(want)
    assert module.config._experts_implementation == "grouped_mm"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_greedy_ids_equal_those_of_the_growing_cache_in_any_precision(kind, dtype):
    engine, rows = drawing.sampler(kind, dtype=dtype), drawing.prompts(*drawing.LENGTHS)
    want, got = (drawing.generate(e, rows, temperature=0.0, max_tokens=15) for e in (engine, fixed(engine)))
    assert ids(got) == ids(want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numbers", [{}, {"temperature": 0.6, "top_p": 0.75}, {"top_k": 5, "min_p": 0.1}])
def test_drawn_ids_are_those_of_the_growing_cache(kind, numbers):
    engine, rows = drawing.sampler(kind, dtype=torch.float32), drawing.prompts(1, 4, 5, 9, 13)
    want, got = (
        drawing.generate(e, rows, stop_ids=STOPS[:3], max_tokens=20, **numbers)
        for e in (engine, fixed(engine))
    )
    assert ids(got) == ids(want)
    for a, b in zip(want, got, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.ended == y.ended
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-4)
            np.testing.assert_allclose(x.kept, y.kept, atol=1e-4)


ROWS = drawing.prompts(4, 7, 1, 8, 12)
ENGINE = drawing.sampler()
DRAWN = {"temperature": 0.8, "top_p": 0.9, "stop_ids": STOPS}
ALL = drawing.generate(ENGINE, ROWS, num_samples=4, **DRAWN)


@hypothesis.settings(deadline=None, max_examples=15)
@hypothesis.given(
    order=st.lists(st.sampled_from(range(len(ROWS))), min_size=1, max_size=5, unique=True),
    num_samples=st.integers(1, 4),
    rows=st.integers(4, 9),
    chunk=st.integers(1, 13),
)
def test_rows_and_chunks_order_and_size_of_groups_change_no_draw(order, num_samples, rows, chunk):
    engine, chosen = fixed(ENGINE, rows=rows, chunk=chunk), [ROWS[i] for i in order]
    got = drawing.generate(engine, chosen, order, num_samples=num_samples, **DRAWN)
    assert_same(got, [ALL[i][:num_samples] for i in order])


def test_a_smaller_batch_in_between_sees_nothing_of_those_around_it():
    engine = fixed(ENGINE, rows=4)
    got = [drawing.generate(engine, ROWS[:n], num_samples=1, **DRAWN) for n in (4, 3, 4)]
    for n, groups in zip((4, 3, 4), got, strict=True):
        assert_same(groups, [group[:1] for group in ALL[:n]])


def watched(around):
    """Return what makes a function run inside `around(name)`."""

    def compiled(function):
        def run(*args):
            with around(function.__name__):
                return function(*args)

        return run

    return compiled


def test_a_prompt_runs_once_however_many_completions_follow():
    runs = collections.Counter()

    def around(name):
        runs[name] += 1
        return contextlib.nullcontext()

    drawing.generate(
        fixed(ENGINE, rows=12, chunk=5, compiled=watched(around)), ROWS[:3], num_samples=4, **DRAWN
    )
    assert runs["_prefill"] == sum(-(-(len(row) - 1) // 5) for row in ROWS[:3])
    assert runs["_decode"] == max(len(c.tokens) for group in ALL[:3] for c in group)


def test_positions_of_a_long_prompt_are_whole_numbers_all_unlike_in_bfloat16():
    engine, params = drawing.sampler(dtype=torch.bfloat16, changes={"max_position_embeddings": 512})
    met = []

    def compiled(function):
        return lambda model, held, *inputs: met.append(inputs[1]) or function(model, held, *inputs)

    still = attrs.evolve(engine, static=shapes(rows=1, length=304, chunk=64, compiled=compiled))
    drawing.generate((still, params), drawing.prompts(300), num_samples=1, max_tokens=4)
    depths = torch.cat(met)
    assert depths.dtype == torch.int64
    assert depths.unique().tolist() == list(range(303))


def test_a_completion_is_as_long_as_what_was_drawn_whatever_is_drawn_beside_it():
    for engine in (chain := drawing.chain({2: 3, 3: 9, 4: 5, 5: 6, 6: 7, 7: 8, 8: 9, 9: 9}), fixed(chain)):
        got = drawing.generate(engine, [np.array([2]), np.array([4])], temperature=0.0, stop_ids=(9,))
        assert ids(got) == [[[3, 9]] * 2, [[5, 6, 7, 8, 9]] * 2]
        assert all(c.ended for group in got for c in group)


class Signatures(_python_dispatch.TorchDispatchMode):
    """Notes every operation with the shapes that it came with."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = _pytree.tree_leaves((args, kwargs or {}))
        self.seen.add((func, *((*a.shape, a.dtype) for a in leaves if isinstance(a, torch.Tensor))))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_no_operation_of_the_model_meets_a_second_shape_whatever_the_lengths(kind):
    noted = Signatures()
    engine = fixed(drawing.sampler(kind, dtype=torch.float32), rows=4, compiled=watched(lambda _: noted))
    seen = []
    for lengths, max_tokens, num_samples in (([9], 3, 2), ([2, 5], 17, 2), ([5, 17, 1], 20, 1), ([33], 6, 4)):
        drawing.generate(
            engine, drawing.prompts(*lengths), num_samples=num_samples, max_tokens=max_tokens, stop_ids=STOPS
        )
        seen.append(len(noted.seen))
    assert seen[0] > 20
    assert set(seen) == {seen[0]}


def scored(engine, params, rows, groups, temperature):
    """Return what the training forward says of completions, and what the sampler said."""
    samples = [
        sample.Sample(
            tokens=np.concatenate([p, c.tokens]), trained=np.arange(len(p) + len(c.tokens)) >= len(p)
        )
        for p, group in zip(rows, groups, strict=True)
        for c in group
    ]
    trainer = attrs.evolve(engine.model, shape=attrs.evolve(engine.model.shape, temperature=temperature))
    got = trainer.predict(params, pack.build(samples, pack.count(samples)), None).logprobs
    return got, torch.from_numpy(np.concatenate([c.logprobs for group in groups for c in group]))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("numbers", [{}, {"temperature": 0.6}, {"temperature": 0.6, "top_p": 0.75}])
def test_the_first_ratio_to_the_training_forward_is_one(kind, numbers):
    engine, params = fixed(drawing.sampler(kind, dtype=torch.float32), rows=12)
    rows = drawing.prompts(*drawing.LENGTHS)
    groups = drawing.generate((engine, params), rows, num_samples=4, **numbers)
    got, sampled = scored(engine, params, rows, groups, numbers.get("temperature", 1.0))
    assert len(sampled) == 3 * 4 * 12
    assert ((got - sampled).exp() - 1).abs().max() < 1e-4


def test_the_cache_has_as_many_places_as_were_asked_for_however_little_is_drawn():
    engine, params = fixed(drawing.sampler(changes={"max_position_embeddings": 512}), length=62, chunk=4)
    with torch.no_grad(), engine.model.running(params, None):
        held = engine.static.empty(engine.model, params)
    assert all(t.shape == (8, 2, 64, 8) for both in held.values() for t in both)
    got = [drawing.generate((engine, params), ROWS[:1], max_tokens=n)[0][0] for n in (8, 16, 100)]
    assert [len(c.tokens) for c in got] == [8, 16, 62 - 4]
    assert np.array_equal(got[2].tokens[:16], got[1].tokens)


def test_a_completion_is_cut_off_at_what_the_model_holds_and_longer_ones_beside_it_go_on():
    rows = drawing.prompts(60, 3, 3, 3, 3, 3)
    for engine in (drawing.sampler("gpt2"), fixed(drawing.sampler("gpt2"), length=80, rows=6)):
        got = drawing.generate(engine, rows, max_tokens=8, num_samples=1)
        assert [len(group[0].tokens) for group in got] == [4, 8, 8, 8, 8, 8]


def test_a_prompt_that_leaves_no_room_in_a_row_is_refused():
    with pytest.raises(
        ValueError, match=r"prompt 7 has 20 tokens; a row of the static cache holds 16, .* cut"
    ):
        drawing.generate(fixed(ENGINE, length=16), drawing.prompts(20), [7])


def test_a_group_of_more_than_the_rows_is_refused():
    with pytest.raises(ValueError, match="5 completions of a prompt came; the static cache has 4 rows"):
        drawing.generate(fixed(ENGINE, rows=4), ROWS, num_samples=5)


def test_logits_that_are_not_finite_are_told():
    engine, params = fixed(ENGINE)
    broken = {n: torch.full_like(p, torch.nan) if "norm" in n else p for n, p in params.items()}
    with pytest.raises(ValueError, match="prompt 17: the model's logits are not finite after 0 drawn"):
        drawing.generate((engine, broken), ROWS[:1], [17])


def test_end_ids_and_stop_strings_end_a_completion_as_ever():
    chain = fixed(drawing.chain({2: 3, 3: 9, 9: 5, 5: 5}), rows=2)
    got = drawing.generate(chain, [np.array([2])], temperature=0.0, stop_ids=(7, 9))[0]
    assert all(c.tokens.tolist() == [3, 9] and c.ended for c in got)
    reading = (attrs.evolve(chain[0], decode=lambda ids: "".join(chr(96 + i) for i in ids)), chain[1])
    got = drawing.generate(reading, [np.array([2])], temperature=0.0, stop_strings=("zz", "ie"))[0]
    assert all(c.tokens.tolist() == [3, 9, 5] and c.ended for c in got)


class Counting:
    """A compiler's front that counts graphs and refuses a size that is not fixed."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        assert all(isinstance(n, int) for t in inputs if isinstance(t, torch.Tensor) for n in t.shape)
        self.graphs += 1
        return graph.forward

    def compiled(self, function):
        return static_cache.one_graph(backend=self, dynamic=False)(function)


CALLS = (((9,), 3, 2), ((2, 5, 11), 17, 2), ((1,), 31, 4), ((17, 1, 7), 6, 2), ((33,), 5, 6))
"""Lengths of prompts, most tokens, completions of each."""


@pytest.mark.plain
@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", torch.float32), ("gpt2", torch.float32), ("gemma2", torch.float64)]
)
def test_two_graphs_serve_every_prompt_and_every_completion(kind, dtype):
    counting = Counting()
    engine, params = drawing.sampler(kind, dtype=dtype)
    compiled = attrs.evolve(engine, static=shapes(rows=6, compiled=counting.compiled))
    for lengths, max_tokens, num_samples in CALLS:
        numbers = {"num_samples": num_samples, "max_tokens": max_tokens, "stop_ids": (5,)}
        params = {n: p + 0.01 for n, p in params.items()}  # as after an update: other tensors
        want, got = (
            drawing.generate((e, params), drawing.prompts(*lengths), **numbers) for e in (engine, compiled)
        )
        assert ids(got) == ids(want)
    assert counting.graphs == 2


@pytest.mark.plain
def test_a_float32_model_under_autocast_is_drawn_from_in_two_graphs():
    counting = Counting()
    engine, params = drawing.sampler("llama", dtype=torch.float32)
    cast = attrs.evolve(engine, model=attrs.evolve(engine.model, autocast=torch.bfloat16))
    compiled = attrs.evolve(cast, static=shapes(rows=6, compiled=counting.compiled))
    for lengths, max_tokens, _ in CALLS[:2]:
        numbers = {"temperature": 0.0, "max_tokens": max_tokens}
        want, got = (
            drawing.generate((e, params), drawing.prompts(*lengths), **numbers) for e in (cast, compiled)
        )
        assert ids(got) == ids(want)
    assert counting.graphs == 2


@pytest.mark.plain
def test_a_third_graph_is_an_error():
    engine, params = drawing.sampler("llama", dtype=torch.float32)
    compiled = attrs.evolve(engine, static=shapes(compiled=Counting().compiled))
    drawing.generate((compiled, params), ROWS[:1])
    with pytest.raises(ValueError, match="drawing from a llama model asked for a third graph"):
        drawing.generate((compiled, {n: p.double() for n, p in params.items()}), ROWS[:1])


@pytest.mark.plain
def test_a_model_that_cannot_be_compiled_whole_is_told_by_its_name():
    engine, params = drawing.sampler("qwen3_moe", dtype=torch.float32)
    compiled = attrs.evolve(engine, static=shapes(compiled=Counting().compiled))
    with pytest.raises(
        ValueError, match=r"drawing from a qwen3_moe model cannot be compiled: .*; draw without"
    ):
        drawing.generate((compiled, params), ROWS[:1])


@pytest.mark.plain
def test_the_compiler_of_the_cpu_draws_the_same_tokens():
    engine, params = drawing.sampler("llama", dtype=torch.float32, changes={"num_hidden_layers": 1})
    inductor = attrs.evolve(engine, static=shapes(compiled=static_cache.one_graph(dynamic=False)))
    want, got = (drawing.generate((e, params), ROWS, num_samples=3, **DRAWN) for e in (engine, inductor))
    assert ids(got) == ids(want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_under_autocast_the_cache_is_in_the_dtype_of_the_products_and_ids_are_those_of_the_growing_one(
    kind, dtype
):
    engine, params = drawing.sampler(kind, dtype=torch.float32)
    engine = attrs.evolve(engine, model=attrs.evolve(engine.model, autocast=dtype))
    still = attrs.evolve(engine, static=shapes())
    with torch.no_grad(), engine.model.running(params, None):
        held = still.static.empty(engine.model, params)
    assert {t.dtype for both in held.values() for t in both} == {dtype}
    rows = drawing.prompts(*drawing.LENGTHS)  # after none of these are two tokens as likely as rounding tells
    want, got = (drawing.generate((e, params), rows, temperature=0.0) for e in (engine, still))
    assert ids(got) == ids(want)


@pytest.mark.parametrize("static", [False, True])
def test_under_autocast_the_first_ratio_to_the_training_forward_is_near_one(static):
    engine, params = drawing.sampler("llama", dtype=torch.float32)
    engine = attrs.evolve(
        engine, model=attrs.evolve(engine.model, autocast=torch.bfloat16), static=shapes() if static else None
    )
    groups = drawing.generate((engine, params), ROWS, num_samples=4)
    got, sampled = scored(engine, params, ROWS, groups, 1.0)
    assert (got - sampled).abs().mean() < 0.02
