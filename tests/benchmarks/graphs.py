"""Graphs of whole training runs on the emulated NeuronCore: `python -m tests.benchmarks.graphs`.

Twenty steps of four rows of GSM8K under SmolLM2's tokenizer, through the command line with `--compile`, by
three policies: our plan, every multiple of 128 that comes, and every length that comes. What is told is what
the emulated compiler was called for, and must be what run.json says. The model is one layer of a Llama:
graphs hang on shapes alone. Pairs are an answer against that of the next row; completions have at most 48
tokens.
"""

import argparse
import itertools
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from tests import paths
from tests.benchmarks import timing, trainium
from tests.devices import emulated

STEPS, ROWS = 20, 400
ALGORITHMS = ("sft", "dpo", "grpo")
FREE = 1e-6
"""Seconds that a size is thought to take to compile where each that comes is to have its own."""
POSITION = trainium.SECONDS_PER_POSITION / trainium.ROWS
"""Seconds that a token of a forward is thought to take: of the model that the prices are calibrated on."""
POLICIES = {
    "plan": ("auto", trainium.SECONDS_PER_SIZE),
    "128": ("128", FREE),
    "unpadded": ("1", FREE),
}
"""What sizes are multiples of, and the seconds that one is thought to take to compile."""
GROWTH = 1.001
"""Of a ladder for lengths that nobody knows: every multiple is on it."""


def main() -> None:
    """Count, print, and write where asked."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--json", help="file for the figures")
    words.add_argument("--only", choices=ALGORITHMS, nargs="*", default=ALGORITHMS)
    words.add_argument("--policy", choices=POLICIES, nargs="*", default=list(POLICIES))
    given = words.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for algorithm in given.only:
            rows = pathlib.Path(folder) / f"{algorithm}.jsonl"
            rows.write_text("".join(json.dumps(row) + "\n" for row in made(algorithm)))
            found += emulated.run(counted, algorithm, str(rows), given.policy)
    timing.report(found, given.json)


def made(algorithm: str) -> Iterator[dict[str, Any]]:
    """Give the rows that an algorithm trains on."""
    lines = paths.SHARED.joinpath("data", "gsm8k", "train_2000.jsonl").read_text().splitlines()[: ROWS + 1]
    talks = [json.loads(line)["messages"] for line in lines]
    for now, other in itertools.pairwise(talks):
        prompt = now[:-1]
        yield {
            "sft": {"messages": now},
            "dpo": {"prompt": prompt, "chosen": now[-1:], "rejected": other[-1:]},
            "grpo": {"prompt": prompt},
        }[algorithm]


def counted(algorithm: str, rows: str, policies: list[str]) -> list[dict[str, Any]]:
    """Train under some policies, in a process that has the device; return what was compiled."""
    # Here, and not above: what sets the policies apart is set in this process alone.
    from shell import choose, forecast

    choose.tiny_config, growth, found = small(choose.tiny_config), forecast.GROWTH, []
    forecast._flops = lambda _, nodes: POSITION * nodes
    for policy in policies:
        multiple, seconds = POLICIES[policy]
        forecast.PRICES = {**forecast.PRICES, "neuron": (1.0, seconds)}
        forecast.GROWTH = growth if policy == "plan" else GROWTH
        found.append({"algorithm": algorithm, "policy": policy, **trained(algorithm, rows, multiple)})
    return found


def trained(algorithm: str, rows: str, multiple: str) -> dict[str, Any]:
    """Train once; return the graphs that the emulated device made, which run.json must tell."""
    import torch

    from shell import train

    torch._dynamo.reset()
    emulated.forget()
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *(algorithm, "--device", "neuron", "--model", "tiny", "--dtype", "float32", "--compile"),
            *("--tokenizer", str(paths.SHARED / "models" / "smollm2-135m-instruct-tokenizer")),
            *("--dataset", rows, "--output_dir", folder, "--max_steps", str(STEPS), "--batch_size", "4"),
            *("--token_budget", "2048", "--max_length", "1024", "--pad_to_multiple_of", multiple),
        ]
        drawn = ("--num_generations", "2", "--max_completion_length", "48", "--reward_funcs", "length")
        assert train.main([*words, *(drawn if algorithm == "grpo" else ())]) == 0
        facts = json.loads((pathlib.Path(folder) / "run.json").read_text())
        lines = (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()
    graphs, seen = facts["graphs"], emulated.counts()
    assert (graphs["forward"] + graphs["drawing"], graphs["backward"]) == (seen["forward"], seen["backward"])
    shares = [line["batch/pad_frac"] for line in map(json.loads, lines) if "batch/pad_frac" in line]
    return {
        "forward": graphs["forward"],
        "backward": graphs["backward"],
        "drawing": graphs["drawing"],
        "padded": round(sum(shares) / len(shares), 3),
    }


def small(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes a config of one layer in the place of the built-in model's.

    Args:
        whole: `choose.tiny_config`.
    """

    def config(chosen: Any) -> Any:
        made = whole(chosen)
        made.num_hidden_layers, made.hidden_size, made.intermediate_size = 1, 32, 64
        made.layer_types = made.layer_types[:1] if getattr(made, "layer_types", None) else None
        made.num_attention_heads, made.num_key_value_heads, made.head_dim = 2, 1, 16
        return made

    return config


if __name__ == "__main__":
    main()
