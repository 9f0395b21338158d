"""Rounds of completions: which prompts when, what samples are made of them, and what a checkpoint keeps."""

import itertools
import json
import math

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters import pick, sampling
from core import algorithms, keys, optimizers, pack, ports, steps
from core.plan import sample
from shell import buffer, choose, config, feed, generate, prompts, rewards, rollout, rounds, sources, tiny

END = 258
ROWS = [{"prompt": f"{n} ", "answer": str(n)} for n in range(12)]


@attrs.frozen
class Parrot:
    """An engine that says what is written for each prompt and sample."""

    said: dict[int, list[str]]

    def generate(self, params, prompts, numbers, *, num_samples, sampling, key):
        return [[self.one(text) for text in self.said[n % len(self.said)][:num_samples]] for n in numbers]

    def one(self, text):
        tokens = np.array([*text.rstrip(".").encode(), *([] if text.endswith(".") else [END])], np.int64)
        numbers = np.full(len(tokens), -0.5, np.float32)
        return ports.Completion(
            tokens=tokens, logprobs=numbers, kept=np.ones_like(numbers), ended=not text.endswith(".")
        )


def kept(tmp_path, rows=ROWS):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    opened = prompts.look(sources.find(str(path)))
    return prompts.prepare(
        opened, prompts.rules(opened, tokenizer=tiny.tokenizer()), folder=tmp_path / "kept"
    )


def planned(rows, *, batch_size=8, num_generations=4, visits=(1, 1), seed=None):
    return rounds.Plan(
        prompts=rows, batch_size=batch_size, num_generations=num_generations, max_tokens=4, seed=seed,
        steps_per_generation=visits[0], num_iterations=visits[1],
    )  # fmt: skip


@pytest.fixture(scope="module")
def model():
    """The built-in model with its parameters, and how packs of it are made."""
    options = {
        "model": "tiny",
        "dataset": "task:letters",
        "output_dir": "x",
        "temperature": 0.6,
        "top_p": 0.75,
        "max_completion_length": 24,
    }
    chosen = config.from_values("grpo", options).options
    device = pick.device("cpu")
    made, params = choose.model(chosen, device)
    shape = choose.shape(chosen, choose.config(chosen), torch.float32)
    packing = {"budget": 4096, "share": True, "shape": shape, "dtype": torch.float32, "device": "cpu"}
    return generate.tempered(made, chosen), params, packing, chosen


def rolls(plan, model, engine, *, functions=("exact_answer",), algorithm=None, mask=False, **more):
    made, _, packing, chosen = model
    asking = generate.asking(made, tiny.tokenizer(), rewards.find(functions, limit=4), chosen, ports.ALONE)
    asking = asking if engine is None else attrs.evolve(asking, engine=engine)
    return rollout.Rollouts(
        plan, asking, model=made, algorithm=algorithm or algorithms.grpo, packing=packing,
        mask_truncated=mask, num_steps=10, **more,
    )  # fmt: skip


def state(model, place=(0, 0)):
    return steps.init(
        model[1], optimizers.adamw(rate=lambda done: 0.0), algorithms.grpo, key=keys.key(1), place=place
    )


def test_twelve_prompts_of_four_completions_are_six_steps_of_eight(tmp_path):
    plan = planned(kept(tmp_path))
    place = plan.start
    for _ in range(plan.steps_per_epoch):
        made, place = plan.take(place)
        assert len(made) == 8
    assert plan.steps_per_epoch == 6
    assert plan.epoch(place) == 1.0


@settings(max_examples=40, deadline=None)
@given(
    num=st.integers(1, 12), size=st.integers(1, 5), visits=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.none() | st.integers(0, 9),
)  # fmt: skip
def test_every_prompt_is_in_as_many_steps_of_an_epoch_as_there_are_iterations(
    tmp_path_factory, num, size, visits, seed
):
    rows = kept(tmp_path_factory.mktemp("rows"), ROWS[:num])
    plan = planned(rows, batch_size=2 * size, num_generations=2, visits=visits, seed=seed)
    for epoch in range(2):
        place, seen, numbers = (epoch * num, 0), [], set()
        for _ in range(plan.steps_per_epoch):
            now = plan.round(place)
            seen += now.rows[place[1] % now.num_slices * size :][:size]
            numbers |= set(range(now.start, now.start + len(now.rows)))
            place = plan.after(place)
        assert sorted(seen) == sorted(list(range(num)) * visits[1])
        assert numbers == set(range(epoch * num, (epoch + 1) * num))
        assert plan.epoch(place) == epoch + 1


def test_what_a_round_holds_survives_a_checkpoint_to_the_bit():
    generator = np.random.default_rng(0)
    parts = [
        [
            sample.Sample(
                tokens=generator.integers(0, 9, length), trained=np.arange(length) > 0,
                columns={"advantage": float(generator.normal()),
                         "old_logprobs": generator.normal(size=length).astype(np.float32)},
                group=int(length), unit=i,
            )
            for i, length in enumerate(lengths)
        ]
        for lengths in ([3, 1], [5], [2, 2, 4])
    ]  # fmt: skip
    tensors, values = buffer.split(parts)
    back = buffer.join(tensors, json.loads(json.dumps(values)))
    assert [len(part) for part in back] == [2, 1, 3]
    for one, other in zip(itertools.chain(*parts), itertools.chain(*back), strict=True):
        assert (one.group, one.unit, one.columns["advantage"]) == (
            other.group, other.unit, other.columns["advantage"]
        )  # fmt: skip
        for name in ("tokens", "trained"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert one.columns["old_logprobs"].tobytes() == other.columns["old_logprobs"].tobytes()
    assert buffer.join(*buffer.split([])) == []


def test_completions_become_samples_with_the_advantages_of_their_groups(tmp_path, model):
    said = {0: ["0", "x", "x", "0"], 1: ["1", "1", "1", "1"]}
    drawn = rolls(planned(kept(tmp_path)), model, Parrot(said)).draw(state(model))
    assert drawn.place == (2, 0)
    assert [one.group for one in drawn.samples] == [0] * 4 + [1] * 4
    found = [one.columns["advantage"] for one in drawn.samples]
    assert found == pytest.approx([0.5 / (math.sqrt(1 / 3) + 1e-4) * s for s in (1, -1, -1, 1)] + [0] * 4)
    first = drawn.samples[0]
    assert first.tokens.tolist() == [*b"0 0", END]
    assert first.trained.tolist() == [False, False, True, True]
    assert first.columns["sampled_logprobs"].tolist() == [0, 0, -0.5, -0.5]
    means = rollout.metrics.values(drawn.means)
    assert means["reward"] == 0.75
    assert means["rewards/exact_answer/mean"] == 0.75
    assert means["frac_reward_zero_std"] == 0.5
    assert means["reward_std"] == pytest.approx(math.sqrt(1 / 3) / 2)


def test_a_reward_sees_whole_groups_in_order_and_the_text_of_all_tokens(tmp_path, model):
    seen = {}

    def ranked(prompts, completions, completion_ids, answer, trainer_state):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer)
        seen["step"] = trainer_state.global_step
        return [float(i) for i in range(len(completions))]

    said = {0: ["é", "b", "c", "d"], 1: ["e", "f", "g", "h"]}
    rolls(planned(kept(tmp_path)), model, Parrot(said), functions=[ranked]).draw(state(model))
    assert seen["prompts"] == ["0 "] * 4 + ["1 "] * 4
    assert seen["completions"] == list("ébcdefgh")
    assert seen["answer"] == ["0"] * 4 + ["1"] * 4
    assert seen["ids"][0] == [*"é".encode(), END]
    assert seen["step"] == 0


def test_messages_are_answered_by_messages(tmp_path, model):
    rows = [{"prompt": [{"role": "user", "content": "0"}], "answer": "0"}]
    seen = []

    def function(completions, **columns):
        seen.extend(completions)
        return [0.0] * len(completions)

    plan = planned(kept(tmp_path, rows), batch_size=2, num_generations=2)
    rolls(plan, model, Parrot({0: ["0", "1"]}), functions=[function]).draw(state(model))
    assert seen == [[{"role": "assistant", "content": "0"}], [{"role": "assistant", "content": "1"}]]


def test_a_completion_that_is_cut_off_and_masked_leaves_the_loss_and_the_baseline_of_others(tmp_path, model):
    plan = planned(kept(tmp_path), batch_size=4)
    found = []
    for cut in ("x.", "000."):
        drawn = rolls(plan, model, Parrot({0: ["0", "x", "0", cut]}), mask=True).draw(state(model))
        found.append([one.columns["advantage"] for one in drawn.samples])
        assert len(drawn.samples) == 3
        assert rollout.metrics.values(drawn.means)["completions/masked"] == 1
        assert rollout.metrics.values(drawn.means)["completions/clipped_ratio"] == 0.25
    assert found[0] == found[1]
    assert len(rolls(plan, model, Parrot({0: ["0", "x", "0", "x."]})).draw(state(model)).samples) == 4


def test_where_all_is_cut_off_loss_and_gradient_are_exactly_0(tmp_path, model):
    made, params, packing, _ = model
    plan = planned(kept(tmp_path), batch_size=4)
    drawn = rolls(plan, model, Parrot({0: ["0.", "x.", "0.", "x."]}), mask=True).draw(state(model))
    assert not any(one.trained.any() for one in drawn.samples)
    packs = feed.packs(drawn.samples, algorithms.grpo, needs=(), **packing)
    value, _, grads = steps.loss_and_grad(made, algorithms.grpo, params, packs, 0)
    assert float(value) == 0
    assert all(not grad.any() for grad in grads.values())


def test_a_function_that_abstains_leaves_the_sum_and_its_own_mean(tmp_path, model):
    plan = planned(kept(tmp_path), batch_size=2, num_generations=2)
    functions = [lambda completions: [1.0, None], lambda completions: [None, 2.0]]
    drawn = rolls(plan, model, Parrot({0: ["a", "b"]}), functions=functions).draw(state(model))
    assert [row["reward"] for row in drawn.table] == [1.0, 2.0]
    means = rollout.metrics.values(drawn.means)
    assert means["rewards/<lambda>/mean"] == 1.0
    assert means["rewards/<lambda>_2/mean"] == 2.0
    assert all(np.isfinite(one.columns["advantage"]) for one in drawn.samples)


def test_a_prompt_that_no_function_scores_has_advantage_0(tmp_path, model):
    plan = planned(kept(tmp_path), batch_size=2, num_generations=2)
    drawn = rolls(plan, model, Parrot({0: ["a", "b"]}), functions=[lambda completions: [None, None]]).draw(
        state(model)
    )
    assert [one.columns["advantage"] for one in drawn.samples] == [0, 0]
    means = rollout.metrics.values(drawn.means)
    assert means["rewards/abstained"] == 2
    assert not {"reward", "reward_std", "nonfinite/reward", "nonfinite/reward_std"} & means.keys()


def test_several_steps_of_a_round_are_compared_with_the_policy_before_all_of_them(tmp_path, model):
    made, params, packing, _ = model
    plan = planned(kept(tmp_path), visits=(2, 2))
    rolling = rolls(plan, model, None)
    now = state(model)
    for count in range(4):
        drawn = rolling.draw(attrs.evolve(now, place=(0, count)))
        packs = feed.packs(drawn.samples, algorithms.grpo, needs=(), **packing)
        for each in packs:
            logprobs = made.predict(params, each, None).logprobs
            assert torch.equal(logprobs, each.batch.old_logprobs)
        assert bool(drawn.means) == (count == 0)
    assert drawn.place == (4, 0)
    assert rolling.split(drawn.place) == ({}, {"sizes": []})


def test_the_first_ratio_is_1_at_a_temperature_and_on_a_nucleus(tmp_path, model):
    made, params, packing, _ = model
    drawn = rolls(planned(kept(tmp_path), batch_size=24), model, None).draw(state(model))
    for each in feed.packs(drawn.samples, algorithms.grpo, needs=(), **packing):
        drift = made.predict(params, each, None).logprobs - each.batch.sampled_logprobs
        assert drift.abs().max() < 1e-4
        assert len(drift) > 20
    assert rollout.metrics.values(drawn.means)["sampling/kept_mass/min"] < 0.9


def test_draws_hang_on_the_place_of_a_prompt_alone(tmp_path, model):
    rows = kept(tmp_path)
    few = rolls(planned(rows, visits=(1, 1)), model, None)
    many = rolls(planned(rows, visits=(3, 1)), model, None)
    now, found = state(model), []
    for start in (0, 2, 4):
        found += few.draw(attrs.evolve(now, place=(start, 0))).samples
    others = [one for step in range(3) for one in many.draw(attrs.evolve(now, place=(0, step))).samples]
    for one, other in zip(found, others, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_the_divergence_from_the_reference_is_part_of_the_reward_of_rloo(tmp_path, model):
    made, params, _, _ = model
    reference = {name: p * 1.5 for name, p in params.items()}
    plan = planned(kept(tmp_path), batch_size=2, num_generations=2)
    rolling = rolls(plan, model, None, algorithm=algorithms.rloo)
    drawn = rolling.draw(state(model), reference)
    one, other = drawn.samples
    sums = []
    for each in drawn.samples:
        alone = pack.build([each], pack.count([each]))
        old, far = (made.predict(p, alone, None).logprobs.double().sum() for p in (params, reference))
        sums.append(float(old - far))
    totals = [row["reward"] - 0.05 * s for row, s in zip(drawn.table, sums, strict=True)]
    assert one.columns["advantage"] == pytest.approx(totals[0] - totals[1], abs=1e-5)
    assert other.columns["advantage"] == pytest.approx(totals[1] - totals[0], abs=1e-5)
    assert abs(sums[0]) > 0.01


def test_evaluation_draws_the_same_for_the_same_policy_wherever_it_stands(tmp_path, model):
    rows = kept(tmp_path)
    rolling = rolls(planned(rows), model, None, functions=["length"])
    first = rolling.evaluate(state(model), rows, None)
    again = rolling.evaluate(attrs.evolve(state(model, (4, 0)), step=7), rows, None)
    assert first == again
    assert {"eval_reward", "eval_rewards/length/mean", "eval_completions/mean_length"} <= first.keys()


class Counting:
    """A compiler's front that counts graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@attrs.frozen
class Brief:
    """An engine whose completions end at many tokens, so that they are of many lengths."""

    engine: sampling.Sampler

    def generate(self, params, prompts, numbers, *, sampling, **more):
        often = attrs.evolve(sampling, stop_ids=tuple(range(40)))
        return self.engine.generate(params, prompts, numbers, sampling=often, **more)


@pytest.mark.plain
def test_rollouts_of_every_prompt_and_completion_compile_two_graphs(tmp_path, model):
    rows = kept(tmp_path, [{"prompt": "ab " * n, "answer": "a"} for n in (1, 4, 2, 9, 3, 7, 5, 6)])
    plan, counting = planned(rows, num_generations=4, visits=(2, 1)), Counting()
    device = attrs.evolve(
        pick.device("cpu"),
        compile={"backend": counting, "dynamic": False},
        generation={"static": True, "chunk": 8, "on_host": True},
    )
    chosen = attrs.evolve(model[3], compile=True, num_generations=4, max_completion_length=12)
    fixed = generate.static(chosen, device, ports.ALONE, plan, rows)
    assert (fixed.rows, fixed.length) == (16, 9 * 3 + 12)
    drawing, plain = (
        rolls(plan, (*model[:3], chosen), Brief(sampling.Sampler(model[0], static=static)))
        for static in (fixed, None)
    )
    now, lengths = state(model), set()
    for _ in range(plan.steps_per_epoch):
        got, want = drawing.draw(now), plain.draw(now)
        for a, b in zip(got.samples, want.samples, strict=True):
            assert np.array_equal(a.tokens, b.tokens)
            lengths.add(int(a.trained.sum()))
        now = attrs.evolve(now, place=got.place)
    drawing.evaluate(now, rows, None)
    assert len(lengths) > 4
    assert counting.graphs == 2


def test_shapes_are_fixed_where_that_is_asked_for_or_the_device_needs_it(tmp_path, model):
    rows = kept(tmp_path)
    plan, device = planned(rows, batch_size=4096), pick.device("cpu")
    needs = attrs.evolve(device, generation={"static": True, "chunk": 64, "on_host": True})

    def shapes(where, asked, ranks=ports.ALONE):
        return generate.static(attrs.evolve(model[3], cache_implementation=asked), where, ranks, plan, None)

    assert [shapes(device, asked) is None for asked in (None, "dynamic", "static")] == [True, True, False]
    assert [shapes(needs, asked) is None for asked in (None, "dynamic", "static")] == [False, True, False]
    assert shapes(needs, None).chunk == 64
    assert shapes(needs, None).on_host
    assert shapes(needs, None).compiled is None
    assert shapes(needs, None).rows == generate.MOST_ROWS
    shared = attrs.evolve(ports.ALONE, num=2048)
    assert shapes(needs, None, shared).rows == plan.num_generations
