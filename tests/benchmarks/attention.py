"""Attention over forests, forward and backward: `python -m tests.benchmarks.attention [--json FILE]`.

Blocks as the device's price has them run, against each block by itself and what people do otherwise: a dense
mask over the pack, keys and values gathered along every root-to-segment path, and every row alone.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F

from adapters import cpu
from core import attention
from core.plan import prefix_tree, spans
from tests.benchmarks import timing

HEADS, WIDTH = 4, 64


def fan(prompt: int, group: int, answer: int, seed: int = 0) -> list[np.ndarray]:
    """Return one prompt with a group of answers."""
    draw = np.random.default_rng(seed)
    stem = draw.integers(0, 150_000, prompt)
    return [np.concatenate([stem, draw.integers(0, 150_000, answer)]) for _ in range(group)]


def agent(turns: int, seen: int, said: int, seed: int = 0) -> list[np.ndarray]:
    """Return one sample a turn of an agent: a trunk that grows by `seen + 32` tokens a turn, `said` tokens
    off it."""
    draw = np.random.default_rng(seed)
    trunk, rows = np.zeros(0, np.int64), []
    for _ in range(turns):
        trunk = np.concatenate([trunk, draw.integers(0, 150_000, seen)])
        rows.append(np.concatenate([trunk, draw.integers(0, 150_000, said)]))
        trunk = np.concatenate([trunk, draw.integers(0, 150_000, 32)])
    return rows


def bush(num: int, length: int, letters: int, seed: int = 0) -> list[np.ndarray]:
    """Return rows of so few letters that they branch everywhere."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, letters, length) for _ in range(num)]


CASES = {
    "fan 1024 + 8 x 128": fan(1024, 8, 128),
    "agent 16 x (100 + 100)": agent(16, 100, 100),
    "fan 64 + 64 x 6": fan(64, 64, 6),
    "100 rows of 12 out of 4 letters": bush(100, 12, 4),
    "48 rows of 16, nothing shared": fan(0, 48, 16),
}


def contenders(rows: list[np.ndarray]) -> tuple[dict, int]:
    """Return what is compared on some rows, each a forward and a backward, and the nodes of their forest."""
    tree = prefix_tree.build(rows)
    nodes = len(tree.tokens)
    tables, depths = _tables(tree), torch.from_numpy(tree.depths)
    table, together = tables["apart"], tables["run"]
    sizes = torch.from_numpy(tree.ends) - torch.arange(nodes)
    mask = attention.ancestors(torch.from_numpy(tree.ends), depths)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, HEADS, nodes, WIDTH, requires_grad=True) for _ in range(3))
    weight, scale = torch.randn(1, HEADS, nodes, WIDTH), WIDTH**-0.5
    segments = _segments(tree)
    alone = [tuple(torch.randn(1, HEADS, len(r), WIDTH, requires_grad=True) for _ in range(3)) for r in rows]

    def pulled(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((out * weight).sum(), (query, key, value))

    def rectangles() -> tuple[torch.Tensor, ...]:
        return pulled(
            attention.rectangles(query, key, value, together, depths, depths, scale=scale, sizes=sizes)
        )

    def apart() -> tuple[torch.Tensor, ...]:
        return pulled(attention.rectangles(query, key, value, table, depths, depths, scale=scale))

    def dense() -> tuple[torch.Tensor, ...]:
        return pulled(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))

    def gathered() -> tuple[torch.Tensor, ...]:
        outs = []
        for start, stop, path in segments:
            seen = torch.ones(stop - start, len(path), dtype=torch.bool).tril(len(path) - (stop - start))
            k, v = key[:, :, path], value[:, :, path]
            outs.append(F.scaled_dot_product_attention(query[:, :, start:stop], k, v, attn_mask=seen))
        return pulled(torch.cat(outs, 2))

    def unpacked() -> None:
        for q, k, v in alone:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    for one, other in zip(rectangles(), dense(), strict=True):
        assert torch.allclose(one, other, atol=2e-4)
    named = {
        "rectangles": rectangles,
        "blocks apart": apart,
        "dense mask": dense,
        "per-path gather": gathered,
        "rows alone": unpacked,
    }
    return named, nodes


def calls(rows: list[np.ndarray]) -> dict[str, int]:
    """Count the calls of blocks apart and as they run; where these are alike, times differ by noise alone."""
    counts = {}
    for name, table in _tables(prefix_tree.build(rows)).items():
        kinds = table[table[:, 1] < table[:, 2], 0]
        counts[name] = int((kinds < spans.BATCH).sum()) + len(kinds[kinds >= spans.BATCH].unique())
    return counts


def _tables(tree: prefix_tree.PrefixTree) -> dict[str, torch.Tensor]:
    """Return the blocks of a tree, each apart and as the device's price has them run."""
    chains = np.concatenate([np.ones((len(tree.chains), 1), np.int64), tree.chains, tree.chains], 1)
    rest = np.concatenate([np.zeros((len(tree.rectangles), 1), np.int64), tree.rectangles], 1)
    apart = np.concatenate([chains, rest])
    rates = spans.rates(cpu.DEVICE.price, heads=HEADS, width=WIDTH)
    return {"apart": torch.from_numpy(apart), "run": torch.from_numpy(spans.fused(apart, rates))}


def _segments(tree: prefix_tree.PrefixTree) -> list[tuple[int, int, torch.Tensor]]:
    """Return runs of nodes without a fork, and the path from the root to the end of each."""
    nodes = np.arange(len(tree.tokens))
    children = np.bincount(tree.parents[tree.parents >= 0], minlength=len(nodes))
    starts = [0] + [n for n in nodes[1:].tolist() if tree.parents[n] != n - 1 or children[n - 1] > 1]
    found = []
    for start, stop in zip(starts, [*starts[1:], len(nodes)], strict=True):
        path = nodes[(nodes < stop) & (tree.ends > stop - 1)]
        found.append((start, stop, torch.from_numpy(path)))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    found = {"machine": timing.machine(), "cases": {}}
    for name, rows in CASES.items():
        named, nodes = contenders(rows)
        times = timing.by_turns(named, rounds=chosen.rounds)
        figures = {
            "nodes": nodes,
            "rows": sum(map(len, rows)),
            "calls": calls(rows),
            "milliseconds": min(times["rectangles"]) * 1e3,
        }
        figures |= {
            f"faster than {n}": timing.ratio(t, times["rectangles"])
            for n, t in times.items()
            if n != "rectangles"
        }
        found["cases"][name] = figures
    timing.report(found, chosen.json)


if __name__ == "__main__":
    main()
