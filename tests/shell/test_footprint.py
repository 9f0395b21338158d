"""What a run says of its memory before and after: promised, reached, and on the terminal."""

import json
import threading
from concurrent import futures

import attrs
import pytest
import torch

from adapters import cpu, lora, sampling
from core import metrics, ports
from core.plan import cost, memory
from shell import config, footprint, mistake
from tests.shell import runs

SHAPE = cost.ModelShape(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=200, vocab=512, parameters=10**6
)
STEPS = {"max_steps": 2, "logging_steps": 1, "memory_report": True}
WAYS = {
    "plain": {"token_budget": 2000},
    "layers again": {"gradient_checkpointing": True, "token_budget": 2000},
    "several packs": {"batch_size": 16, "token_budget": 400, "gradient_checkpointing": True},
    "bfloat16": {"dtype": "bfloat16", "token_budget": 2000},
    "an adapter": {"use_peft": True, "token_budget": 2000},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of each way, with what run.json tells of its memory."""
    root = tmp_path_factory.mktemp("runs")
    return {name: runs.facts(runs.made(root / name, **STEPS, **way)) for name, way in WAYS.items()}


@pytest.mark.parametrize("name", WAYS)
def test_a_run_reaches_what_it_promised(made, name):
    told = made[name]["memory"]
    promised, reached = told["promised"], told["reached"]
    assert promised["peak_bytes"] == made[name]["promised"]["peak_memory_bytes"]
    assert promised["peak_bytes"] == pytest.approx(reached["peak_bytes"], rel=0.15)
    assert "counted" in reached["how"]
    assert sum(reached["parts"].values()) == reached["peak_bytes"]


@pytest.mark.parametrize("name", WAYS)
def test_what_is_there_between_steps_is_promised_exactly_but_for_counters(made, name):
    told = made[name]["memory"]
    parts = told["promised"]["moments"]["update"]
    for part in memory.STATE:
        assert parts[part] == pytest.approx(told["reached"]["parts"][part], rel=1e-3), part


def test_the_table_tells_the_numbers_of_run_json(made):
    told = made["plain"]["memory"]
    moments, reached = told["promised"]["moments"], told["reached"]
    lines = footprint.table(moments, 0, reached).splitlines()
    cells = {line[:20].strip(): line[20:].split() for line in lines}
    assert cells["memory, MiB"] == [
        "head",
        "last",
        "layer",
        "first",
        "layer",
        "embedding",
        "update",
        "reached",
    ]
    assert [float(cell) for cell in cells["weights"]] == [
        round(number / 2**20, 2)
        for number in [*(m["weights"] for m in moments.values()), reached["parts"]["weights"]]
    ]
    assert float(cells["sum"][-1]) == round(reached["peak_bytes"] / 2**20, 2)
    assert "float32 masters" not in cells
    assert lines[-1].endswith(f"MiB reached, {reached['how']}")


def test_a_dry_run_prints_what_the_run_promises(made, tmp_path, capsys):
    assert runs.run(tmp_path / "out", **STEPS, **WAYS["plain"], dry_run=True) == 0
    told = made["plain"]["memory"]["promised"]
    assert footprint.table(told["moments"], told["host_bytes"]) in capsys.readouterr().out


def test_a_run_that_was_not_asked_says_nothing_and_counts_nothing(tmp_path, capsys):
    facts = runs.facts(runs.made(tmp_path / "out", max_steps=1))
    assert "memory" not in facts
    assert "promised, at the moment" not in capsys.readouterr().err


def levers(*words, device=cpu.DEVICE, beside=(), adapter=None, algorithm="sft"):
    command = config.parse([algorithm, "--model", "tiny", "--dataset", "demo", *words])
    return footprint.levers(command.options, device, beside, adapter)


def test_on_a_cpu_offloading_says_that_it_does_nothing(tmp_path, capsys):
    assert runs.run(tmp_path / "out", dry_run=True, max_steps=1, activation_offloading=True) == 0
    assert "activation_offloading does nothing on a CPU" in capsys.readouterr().err


def test_activations_leave_only_a_device_that_has_another_memory_than_the_host():
    elsewhere = attrs.evolve(cpu.DEVICE, name="cuda", type="cuda")
    assert not levers("--activation_offloading").offloaded
    assert levers("--activation_offloading", device=elsewhere).offloaded
    assert not levers(device=elsewhere).offloaded


def test_weights_are_packed_where_enough_is_drawn_in_float32_on_a_cpu():
    def packed(*words, device=cpu.DEVICE, steps="24"):
        return levers("--max_completion_length", steps, *words, algorithm="grpo", device=device).packed

    assert packed() == sampling.PACKING_BYTES
    assert packed("--bf16") == packed("--dtype", "float64") == 0
    assert packed(steps="23") == levers().packed == 0
    assert packed(device=attrs.evolve(cpu.DEVICE, type="cuda")) == 0


def test_options_move_the_levers_that_they_are(monkeypatch):
    found = levers("--gradient_checkpointing", "selective", "--chunk_size_feed_forward", "7")
    assert (found.checkpointing, found.chunk, found.clipped) == ("selective", 7, True)
    flexible = attrs.evolve(cpu.DEVICE, attention=("flex", "blocks", "mask"))
    assert levers("--gradient_checkpointing", "selective", device=flexible).checkpointing is True
    assert not levers(device=flexible).checkpointing
    assert not levers("--max_grad_norm", "0").clipped
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert levers().summed
    assert (levers("--fsdp").summed, levers("--fsdp").num_shards) == (False, 2)
    found = levers(adapter=lora.Trained(num=70, head_columns=3))
    assert (found.adapter, found.head_columns) == (70, 3)
    assert (levers().adapter, levers().head_columns) == (None, 0)


def test_frozen_models_that_are_held_leave_less_for_a_forward():
    device = attrs.evolve(cpu.DEVICE, memory=lambda: 100 << 20)
    chosen = config.parse(["dpo", "--model", "tiny", "--dataset", "demo"]).options
    alone, beside = (
        footprint.budget(SHAPE, chosen, device, levers(beside=models), ports.ALONE)
        for models in ((), (SHAPE, None))
    )
    assert beside < alone
    with pytest.raises(mistake.Mistake, match="GiB to train"):
        footprint.budget(SHAPE, chosen, attrs.evolve(device, memory=lambda: 1 << 20), levers(), ports.ALONE)


def budgets(*rooms):
    """The budget, or the mistake, of each of several ranks whose devices have so many bytes."""
    gate, sent = threading.Barrier(len(rooms), timeout=20), [{}] * len(rooms)
    chosen = config.parse(["sft", "--model", "tiny", "--dataset", "demo"]).options

    def one(index):
        def merge(found):
            sent[index] = found
            gate.wait()
            return metrics.merge(*sent)

        ranks = attrs.evolve(ports.ALONE, index=index, num=len(rooms), merge=merge)
        device = attrs.evolve(cpu.DEVICE, memory=lambda: rooms[index])
        try:
            return footprint.budget(SHAPE, chosen, device, levers(), ranks)
        except mistake.Mistake as problem:
            return str(problem)

    with futures.ThreadPoolExecutor(len(rooms)) as pool:
        return list(pool.map(one, range(len(rooms))))


def test_all_ranks_plan_with_the_least_of_what_fits_each():
    (more,), (less,) = budgets(100 << 20), budgets(60 << 20)
    assert less < more
    assert budgets(100 << 20, 60 << 20) == [less, less]
    assert budgets(60 << 20, 100 << 20, 80 << 20) == [less] * 3
    assert budgets(None, 60 << 20) == [less, less]
    assert budgets(None) == budgets(1 << 40, None)[:1] == [footprint.FALLBACK_BUDGET]


def test_a_rank_on_which_nothing_fits_stops_all():
    first, second = budgets(1 << 20, 100 << 20)
    assert "cpu has 0.0 GiB" in first
    assert "another rank has less" in second


def test_graphs_are_not_looked_into():
    watch = footprint.Watch(cpu.DEVICE, compiled=True)
    with watch.counting():
        torch.ones(10)
    assert "resident" in watch.facts()["how"]
    assert watch.facts()["peak_bytes"] == footprint.resident()
    assert json.dumps(watch.facts())
