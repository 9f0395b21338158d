"""What is logged: the learning rate of each update, norms before clipping, NaN, what means are over."""

import itertools
import math

import pytest
import torch

from core import algorithms, pack, ports
from core.plan import cost, sample
from shell import api, choose, log, measure, meter, options
from tests.shell import runs

DEMO = {
    "model": "tiny", "dataset": "demo", "dataset_split": "train[:24]", "max_length": 64, "batch_size": 6,
    "logging_steps": 1,
}  # fmt: skip


def test_the_learning_rate_is_that_of_each_update_whatever_the_packs(tmp_path):
    folder = runs.made(tmp_path / "out", max_steps=10, learning_rate=1, token_budget=130, max_grad_norm=1e-9)
    rates = [line["learning_rate"] for line in runs.metrics(folder)]
    assert rates == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_a_window_logs_the_learning_rate_of_its_last_update(tmp_path):
    folder = runs.made(tmp_path / "out", max_steps=4, learning_rate=1e-3, logging_steps=2)
    lines = runs.metrics(folder)
    assert [(line["step"], round(line["learning_rate"] * 1e3, 9)) for line in lines] == [
        (1, 1.0), (2, 0.75), (4, 0.25),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "more", "factors"),
    [
        ("constant", {}, [1, 1, 1, 1]),
        ("constant_with_warmup", {"warmup_steps": 2}, [0, 0.5, 1, 1]),
        ("linear", {"warmup_ratio": 0.5}, [0, 0.5, 1, 0.5]),
        ("cosine", {}, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        ("cosine_with_min_lr", {"lr_scheduler_kwargs": {"min_lr_rate": 0.5}}, [1, None, 0.75, None]),
        ("cosine_with_min_lr", {"lr_scheduler_kwargs": {"min_lr": 0.5}}, [1, None, 0.625, None]),
    ],
)
def test_each_schedule_gives_its_learning_rates(kind, more, factors):
    chosen = options.Options(lr_scheduler_type=kind, learning_rate=2.0, **more)
    rate = choose.optimizer(chosen, 4).rate
    for done, factor in enumerate(factors):
        assert factor is None or rate(done) == pytest.approx(2 * factor)


def test_the_gradient_norm_is_of_the_whole_step_and_before_clipping(tmp_path):
    def norm(name, **changed):
        return runs.metrics(runs.made(tmp_path / name, max_steps=1, **changed))[0]["grad_norm"]

    whole = norm("whole")
    assert whole > 1
    assert norm("packs", token_budget=130) == pytest.approx(whole, rel=1e-5)
    assert norm("clipped", max_grad_norm=0.01) == whole


def test_clipping_is_by_the_norm_that_is_logged(tmp_path):
    free = {"max_grad_norm": 0, "adam_epsilon": 1e3, "learning_rate": 1e3, "max_steps": 1}
    start = runs.weights(runs.made(tmp_path / "start", max_steps=1, learning_rate=0))
    moves = {}
    for name, limit in (("free", 0), ("clipped", 0.5)):
        after = runs.weights(runs.made(tmp_path / name, **{**free, "max_grad_norm": limit}))
        moves[name] = torch.sqrt(sum(((after[n] - start[n]) ** 2).sum() for n in start))
    norm = runs.metrics(tmp_path / "free")[0]["grad_norm"]
    # Under so large an epsilon AdamW moves in proportion to the gradient.
    assert float(moves["clipped"] / moves["free"]) == pytest.approx(0.5 / norm, rel=1e-3)


def test_a_step_of_nan_is_shown_and_no_clean_number_stands_in_for_it(tmp_path):
    calls = []

    def poisoned(scores, batch):
        calls.append(None)
        values = -scores.logprobs
        return (values * math.nan if len(calls) == 3 else values), {"watched": values}

    mine = algorithms.sft.evolve(loss=poisoned)
    folder = api.train(mine, **DEMO, max_steps=5, output_dir=str(tmp_path / "out"))
    lines = log.read(folder / "metrics.jsonl")
    assert [math.isnan(line["loss"]) for line in lines[:3]] == [False, False, True]
    assert [line.get("nonfinite/grad_norm") for line in lines[:3]] == [None, None, 1]


def test_a_nan_inside_of_a_window_shows_in_its_mean(tmp_path):
    calls = []

    def poisoned(scores, batch):
        calls.append(None)
        return -scores.logprobs + (math.nan if len(calls) == 3 else 0.0) * scores.logprobs.detach(), {}

    mine = algorithms.sft.evolve(loss=poisoned)
    folder = api.train(mine, **{**DEMO, "logging_steps": 5}, max_steps=5, output_dir=str(tmp_path / "out"))
    first, last = log.read(folder / "metrics.jsonl")
    assert (first["step"], last["step"]) == (1, 5)
    assert math.isfinite(first["loss"])
    assert math.isnan(last["loss"])


def test_a_window_is_weighted_by_tokens(tmp_path):
    def told(name, **changed):
        plan = {"max_steps": 4, "learning_rate": 0, "shuffle_dataset": False}
        return runs.metrics(runs.made(tmp_path / name, **{**plan, **changed}))

    each, window = told("each"), told("window", logging_steps=4)
    tokens = [0, *(line["num_tokens"] for line in each)]
    # Of the six rows of a step, the first tokens have no prediction.
    trained = [now - before - 6 for before, now in itertools.pairwise(tokens)]
    mean = sum(e["loss"] * n for e, n in zip(each[1:], trained[1:], strict=True)) / sum(trained[1:])
    plain = sum(e["loss"] for e in each[1:]) / 3
    assert window[-1]["loss"] == pytest.approx(mean, rel=1e-6)
    assert window[-1]["loss"] != pytest.approx(plain, rel=1e-6)


class Given:
    """A model whose entropy and log-probability at a prediction follow from the token before it alone."""

    def predict(self, params, each, key):
        before = each.tokens.index_select(0, each.edge_nodes).index_select(0, each.term_edges)
        entropies = torch.tensor([0.0, 5.0, 2.0, 1.0, 3.0]).index_select(0, before)
        return pack.Scores(logprobs=-entropies, entropies=entropies, top1=torch.ones_like(entropies))

    def pull_back(self, params, each, key, loss):
        value, means = loss(self.predict(params, each, key))
        return value, means, {}


def test_entropy_is_over_the_predictions_that_are_trained():
    class Rows:
        def __len__(self):
            return 1

        def samples(self, row):
            tokens, trained = torch.tensor([1, 2, 3, 4]).numpy(), torch.tensor([0, 0, 1, 1]).bool().numpy()
            return [sample.Sample(tokens=tokens, trained=trained)]

    shape = cost.ModelShape(
        layers=1, hidden=4, heads=1, kv_heads=1, head_dim=4, intermediate=4, vocab=5, parameters=9
    )
    packing = {"budget": 100, "share": True, "shape": shape, "dtype": torch.float32, "device": "cpu"}
    found = measure.measure(Given(), algorithms.sft, {}, Rows(), packing=packing, batch_size=1)
    assert found["eval_entropy"] == 1.5
    assert found["eval_loss"] == 1.5


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_was_measured_goes_on_after_a_stop_with_as_many_ranks_or_others(ranks):
    def on(index, num, others=()):
        def merge(means):
            return {**means, **{name: value for other in others for name, value in other.items()}}

        return ports.Ranks(index=index, num=num, sum=lambda tree: tree, merge=merge)

    kept = []
    for index in range(2):
        gauge = meter.Meter(on(index, 2, kept))
        for tally in (gauge.total, gauge.window):
            tally.add(meter.Tally(seconds=1.5, rows=100, nodes=10 + index, flops=4, room=20, steps=2))
        told = gauge.split()
        kept.append({name: meter.metrics.Sum(total=value) for name, value in told["tallies"].items()})
    joined = []
    for index in range(ranks):
        gauge = meter.Meter(on(index, ranks))
        gauge.join(told)
        joined.append(gauge.total)
    assert sum(tally.nodes for tally in joined) == 21
    assert all((tally.rows, tally.steps, tally.seconds) == (100, 2, 1.5) for tally in joined)
