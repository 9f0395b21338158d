"""On a device that compiles every new shape, training keeps to the shapes that were planned."""

import functools
import json
import os
import re

import pytest
import torch

from core import algorithms, check, pack, padded, steps
from core.plan import sizes
from tests import paths
from tests.benchmarks import graphs
from tests.devices import emulated

PLANNED = sizes.Sizes(nodes=(32, 64), edges=(32, 64))
SMALL = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _model(device, *, compiled):
    import attrs
    import transformers

    from adapters import compiling, loading, tree_attention

    torch.manual_seed(0)
    described = transformers.LlamaConfig(**SMALL, initializer_range=0.3)
    module = transformers.AutoModelForCausalLM.from_config(
        described, dtype=torch.float32, attn_implementation=tree_attention.NAME
    )
    model, params = loading.bind(module, device=device, attention="mask")
    if compiled:
        decoder = compiling.Decoder(model.decode, backend="neuron", static=True, limit=len(PLANNED.nodes))
        model = attrs.evolve(model, compiled=decoder)
    return model, params


def _step(device, name, seed, *, compiled=False):
    """One step's loss and gradients, the reference being the model at another temperature."""
    algorithm = getattr(algorithms, name)
    samples = check.draw(algorithm, seed)
    counts = pack.count(samples)
    model, params = _MODELS(device, compiled)
    if device == "cpu":
        packs = [pack.build(samples, counts, needs=algorithm.reads)]
    else:
        packs = [
            padded.build(samples, counts, planned=PLANNED, budget=64, needs=algorithm.reads, device=device)
        ]
    packs = steps.with_reference(model, algorithm, params, packs)
    value, _, grads = steps.loss_and_grad(model, algorithm, params, packs, 0)
    return value.item(), {n: g.cpu() for n, g in grads.items()}


_MODELS = functools.cache(lambda device, compiled: _model(device, compiled=compiled))


def _apart(names):
    """Return how far each step on the device is from the CPU's, eager and compiled, and what was compiled."""
    told = {}
    for name in names:
        value, grads = _step("cpu", name, 0)
        scale = max(g.norm().item() for g in grads.values())
        for compiled in (False, True):
            other, found = _step("neuron", name, 0, compiled=compiled)
            gaps = [(found[n] - g).norm().item() / scale for n, g in grads.items()]
            told[f"{name} {compiled}"] = (abs(value - other), max(gaps))
    counts = _MODELS("neuron", True)[0].compiled.counts
    counted = emulated.counts()
    return told, [counts.forward, counts.backward], [counted["forward"], counted["backward"]]


def test_steps_on_the_device_are_those_of_the_cpu_and_compilers_are_counted_as_it_counts():
    told, ours, its = emulated.run(_apart, ["sft", "dpo", "kto", "grpo"])
    assert len(told) == 8
    for name, (loss, gradient) in told.items():
        assert loss <= 1e-6, name
        assert gradient <= 1e-5, name
    assert ours == its
    assert ours[0] == ours[1] <= len(PLANNED.nodes)


def _signatures(seeds):
    """New eager signatures of each step, forward graphs not being used."""
    new = []
    for seed in seeds:
        before = len(emulated.counts()["signatures"])
        _step("neuron", "sft", seed)
        new.append(len(emulated.counts()["signatures"]) - before)
    # A number of the host that is an argument is told as one on the CPU.
    wide = [name for name in emulated.counts()["signatures"] if re.search(r"Double\[[^]]*\](?!cpu)", name)]
    return new, wide


def test_a_step_brings_no_new_signature_after_the_first_of_its_size():
    new, wide = emulated.run(_signatures, [0, 1, 2, 3])
    assert new[0] > 0
    assert new[1:] == [0, 0, 0]
    assert wide == []


def _train(words, seconds):
    """Train, a size being thought to take so many seconds to compile; return what the device counted."""
    from shell import choose, forecast, train

    choose.tiny_config = graphs.small(choose.tiny_config)  # graphs hang on shapes alone
    forecast.PRICES = {**forecast.PRICES, "neuron": (forecast.PRICES["neuron"][0], seconds)}
    assert train.main(words) == 0
    return emulated.counts()


SHORT = (
    *("--dataset", "demo", "--eval_dataset", "demo", "--eval_split", "test[:3]", "--batch_size", "2"),
    *("--max_length", "64", "--token_budget", "128", "--pad_to_multiple_of", "16"),
)


def real():
    """Return the words of a run over real rows of many lengths."""
    rows = str(paths.shared("data", "gsm8k", "train_2000.jsonl"))
    return (
        *("--dataset", rows, "--eval_dataset", rows, "--eval_split", "train[:6]", "--batch_size", "2"),
        *("--dataset_split", "train[:400]", "--max_length", "512", "--token_budget", "1024"),
        *("--pad_to_multiple_of", "128"),
    )


def trained(folder, num_steps, words):
    """Train on the device; return run.json and what the device counted."""
    asked = [
        *("sft", "--device", "neuron", "--model", "tiny", "--dtype", "float32", "--compile", *words),
        *("--eval_strategy", "steps", "--eval_steps", str(num_steps), "--max_shapes", "3"),
        *("--max_steps", str(num_steps), "--output_dir", str(folder)),
    ]
    counts = emulated.run(_train, asked, 1e-9)
    return json.loads((folder / "run.json").read_text()), counts


LONG = pytest.mark.skipif(
    not os.environ.get("ESPALIER_LONG_TESTS"), reason="takes minutes: set ESPALIER_LONG_TESTS"
)


@pytest.mark.parametrize("num_steps", [12, pytest.param(200, marks=LONG)])
def test_a_run_compiles_two_graphs_for_each_planned_size_and_evaluation_none(tmp_path, num_steps):
    facts, counts = trained(tmp_path / "out", num_steps, SHORT if num_steps == 12 else real())
    planned = len(facts["sizes_planned"])
    assert planned == 3
    assert (counts["forward"], counts["backward"]) == (planned, planned)
    assert facts["graphs"] == {"forward": planned, "backward": planned, "most": planned, "drawing": 0}
    assert facts["fallbacks"] == 0
