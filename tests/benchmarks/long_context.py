"""How time and memory of a step grow with the context: `python -m tests.benchmarks.long_context`.

A small Llama (2 layers, width 128, one head) on one sequence of each length, and on a tree of the
same number of nodes (half of them a shared beginning, the rest eight branches). Layers are recomputed and
feed-forward parts run in chunks, each setting in a process of its own; memory is what a forward and backward
take beyond the model: bytes of live tensors, and resident bytes, which an allocator and the system add to and
take from. The slope, of both is that of a line through the points, in bytes a token. Only with both levers
are the lengths above `--most` run. `--json FILE` writes what is printed.
"""

import argparse
import multiprocessing
import time
from typing import Any

import numpy as np
import torch
import transformers

from adapters import live, loading, tree_attention
from core import algorithms, pack, steps
from core.plan import sample
from tests.benchmarks import timing

LENGTHS = (8192, 16384, 32768, 65536, 131072)
BRANCHES = 8
VOCAB = 512
LEVERS = {
    "plain": {},
    "layers recomputed": {"gradient_checkpointing": True},
    "and feed-forward in chunks": {"gradient_checkpointing": True, "feed_forward_chunk": 2048},
}


def model(modes: dict[str, Any]) -> Any:
    """Return the model and its parameters."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=max(LENGTHS),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=tree_attention.NAME)
    return loading.bind(made, **modes)


def samples(kind: str, length: int) -> list[sample.Sample]:
    """Return one sequence of a length, or a tree of as many nodes."""
    draw = np.random.default_rng(0).integers(0, VOCAB, length)
    trunk = draw[: length // 2] if kind == "tree" else draw[:0]
    branches = np.split(draw[len(trunk) :], BRANCHES if kind == "tree" else 1)
    rows = [np.concatenate([trunk, branch]) for branch in branches]
    return [sample.Sample(tokens=row, trained=np.arange(len(row)) >= max(1, len(trunk))) for row in rows]


def measure(kind: str, length: int, modes: dict[str, Any]) -> dict[str, float]:
    """Return seconds and peak bytes of one forward and backward, in this process."""
    bound, params = model(modes)
    rows = samples(kind, length)
    packs = [pack.build(rows, pack.count(rows))]
    short = samples("sequence", 64)
    steps.loss_and_grad(bound, algorithms.sft, params, [pack.build(short, pack.count(short))], 0)
    found: dict[str, float] = {"nodes": len(packs[0].tokens)}

    def step() -> None:
        start = time.perf_counter()
        found["peak_bytes"] = live.peak_bytes(
            lambda: steps.loss_and_grad(bound, algorithms.sft, params, packs, 0), params.values()
        )
        found["seconds"] = time.perf_counter() - start

    return found | {"resident_bytes": timing.peak_bytes(step)}


def apart(kind: str, length: int, modes: dict[str, Any]) -> dict[str, float]:
    """Measure in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (kind, length, modes))


def main() -> None:
    """Measure every kind, lever and length, and print slopes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--most", type=int, default=32768)
    parser.add_argument("--json")
    asked = parser.parse_args()
    found: list[dict[str, Any]] = []
    for kind in ("sequence", "tree"):
        for lever, modes in LEVERS.items():
            lengths = [n for n in asked.lengths if n <= asked.most or len(modes) == 2]
            points = [apart(kind, length, modes) for length in lengths]
            line = {"kind": kind, "lever": lever}
            for name in ("peak_bytes", "resident_bytes"):
                slope, _ = np.polyfit([p["nodes"] for p in points], [p[name] for p in points], 1)
                line[f"{name}_a_token"] = round(slope)
            found.append(line | {"points": points})
    timing.report({"machine": timing.machine(), "runs": found}, asked.json)


if __name__ == "__main__":
    main()
