"""A training loop composed by hand from step functions: what the shell's loop calls, and nothing else.

A small Llama learns to count: each row is ten numbers in a row from a random start. Prints the first and the
last loss and `learned: True`, when the last is under a tenth of the first.
"""

import numpy as np
import torch
import transformers

import espalier as es
from adapters import loading, tree_attention

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=tree_attention.NAME)
model, params = loading.bind(module)

schedule = es.schedules.linear(num_updates=60, num_warmup=5)
optimizer = es.optimizers.adamw(rate=lambda done: 3e-3 * schedule(done), max_norm=1.0)
state = es.steps.init(params, optimizer, es.algorithms.sft, key=es.keys.key(0))


def batch(step: int) -> list[es.Sample]:
    """Draw sixteen rows; what is drawn hangs on the step alone, so the loop could stop and go on anywhere."""
    starts = np.random.default_rng(step).integers(0, 64, 16)
    rows = [(start + np.arange(10)) % 64 for start in starts]
    return [
        es.Sample(tokens=row.astype(np.int64), trained=np.arange(10) > 0, group=i, unit=i)
        for i, row in enumerate(rows)
    ]


losses = []
for step in range(60):
    samples = batch(step)
    counts = es.pack.count(samples)
    plan = es.batching.assign(samples, budget=128)[0]  # at most 128 unique tokens in a forward
    packs = [
        es.pack.build([samples[i] for i in members], counts, needs=es.algorithms.sft.needs)
        for members in plan
    ]  # what the loss reads; with algorithm.reads its metrics too
    state, means = es.steps.train_step(model, es.algorithms.sft, optimizer, state, packs, donate=True)
    losses.append(es.metrics.values(means)["loss"])

print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, learned: {losses[-1] < losses[0] / 10}")
model.save(state.params, "counting")  # a Hugging Face folder; the module itself holds no weights
