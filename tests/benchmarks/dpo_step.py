"""A whole DPO step with shared prompts against the same step without: `python -m tests.benchmarks.dpo_step
[--json FILE]`.

What `packing: tree` saves over `packing: none`, on real pairs (the optional data folder; without it, on drawn
ones of the same make): planning, the reference's forward, the policy's forward and backward, AdamW. The model
is an 11-million-parameter Llama; token ids are taken modulo its vocabulary. Both run every batch, one after
the other, and each speed-up is divided by the ratio of FLOPs that the plan promises.
"""

import argparse
import pathlib
import statistics
import tempfile
import time

import numpy as np
import torch
import transformers

from adapters import loading, tree_attention
from core import algorithms, metrics, optimizers, steps
from core.plan import cost, sample
from shell import data, feed, sources
from tests import paths
from tests.benchmarks import plain_step, timing
from tests.benchmarks.step import SHAPE

BUDGET = 16384


def batches(size: int, num: int) -> list[list[sample.Sample]]:
    """Return batches of pairs, chosen and rejected side by side."""
    file = paths.SHARED / "data" / "lf_demo" / "dpo_en_200.jsonl"
    rows = _real(file) if file.exists() else [_drawn(seed) for seed in range(size * num)]
    return [[one for row in rows[i * size : (i + 1) * size] for one in row] for i in range(num)]


def _real(file: pathlib.Path) -> list[list[sample.Sample]]:
    """Return the pairs of a file, by a chat template of the field, in the order of its lines."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        paths.SHARED / "models" / "smollm2-135m-instruct-tokenizer"
    )
    opened = data.look(sources.find(str(file)), "pairs")
    with tempfile.TemporaryDirectory() as folder:
        bound = data.rules(opened, tokenizer=tokenizer, max_length=2048)
        prepared = data.prepare(opened, bound, folder=pathlib.Path(folder))
        return [[_small(one) for one in prepared.samples(row)] for row in range(len(prepared))]


def _drawn(seed: int) -> list[sample.Sample]:
    """Return a pair of the mean lengths of the real ones."""
    draw = np.random.default_rng(seed)
    prompt, sides = draw.integers(0, 1000, 456), [draw.integers(0, 1000, 317) for _ in range(2)]
    tokens = [np.concatenate([prompt, side]) for side in sides]
    return [
        _small(sample.Sample(tokens=t, trained=np.arange(len(t)) >= 456, group=seed, unit=seed))
        for t in tokens
    ]


def _small(one: sample.Sample) -> sample.Sample:
    """Bring ids within the model's vocabulary."""
    return sample.Sample(
        tokens=one.tokens % SHAPE.vocab,
        trained=one.trained,
        columns=one.columns,
        group=one.group,
        unit=one.unit,
    )


class Side:
    """DPO steps of one kind of packing."""

    def __init__(self, *, share: bool) -> None:
        """Draw the model, the same one for both kinds."""
        torch.manual_seed(0)
        module = transformers.AutoModelForCausalLM.from_config(
            plain_step.config(), attn_implementation=tree_attention.NAME
        )
        self.share = share
        self.model, params = loading.bind(module)
        self.reference = {name: p.clone() for name, p in params.items()}
        self.optimizer = optimizers.adamw(rate=lambda done: 1e-4, max_norm=1.0)
        self.state = steps.init(params, self.optimizer, algorithms.dpo, key=0)

    def step(self, samples: list[sample.Sample]) -> float:
        """Plan and make one step; return its loss."""
        packs = feed.packs(
            samples, algorithms.dpo, budget=BUDGET, share=self.share, shape=SHAPE, needs=algorithms.dpo.needs,
            dtype=torch.float32, device="cpu",
        )  # fmt: skip
        packs = steps.with_reference(self.model, algorithms.dpo, self.reference, packs)
        self.state, means = steps.train_step(
            self.model, algorithms.dpo, self.optimizer, self.state, packs, donate=True
        )
        return metrics.values(means)["loss"]


def flop_ratio(samples: list[sample.Sample]) -> float:
    """Return FLOPs of the sides alone over those of their forest."""
    works = [cost.work(samples, share=share) for share in (False, True)]
    alone, shared = (cost.flops(SHAPE, one.nodes, one.pairs, one.edges) for one in works)
    return alone / shared


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=3)
    chosen = parser.parse_args()
    sides = (Side(share=False), Side(share=True))
    rows, gap, found = batches(chosen.pairs, chosen.batches + 1), 0.0, []
    for turn, samples in enumerate(rows):
        seconds, losses = [0.0, 0.0], [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            losses[which] = sides[which].step(samples)
            seconds[which] = time.perf_counter() - start
        gap = max(gap, abs(losses[0] - losses[1]))
        if turn:  # the first one warms up
            found.append((seconds[0] / seconds[1], flop_ratio(samples)))
    timing.report(
        {
            "machine": timing.machine(),
            "pairs_a_step": chosen.pairs,
            "steps": len(found),
            "speed_up": statistics.median(speed for speed, _ in found),
            "flop_ratio": statistics.median(flops for _, flops in found),
            "speed_up_over_flop_ratio": statistics.median(speed / flops for speed, flops in found),
            "lowest": min(speed / flops for speed, flops in found),
            "loss_gap": gap,
        },
        chosen.json,
    )


if __name__ == "__main__":
    main()
