"""Learning from rewards by hand: draw, score, compare, step. The shell's loop calls the same functions.

A small Llama is asked one of eight letters and rewarded for saying it again. Prompts run once for all their
answers, in drawing and in training. Prints the mean reward of the first and of the last five steps, and
`learned: True`, when the last is above .9.
"""

import numpy as np
import torch
import transformers

import espalier as es
from adapters import loading, sampling, tree_attention
from core import ports

LETTERS, GROUP, STEPS = 8, 8, 60
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=LETTERS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=tree_attention.NAME)
model, params = loading.bind(module)

algorithm = es.algorithms.dapo
optimizer = es.optimizers.adamw(rate=lambda done: 1e-2, max_norm=1.0)
state = es.steps.init(params, optimizer, algorithm, key=es.keys.key(0))
engine, drawing = sampling.Sampler(model), ports.Sampling(max_tokens=1)
prompts = [np.array([letter, letter], np.int64) for letter in range(LETTERS)]


def reward(prompt: np.ndarray, completion: ports.Completion) -> float:
    """Give 1 for the letter that was asked."""
    return float(completion.tokens[0] == prompt[0])


means = []
for step in range(STEPS):
    numbers = [step * LETTERS + i for i in range(LETTERS)]  # a draw is named by its prompt's number
    drawn = engine.generate(
        state.params,
        prompts,
        numbers,
        num_samples=GROUP,
        sampling=drawing,
        key=es.keys.fold_in(state.key, "rollout"),
    )
    pairs = [
        (i, prompt, one)
        for i, (prompt, group) in enumerate(zip(prompts, drawn, strict=True))
        for one in group
    ]
    rewards = torch.tensor([reward(prompt, one) for _, prompt, one in pairs], dtype=torch.float64)
    columns = algorithm.columns(rewards, torch.tensor([i for i, _, _ in pairs]))
    samples = [
        es.Sample(
            tokens=np.concatenate([prompt, one.tokens]),
            trained=np.arange(len(prompt) + len(one.tokens)) >= len(prompt),
            columns={
                "sampled_logprobs": np.concatenate([np.zeros(len(prompt), np.float32), one.logprobs]),
                "advantage": float(columns["advantage"][unit]),
            },
            group=i,
            unit=unit,
        )
        for unit, (i, prompt, one) in enumerate(pairs)
    ]
    counts, plan = (
        es.pack.count(samples),
        es.batching.assign(samples, budget=512, couples=algorithm.couples)[0],
    )
    packs = [es.pack.build([samples[i] for i in one], counts, needs=algorithm.needs) for one in plan]
    state, _ = es.steps.train_step(model, algorithm, optimizer, state, packs, donate=True)
    means.append(rewards.mean().item())

first, last = np.mean(means[:5]), np.mean(means[-5:])
print(f"reward {first:.2f} -> {last:.2f}, learned: {last > 0.9}")
