"""Completions are what the model says, drawn by name: nothing else in a call changes one."""

import attrs
import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from adapters import packing, sampling, tree_attention
from core import pack, ports
from core.plan import sample
from tests.adapters import drawing

STOPS = tuple(range(3, 13))


@pytest.mark.parametrize(
    "kind", ["llama", "gpt2", "opt", "mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe"]
)
def test_greedy_ids_equal_generate_alone_and_in_a_batch(kind):
    engine, rows = drawing.sampler(kind, dtype=torch.float32), drawing.prompts(*drawing.LENGTHS)
    together = drawing.generate(engine, rows, temperature=0.0, max_tokens=20)
    for row, group in zip(rows, together, strict=True):
        want = drawing.own(kind, row, 20)
        alone = drawing.generate(engine, [row], temperature=0.0, max_tokens=20)[0]
        assert all(np.array_equal(c.tokens, want) for c in (*group, *alone))


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_prompts_that_share_repeat_and_contain_each_other_equal_generate(kind):
    stem, a, b = drawing.prompts(8, 3, 2)
    rows = [np.concatenate(r) for r in ([stem, a], [stem], [stem, b], [stem, a], [stem[:4]], [b])]
    together = drawing.generate(drawing.sampler(kind), rows, temperature=0.0, max_tokens=9)
    for row, group in zip(rows, together, strict=True):
        want = drawing.own(kind, row, 9, dtype=torch.float64)
        assert all(np.array_equal(c.tokens, want) for c in group)


def test_a_long_completion_outgrows_its_room_and_still_equals_generate():
    changes = {"max_position_embeddings": 512}
    row = drawing.prompts(5)[0]
    got = drawing.generate(
        drawing.sampler(changes=changes), [row], temperature=0.0, max_tokens=300, num_samples=1
    )[0][0]
    assert np.array_equal(got.tokens, drawing.own("llama", row, 300, dtype=torch.float64, changes=changes))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_packed_weights_draw_the_same_ids_and_are_gone_afterwards(kind, monkeypatch):
    (engine, params), rows = drawing.sampler(kind, dtype=torch.float32), drawing.prompts(*drawing.LENGTHS)
    plain = (attrs.evolve(engine, packing_bytes=0), params)
    made = []
    packed = packing.packed
    monkeypatch.setattr(packing, "packed", lambda *a, **k: made.append(packed(*a, **k)) or made[-1])
    for numbers in ({"temperature": 0.0}, {"temperature": 0.7}):
        left, right = (drawing.generate(e, rows, max_tokens=30, **numbers) for e in ((engine, params), plain))
        assert all(
            np.array_equal(a.tokens, b.tokens)
            for x, y in zip(left, right, strict=True)
            for a, b in zip(x, y, strict=True)
        )
    assert any(isinstance(p, packing.Packed) for p in made[0].values()) or kind == "gpt2"
    assert not any(isinstance(p, packing.Packed) for p in made[1].values())
    assert all(p.is_meta for p in engine.model.module.parameters())


def test_prompts_over_the_budget_run_in_pieces_and_change_nothing():
    stem, *rest = drawing.prompts(11, 2, 6, 9)
    rows = [*(np.concatenate([stem, r]) for r in rest), rest[2]]
    whole = drawing.generate(drawing.sampler(), rows)
    cut = drawing.generate(drawing.sampler(prefill_budget=5), rows)
    assert all(
        drawing.same(a, b)
        for left, right in zip(whole, cut, strict=True)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize(
    "numbers", [{}, {"temperature": 0.6}, {"temperature": 0.6, "top_p": 0.75}, {"top_k": 5, "min_p": 0.1}]
)
def test_the_first_ratio_to_the_training_forward_is_one(kind, numbers):
    (engine, params), rows = drawing.sampler(kind, dtype=torch.float32), drawing.prompts(*drawing.LENGTHS)
    groups = drawing.generate((engine, params), rows, num_samples=4, **numbers)
    samples = [
        sample.Sample(
            tokens=np.concatenate([p, c.tokens]), trained=np.arange(len(p) + len(c.tokens)) >= len(p)
        )
        for p, group in zip(rows, groups, strict=True)
        for c in group
    ]
    shape = attrs.evolve(engine.model.shape, temperature=numbers.get("temperature", 1.0))
    trainer = attrs.evolve(engine.model, shape=shape)
    scored = trainer.predict(params, pack.build(samples, pack.count(samples)), None).logprobs
    sampled = torch.from_numpy(np.concatenate([c.logprobs for group in groups for c in group]))
    assert len(sampled) == 3 * 4 * 12
    assert ((scored - sampled).exp() - 1).abs().max() < 1e-4


def test_the_temperature_of_the_trainers_head_does_not_reach_the_sampler():
    (engine, params), rows = drawing.sampler(), drawing.prompts(*drawing.LENGTHS)
    warm = attrs.evolve(engine.model, shape=attrs.evolve(engine.model.shape, temperature=0.5))
    plain, other = (drawing.generate((e, params), rows) for e in (engine, sampling.Sampler(warm)))
    assert all(
        drawing.same(a, b)
        for left, right in zip(plain, other, strict=True)
        for a, b in zip(left, right, strict=True)
    )


def test_a_bfloat16_model_draws_what_its_training_forward_expects():
    (engine, params), rows = drawing.sampler(dtype=torch.bfloat16), drawing.prompts(*drawing.LENGTHS)
    groups = drawing.generate((engine, params), rows, num_samples=4)
    samples = [
        sample.Sample(
            tokens=np.concatenate([p, c.tokens]), trained=np.arange(len(p) + len(c.tokens)) >= len(p)
        )
        for p, group in zip(rows, groups, strict=True)
        for c in group
    ]
    scored = engine.model.predict(params, pack.build(samples, pack.count(samples)), None).logprobs
    sampled = np.concatenate([c.logprobs for group in groups for c in group])
    assert sampled.dtype == np.float32
    assert np.abs(scored.numpy() - sampled).mean() < 0.02


ROWS = [*drawing.prompts(4, 7, 1, 7, 12), np.concatenate(drawing.prompts(7, 3, seed=1)[:2])]
ENGINE = drawing.sampler()
ALL = drawing.generate(ENGINE, ROWS, num_samples=5, temperature=0.8, top_p=0.9, stop_ids=STOPS)


@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(
    order=st.lists(st.sampled_from(range(len(ROWS))), min_size=1, max_size=6, unique=True),
    num_samples=st.integers(1, 5),
    max_samples=st.integers(1, 12),
)
def test_batch_order_group_size_and_waves_change_no_draw(order, num_samples, max_samples):
    engine = (attrs.evolve(ENGINE[0], max_samples=max_samples), ENGINE[1])
    rows = [ROWS[i] for i in order]
    got = drawing.generate(
        engine, rows, order, num_samples=num_samples, temperature=0.8, top_p=0.9, stop_ids=STOPS
    )
    for i, group in zip(order, got, strict=True):
        assert len(group) == num_samples
        assert all(drawing.same(c, want) for c, want in zip(group, ALL[i], strict=False))


def test_rows_that_end_leave_and_the_others_go_on():
    lengths = {len(c.tokens) for group in ALL for c in group}
    assert len(lengths) > 5
    assert {c.ended for group in ALL for c in group} == {True, False}
    for completion in (c for group in ALL for c in group):
        assert np.isin(completion.tokens[:-1], STOPS).sum() == 0
        assert completion.ended == (completion.tokens[-1] in STOPS)


def test_other_keys_numbers_and_samples_draw_other_completions():
    row = drawing.prompts(6)[0]
    drawn = [tuple(c.tokens) for group in drawing.generate(ENGINE, [row, row], num_samples=3) for c in group]
    drawn += [tuple(c.tokens) for c in drawing.generate(ENGINE, [row], num_samples=3, key=4)[0]]
    assert len(set(drawn)) == 9


def test_parameters_are_those_of_the_call_and_calls_leave_nothing_behind():
    (engine, params), rows = drawing.sampler(), drawing.prompts(3, 5)
    first = drawing.generate((engine, params), rows)
    draw = torch.Generator().manual_seed(0)
    other = {n: p + torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in params.items()}
    moved = drawing.generate((engine, other), rows[:1], num_samples=3)
    again = drawing.generate((engine, params), rows)
    assert not drawing.same(moved[0][0], first[0][0])
    assert all(
        drawing.same(a, b)
        for left, right in zip(first, again, strict=True)
        for a, b in zip(left, right, strict=True)
    )
    assert all(p.is_meta for p in engine.model.module.parameters())


def test_any_of_several_end_ids_ends_a_completion_and_is_part_of_it():
    got = drawing.generate(
        drawing.chain({2: 3, 3: 9, 9: 5, 5: 5}), [np.array([2])], temperature=0.0, stop_ids=(7, 9)
    )[0]
    assert all(c.tokens.tolist() == [3, 9] and c.ended for c in got)


def test_without_an_end_a_completion_is_cut_off_at_max_tokens():
    got = drawing.generate(
        drawing.chain({2: 3, 3: 9, 9: 5, 5: 5}), [np.array([2])], temperature=0.0, stop_ids=(7,), max_tokens=4
    )[0]
    assert all(c.tokens.tolist() == [3, 9, 5, 5] and not c.ended for c in got)


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it():
    engine, params = drawing.chain({2: 3, 3: 9, 9: 5, 5: 5})
    reading = (attrs.evolve(engine, decode=lambda ids: "".join(chr(96 + i) for i in ids)), params)
    got = drawing.generate(reading, [np.array([2])], temperature=0.0, stop_strings=("zz", "ie"))[0]
    assert all(c.tokens.tolist() == [3, 9, 5] and c.ended for c in got)


def test_no_tokens_are_drawn_where_none_are_wanted():
    got = drawing.generate(ENGINE, drawing.prompts(3), max_tokens=0)[0]
    assert [(len(c.tokens), len(c.logprobs), len(c.kept), c.ended) for c in got] == [(0, 0, 0, False)] * 2


def test_a_completion_is_cut_off_at_what_the_model_holds():
    got = drawing.generate(drawing.sampler("gpt2"), drawing.prompts(60, 3), max_tokens=8)
    assert [[len(c.tokens) for c in group] for group in got] == [[4, 4], [8, 8]]


@pytest.mark.parametrize(
    ("row", "numbers", "message"),
    [
        (np.zeros(0, np.int64), {}, r"prompt 17 has no tokens; .* Drop the prompt"),
        (
            np.ones(64, np.int64),
            {},
            r"prompt 17 has 64 tokens; the model holds 64, .* Drop the prompt or cut it",
        ),
        (np.ones(3, np.int64), {"temperature": -1.0}, r"temperature is -1\.0; it must be 0 or more"),
        (np.ones(3, np.int64), {"temperature": float("nan")}, "temperature is nan"),
        (np.ones(3, np.int64), {"top_k": -1}, "top_k is -1"),
        (np.ones(3, np.int64), {"top_p": 0.0}, r"top_p is 0\.0; it must be more than 0 and at most 1"),
        (np.ones(3, np.int64), {"min_p": 1.5}, r"min_p is 1\.5"),
        (np.ones(3, np.int64), {"max_tokens": -1}, "max_tokens is -1"),
        (np.ones(3, np.int64), {"stop_strings": ("a", "")}, "a stop string is empty"),
        (np.ones(3, np.int64), {"stop_strings": ("a",)}, r"give the engine decode="),
    ],
)
def test_what_cannot_be_drawn_is_refused(row, numbers, message):
    with pytest.raises(ValueError, match=message):
        drawing.generate(ENGINE, [row], [17], **numbers)


def test_logits_that_are_not_finite_are_told():
    engine, params = drawing.sampler()
    broken = {n: torch.full_like(p, torch.nan) if "norm" in n else p for n, p in params.items()}
    with pytest.raises(
        ValueError, match=r"prompt 17: the model's logits are not finite after 0 drawn tokens"
    ):
        drawing.generate((engine, broken), drawing.prompts(3), [17])


def test_an_attention_that_does_not_know_its_layer_is_refused(monkeypatch):
    engine, params = drawing.sampler()
    for layer in engine.model.module.model.layers:
        monkeypatch.delattr(layer.self_attn, "layer_idx")
    with pytest.raises(ValueError, match="no layer_idx"):
        drawing.generate((engine, params), drawing.prompts(3))


def test_the_sampler_is_an_engine():
    assert isinstance(ENGINE[0], ports.Engine)
    assert ENGINE[0].model.module.config._attn_implementation == tree_attention.NAME
