"""Curves of time and memory: `python -m tests.benchmarks.curves FOLDER` writes curves.json and curves.svg.

Attention over sharing, depth and tokens, forward and backward, against a dense mask and every row alone; the
output head over the vocabulary against full logits; the peak memory of a model's step without and with its
activations made again. Ratios of contenders that ran by turns in one process; memory in a process of its own.
`--only sharing depth` measures these anew and keeps the rest; `--only` alone draws. Needs the `plots` extra.
"""

import argparse
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import torch

from tests.benchmarks import attention, checkpointing, head, timing

# Deeper, wider, longer: each along one axis with the others as in the first.
SHARED = (0, 64, 128, 256, 448)
DEPTHS = (1, 2, 4, 8, 16)
TOKENS = (256, 512, 1024)
VOCABULARIES = (4096, 16_384, 49_152)
ROW, ROWS, EDGES = 512, 6, 256


def sharing(shared: int) -> list[np.ndarray]:
    """Return rows of one length that share so many first tokens."""
    return attention.fan(shared, ROWS, ROW - shared)


def deep(turns: int) -> list[np.ndarray]:
    """Return a sample a turn of agents, about as many nodes whatever the depth."""
    return attention.agent(turns, 512 // turns, 512 // turns)


def wide(tokens: int) -> list[np.ndarray]:
    """Return a prompt with eight answers of so many nodes together."""
    return attention.fan(tokens // 2, 8, tokens // 16)


def times(rows: list[np.ndarray], rounds: int) -> dict[str, float]:
    """Return nodes, rows' tokens, and by what factor each contender is slower than blocks."""
    named, nodes = attention.contenders(rows)
    kept = {name: named[name] for name in ("rectangles", "dense mask", "rows alone")}
    found = timing.by_turns(kept, rounds=rounds)
    ratios = {n: timing.ratio(t, found["rectangles"]) for n, t in found.items() if n != "rectangles"}
    return {"nodes": nodes, "tokens": sum(map(len, rows)), **ratios}


def scoring(vocab: int, rounds: int) -> dict[str, float]:
    """Return the time of scoring over that of full logits, and the peak memory of both over a tile."""
    given = head.inputs(EDGES, vocab)
    found = timing.by_turns({n: lambda way=w: way(*given) for n, w in head.WAYS.items()}, rounds=rounds)
    ratios = {n: timing.ratio(t, found["plain"]) for n, t in found.items() if n != "plain"}
    return ratios | {f"{n}, tiles": head.tiles(n, EDGES, vocab) for n in head.WAYS}


def stepping(tokens: int) -> dict[str, float]:
    """Return the most bytes of live tensors in a forward and backward by what is made again, in MiB."""
    return {str(mode): checkpointing.peak(mode, tokens) / 2**20 for mode in checkpointing.MODES}


CURVES: Mapping[str, tuple[str, Sequence[int], Callable[[int, int], dict[str, float]]]] = {
    "sharing": ("first tokens that six rows of 512 share", SHARED, lambda x, n: times(sharing(x), n)),
    "depth": ("turns of an agent, about as many nodes each", DEPTHS, lambda x, n: times(deep(x), n)),
    "tokens": ("nodes of a prompt with eight answers", TOKENS, lambda x, n: times(wide(x), n)),
    "vocabulary": ("vocabulary, 256 edges", VOCABULARIES, scoring),
    "memory": ("nodes of a step", TOKENS[1:], lambda x, _: stepping(x)),
}
TITLES = {
    "sharing": "attention: times slower than blocks",
    "depth": "attention: times slower than blocks",
    "tokens": "attention: times slower than blocks",
    "vocabulary": "head: time over full logits; peak in tiles of 64 MiB",
    "memory": "peak memory of a step in MiB by what is made again",
}


def measured(names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Measure the curves of these names."""
    curves = {}
    for name in names:
        _, places, measure = CURVES[name]
        curves[name] = [{"at": x, **measure(x, rounds)} for x in places]
    return {"machine": timing.machine(), "curves": curves}


def draw(found: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw the curves beside each other."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "curves"  # the same figures give the same file
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 3, figsize=(13, 7.5))
    panels.flat[-1].axis("off")
    for panel, (name, (label, *_)) in zip(panels.flat, CURVES.items(), strict=False):
        if name not in found["curves"]:
            continue
        points = found["curves"][name]
        for line in [key for key in points[0] if key not in ("at", "nodes", "tokens")]:
            panel.plot([p["at"] for p in points], [p[line] for p in points], marker="o", label=line)
        panel.set_title(TITLES[name], fontsize=9)
        panel.set_xlabel(label, fontsize=9)
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, write and draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=tuple(CURVES), help="measure these; keep the others")
    chosen = parser.parse_args()
    path = chosen.folder / "curves.json"
    torch.manual_seed(0)
    found = measured(tuple(CURVES) if chosen.only is None else chosen.only, chosen.rounds)
    if chosen.only is not None and path.exists():
        found["curves"] = json.loads(path.read_text())["curves"] | found["curves"]
    path.write_text(json.dumps(found, indent=1) + "\n")
    draw(found, chosen.folder / "curves.svg")


if __name__ == "__main__":
    main()
