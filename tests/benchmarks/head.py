"""The output head against plain cross-entropy with full logits: `python -m tests.benchmarks.head [--json
FILE]`.

Time of forward and backward by hidden states and weight, by turns; peak memory beyond what must exist (inputs
and gradients), each in a process of its own. `--vocab 151936` is a large vocabulary; with `--memory` full
logits, which may not fit, are left out.
"""

import argparse
import multiprocessing

import torch

from core import head
from tests.benchmarks import timing

HIDDEN = 576


def inputs(tokens: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, a weight and targets."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = (torch.randn(vocab, HIDDEN) * HIDDEN**-0.5).requires_grad_()
    return hidden, weight, torch.randint(vocab, (tokens,))


def tiles(way: str, tokens: int, vocab: int) -> float:
    """Return the peak of one pass in tiles, beyond inputs and gradients."""
    return peak(way, tokens, vocab) / head.TILE_BYTES


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    """Hold all logits."""
    loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight), targets)
    torch.autograd.grad(loss, (hidden, weight))


def recomputed(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    """Make logits tile by tile, in backward again."""
    torch.autograd.grad(-head.score(hidden, weight, targets)["logprobs"].mean(), (hidden, weight))


def known(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    """Make logits tile by tile once: the loss is linear, its slopes are known."""
    logprobs = head.score(hidden, weight, targets, slopes=torch.full(targets.shape, -1.0 / len(targets)))[
        "logprobs"
    ]
    torch.autograd.grad(-(logprobs / len(targets)).sum(), (hidden, weight))


WAYS = {"plain": plain, "recomputed": recomputed, "known slopes": known}


def peak(way: str, tokens: int, vocab: int) -> int:
    """Return the bytes that one pass takes beyond inputs and gradients."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (way, tokens, vocab))


def _peak(way: str, tokens: int, vocab: int) -> int:
    given = inputs(tokens, vocab)
    WAYS[way](*inputs(16, 512))
    needed = sum(t.numel() * t.element_size() for t in given[:2])
    return timing.peak_bytes(lambda: WAYS[way](*given)) - needed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--memory", action="store_true", help="no times: the peaks of our own ways, in tiles")
    chosen = parser.parse_args()
    if chosen.memory:
        own = {n: tiles(n, chosen.tokens, chosen.vocab) for n in WAYS if n != "plain"}
        size = {"tokens": chosen.tokens, "vocab": chosen.vocab, "hidden": HIDDEN}
        timing.report({**size, "peak_in_tiles": own, "tile_bytes": head.TILE_BYTES}, chosen.json)
        return
    given = inputs(chosen.tokens, chosen.vocab)
    times = timing.by_turns({n: lambda way=way: way(*given) for n, way in WAYS.items()}, rounds=chosen.rounds)
    logits = chosen.tokens * chosen.vocab * 4
    found = {
        "machine": timing.machine(), "tokens": chosen.tokens, "vocab": chosen.vocab, "hidden": HIDDEN,
        "time_over_plain": {n: timing.ratio(t, times["plain"]) for n, t in times.items() if n != "plain"},
        "peak_over_logits": {n: peak(n, chosen.tokens, chosen.vocab) / logits for n in WAYS},
        "tile_bytes": head.TILE_BYTES,
    }  # fmt: skip
    timing.report(found, chosen.json)


if __name__ == "__main__":
    main()
