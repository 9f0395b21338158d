"""Rows that share nothing against plain packing of the same rows: `python -m tests.benchmarks.unshared
[--json FILE]`.

Plain packing lays the rows one after another, restarts positions, runs causal attention row by row and
cross-entropy over all logits, with torch.optim.AdamW: what one writes by hand when nothing is to be shared.
Ours plans, builds the forest and makes its whole step.
"""

import argparse
import statistics

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from tests.benchmarks import plain_step, timing

NAME = "benchmark_plain_packing"


def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, *, spans, **_):
    """Run causal attention on each row of a pack."""
    outs = [
        F.scaled_dot_product_attention(
            query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], is_causal=True, scale=scaling, enable_gqa=True
        )
        for a, b in spans
    ]
    return torch.cat(outs, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)


class Packed:
    """Plain packing."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = transformers.AutoModelForCausalLM.from_config(
            plain_step.config(), attn_implementation=NAME
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def step(self, batch: list[np.ndarray]) -> float:
        stops = np.cumsum([len(row) for row in batch])
        spans = list(zip([0, *stops[:-1].tolist()], stops.tolist(), strict=True))
        ids = torch.from_numpy(np.concatenate(batch))[None]
        positions = torch.from_numpy(np.concatenate([np.arange(len(row)) for row in batch]))[None]
        labels = torch.full_like(ids, -100)
        labels[0, :-1] = ids[0, 1:]
        labels[0, torch.from_numpy(stops - 1)] = -100
        logits = self.model(input_ids=ids, position_ids=positions, use_cache=False, spans=spans).logits
        loss = F.cross_entropy(logits[0].float(), labels[0])
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--rows", type=int, default=12)
    chosen = parser.parse_args()
    batch = plain_step.rows(chosen.rows, 0)
    ours, packed = plain_step.Ours(), Packed()
    gap = abs(ours.step(batch) - packed.step(batch))
    sides = {"ours": lambda: ours.step(batch), "packed": lambda: packed.step(batch)}
    times = timing.by_turns(sides, rounds=chosen.pairs)
    timing.report(
        {
            "machine": timing.machine(),
            "tokens": sum(map(len, batch)),
            "time_over_plain_packing": timing.ratio(times["ours"], times["packed"]),
            "seconds": {name: statistics.median(t) for name, t in times.items()},
            "loss_gap": gap,
        },
        chosen.json,
    )


if __name__ == "__main__":
    main()
