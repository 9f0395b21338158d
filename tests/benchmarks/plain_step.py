"""A step over rows that share nothing against a hand-written padded loop: `python -m
tests.benchmarks.plain_step`.

The model is an 11-million-parameter Llama; lengths are those of short puzzle answers. Ours builds its packs
and makes the whole step (forward, backward, clipping, AdamW); the loop pads the same rows, runs transformers'
own forward under sdpa with cross-entropy, clips and steps torch.optim.AdamW. Pairs are interleaved; the
median of their ratios is reported.
"""

import argparse
import json
import pathlib
import statistics
import time

import numpy as np
import torch
import transformers

from adapters import loading, tree_attention
from core import algorithms, optimizers, pack, steps
from core.plan import sample


def config(vocab: int = 512) -> transformers.LlamaConfig:
    """Return the shape of the model: 11 million parameters."""
    return transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=384, intermediate_size=1024, num_hidden_layers=7, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip


def rows(num: int, seed: int) -> list[np.ndarray]:
    """Draw rows that share nothing, of lengths as in game-of-24 answers: 80 tokens, give or take 15."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.normal(80, 15, num).astype(int), 40, 140)
    return [
        np.concatenate([[i], draw.integers(0, 512, n - 1)]).astype(np.int64) for i, n in enumerate(lengths)
    ]


def samples(batch: list[np.ndarray]) -> list[sample.Sample]:
    """Return rows as samples that are trained from their second token on."""
    return [
        sample.Sample(tokens=row, trained=np.arange(len(row)) > 0, group=i, unit=i)
        for i, row in enumerate(batch)
    ]


class Ours:
    """Our step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        module = transformers.AutoModelForCausalLM.from_config(
            config(), attn_implementation=tree_attention.NAME
        )
        self.model, params = loading.bind(module)
        self.optimizer = optimizers.adamw(rate=lambda done: 1e-4, max_norm=1.0)
        self.state = steps.init(params, self.optimizer, algorithms.sft, key=0)

    def step(self, batch: list[np.ndarray]) -> float:
        rows = samples(batch)
        packs = [pack.build(rows, pack.count(rows))]
        self.state, means = steps.train_step(
            self.model, algorithms.sft, self.optimizer, self.state, packs, donate=True
        )
        return float(means["loss"].total / means["loss"].weight)


class Padded:
    """The loop that one writes by hand."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = transformers.AutoModelForCausalLM.from_config(config(), attn_implementation="sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.0)

    def step(self, batch: list[np.ndarray]) -> float:
        width = max(map(len, batch))
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros(len(batch), width, dtype=torch.long)
        for i, row in enumerate(batch):
            ids[i, : len(row)], mask[i, : len(row)] = torch.from_numpy(row), 1
        labels = ids.masked_fill(mask == 0, -100)
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        )
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def main() -> None:
    """Measure and print; with `--json FILE` write the figures too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--rows", type=int, default=16)
    chosen = parser.parse_args()
    sides, times, losses = (Ours(), Padded()), ([], []), ([], [])
    for turn in range(chosen.pairs + 1):
        batch = rows(chosen.rows, turn)
        for i in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            losses[i].append(sides[i].step(batch))
            times[i].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(times[0][1:], times[1][1:], strict=True)]
    found = {
        "ratio": statistics.median(ratios),
        "ours_seconds": statistics.median(times[0][1:]),
        "padded_seconds": statistics.median(times[1][1:]),
        "loss_gap": max(abs(a - b) for a, b in zip(*losses, strict=True)),
        "threads": torch.get_num_threads(),
        "pairs": chosen.pairs,
    }
    print(json.dumps(found, indent=2))
    if chosen.json:
        pathlib.Path(chosen.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
