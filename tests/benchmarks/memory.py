"""What each lever takes off a step's memory, promised and counted: `python -m tests.benchmarks.memory`.

One optimizer step of AdamW of SmolLM2-135M's shape (12 of its 30 layers) on a prompt with eight answers, in
float32 unless a line says otherwise. Bytes are those of tensors that are alive, counted storage by storage:
every machine gives the same ones. `--json FILE` writes what is printed.
"""

import argparse
from typing import Any

import numpy as np
import torch
import transformers

from adapters import cpu, live, loading, lora, shapes, tree_attention
from core import algorithms, optimizers, pack, record, steps
from core.plan import memory, sample
from shell import footprint
from tests.benchmarks import attention, timing

LAYERS = {"gradient_checkpointing": True}
CHUNKS = {"feed_forward_chunk": 128}
RUNS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "gradient_checkpointing: selective": {"gradient_checkpointing": "selective"},
    "gradient_checkpointing: true": LAYERS,
    "chunk_size_feed_forward: 128": CHUNKS,
    "both of these": {**LAYERS, **CHUNKS},
    "token_budget: 256": {"budget": 256},
    "dtype: bfloat16": {"dtype": torch.bfloat16},
    "use_peft: true": {"adapter": True},
    "use_peft, bfloat16, layers again": {"adapter": True, "dtype": torch.bfloat16, **LAYERS},
}


def config() -> transformers.LlamaConfig:
    """Return the shape; a quarter of the vocabulary, so that layers are what is seen."""
    return transformers.LlamaConfig(
        vocab_size=12288, hidden_size=576, intermediate_size=1536, num_hidden_layers=12,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
        max_position_embeddings=8192,
    )  # fmt: skip


def measure(
    tokens: int, *, adapter: bool = False, dtype: Any = torch.float32, budget: int | None = None, **modes: Any
) -> dict[str, Any]:
    """Return the bytes of a step's parts as planned, and those that were counted.

    Args:
        tokens: nodes of the pack.
        adapter: train LoRA of rank 16 over frozen weights.
        dtype: of the parameters.
        budget: nodes of a piece; None: the pack runs whole.
        modes: as `loading.bind` takes them.
    """
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config(), attn_implementation=tree_attention.NAME)
    model, params = loading.bind(made.to(dtype), price=cpu.DEVICE.price, **modes)
    if adapter:
        model, params = lora.attach(model, params, lora.Settings(), seed=0)
    rule = optimizers.with_masters(optimizers.adamw(rate=lambda done: 1e-4, max_norm=1.0))
    state = steps.init(params, rule, algorithms.sft, key=0)
    rows = [row % config().vocab_size for row in attention.fan(tokens // 2, 8, tokens // 16)]
    samples = [sample.Sample(tokens=row, trained=np.arange(len(row)) >= tokens // 2) for row in rows]
    packs = [pack.build(samples, pack.count(samples), budget=budget)]
    held = [*model.frozen.values(), *params.values(), *record.tree.leaves(state.optimizer)]

    def step() -> None:
        steps.train_step(model, algorithms.sft, rule, state, packs, donate=True)

    counted = live.peak_bytes(step, held)
    levers = memory.Levers(
        adapter=sum(p.numel() for p in params.values()) if adapter else None,
        checkpointing=modes.get("gradient_checkpointing", False),
        chunk=modes.get("feed_forward_chunk", 0),
        one_pack=budget is None,
    )
    forward, shared = (tokens, 0) if budget is None else (budget, tokens - budget)
    plan = memory.plan(shapes.shape(config(), dtype), forward, levers, shared=shared)
    moment, promised = footprint.highest(plan)
    there = live.size(held)
    return {"counted": counted + there, "promised": promised, "state": there, "moment": moment}


def main() -> None:
    """Print a line for each lever."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--json")
    asked = parser.parse_args()
    found = {}
    for name, how in RUNS.items():
        found[name] = one = measure(asked.tokens, **how)
        state, counted, promised = (f"{one[n] / 2**20:5.0f}" for n in ("state", "counted", "promised"))
        moment = one["moment"]
        print(f"{name:34} state {state}, at most {counted} MiB; promised {promised}, at the {moment}")
    timing.report({"machine": timing.machine(), "tokens": asked.tokens, "runs": found}, asked.json)


if __name__ == "__main__":
    main()
