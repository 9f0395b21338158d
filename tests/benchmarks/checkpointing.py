"""What is made again in backward: `python -m tests.benchmarks.checkpointing [--json FILE] [--tokens N]`.

Time of a forward and backward of SmolLM2-135M's shape (12 of its 30 layers) over a prompt with eight answers,
by turns, and the most bytes that are alive beside the parameters: nothing made again, everything, and
everything but what attention gave; beside what the cost model says.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from adapters import cpu, live, loading, shapes, tree_attention
from core import pack
from core.plan import cost, memory, sample
from tests.benchmarks import attention, timing

MODES = (False, "selective", True)


def config() -> transformers.LlamaConfig:
    """Return the shape; the vocabulary is small, so that layers are what is seen."""
    return transformers.LlamaConfig(
        vocab_size=1024, hidden_size=576, intermediate_size=1536, num_hidden_layers=12,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
        max_position_embeddings=8192,
    )  # fmt: skip


def step(mode: bool | str, tokens: int) -> tuple[Callable[[], Any], dict[str, Tensor]]:
    """Return a forward and backward over so many nodes, and its parameters."""
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config(), attn_implementation=tree_attention.NAME)
    model, params = loading.bind(module, gradient_checkpointing=mode, price=cpu.DEVICE.price)
    rows = [row % 1024 for row in attention.fan(tokens // 2, 8, tokens // 16)]
    samples = [sample.Sample(tokens=row, trained=np.arange(len(row)) >= tokens // 2) for row in rows]
    each = pack.build(samples, pack.count(samples))
    return lambda: model.pull_back(params, each, 0, lambda scores: (-scores.logprobs.mean(), {})), params


def peak(mode: bool | str, tokens: int) -> int:
    """Return the most bytes of tensors that are alive in a forward and backward beside the parameters."""
    run, params = step(mode, tokens)
    return live.peak_bytes(run, params.values())


def predicted(tokens: int) -> dict[str, float]:
    """Return what the cost model says, over nothing made again: of time by FLOPs, of memory without state."""
    shape = shapes.shape(config(), torch.float32)
    pairs = int(sum(np.arange(tokens // 2)) + 8 * (tokens // 16) * (tokens // 2 + tokens // 32))

    def held(mode: bool | str) -> int:
        """Return what the pass holds at its highest beside the parameters."""
        levers = memory.Levers(checkpointing=mode, one_pack=True)
        plan = memory.plan(shape, tokens, levers)
        return max(sum(p[n] for n in p if n not in memory.STATE) for m, p in plan.items() if m != "update")

    def work(mode: bool | str) -> int:
        return cost.flops(shape, tokens, pairs, tokens // 2, checkpointing=mode)

    found = {f"time {mode}": work(mode) / work(False) for mode in MODES[1:]}
    return found | {f"memory {mode}": held(mode) / held(False) for mode in MODES[1:]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048)
    chosen = parser.parse_args()
    runs = {str(mode): step(mode, chosen.tokens)[0] for mode in MODES}
    times = timing.by_turns(runs, rounds=chosen.rounds)
    peaks = {str(mode): peak(mode, chosen.tokens) for mode in MODES}
    found = {
        "machine": timing.machine(), "tokens": chosen.tokens,
        "time_over_none": {n: timing.ratio(t, times["False"]) for n, t in times.items()},
        "memory_over_none": {n: m / peaks["False"] for n, m in peaks.items()},
        "peak_bytes": peaks, "predicted": predicted(chosen.tokens),
    }  # fmt: skip
    timing.report(found, chosen.json)


if __name__ == "__main__":
    main()
