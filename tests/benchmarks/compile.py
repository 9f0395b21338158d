"""Steps with the decoder compiled against steps without: `python -m tests.benchmarks.compile`.

A 7-million-parameter Llama of four layers on packs of changing lengths, by turns in one process: a step
(forward and backward) and an evaluation, of rows that share nothing and of prompts that eight answers share.
Compiling comes before the rounds and is reported apart: with symbolic sizes, or at two planned ones. Times
are those of the processor, with one thread, so that neighbors on the machine count for little.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
import transformers

from adapters import compiling, loading, transformers_lm, tree_attention
from core import algorithms, pack, padded, steps
from core.plan import sample, sizes
from tests.benchmarks import plain_step, timing

PLANNED = sizes.Sizes(nodes=(768, 1024), edges=(768, 1024))
NUM_ROWS, NUM_LAYERS = (8, 11), 4
NUM_PROMPTS, NUM_ANSWERS, SHARED, ALONE = 2, 8, 96, (20, 40)


def rows(turn: int) -> list[sample.Sample]:
    """Return rows of about 80 tokens that share nothing: fewer and more of them by turns."""
    return plain_step.samples(plain_step.rows(NUM_ROWS[turn % 2], turn))


def forest(turn: int) -> list[sample.Sample]:
    """Return eight answers to each of two prompts, short and longer ones by turns."""
    draw, found = np.random.default_rng(turn), []
    for prompt in range(NUM_PROMPTS):
        shared = draw.integers(0, 512, SHARED)
        for _ in range(NUM_ANSWERS):
            own = draw.integers(0, 512, ALONE[turn % 2] + int(draw.integers(0, 12)))
            tokens = np.concatenate([shared, own]).astype(np.int64)
            trained = np.arange(len(tokens)) >= SHARED
            found.append(sample.Sample(tokens=tokens, trained=trained, group=prompt, unit=len(found)))
    return found


def packs(made: Callable[[int], list[sample.Sample]], planned: sizes.Sizes | None) -> list[pack.Pack]:
    """Return two packs, one of each planned size."""
    found = []
    for samples in map(made, range(2)):
        counts = pack.count(samples)
        if planned is None:
            found.append(pack.build(samples, counts))
        else:
            found.append(padded.build(samples, counts, planned=planned, budget=planned.nodes[-1]))
    return found


def model() -> tuple[transformers_lm.TransformersLM, dict[str, torch.Tensor]]:
    """Return the model and its parameters."""
    torch.manual_seed(0)
    described = plain_step.config()
    described.num_hidden_layers = NUM_LAYERS
    module = transformers.AutoModelForCausalLM.from_config(described, attn_implementation=tree_attention.NAME)
    return loading.bind(module)


def measured(*, static: bool, rounds: int) -> dict[str, Any]:
    """Time both ways over the same packs, and hold their losses and gradients against each other."""
    plain, params = model()
    limit = len(PLANNED.nodes) if static else compiling.FREE_GRAPHS
    decoder = compiling.Decoder(plain.decode, backend="inductor", static=static, limit=limit)
    graph = attrs.evolve(plain, compiled=decoder)
    found: dict[str, Any] = {}
    for name, made in (("rows", rows), ("forest", forest)):
        each = packs(made, PLANNED if static else None)
        apart = max(gap(plain, graph, params, one) for one in each)
        before = attrs.evolve(decoder.counts)

        def step(one: transformers_lm.TransformersLM, each: list[pack.Pack] = each) -> None:
            for ready in each:
                steps.loss_and_grad(one, algorithms.sft, params, [ready], 0)

        def scored(one: transformers_lm.TransformersLM, each: list[pack.Pack] = each) -> None:
            for ready in each:
                steps.evaluate(one, algorithms.sft, params, [ready])

        for what, run in (("step", step), ("evaluation", scored)):
            both = {"plain": lambda r=run: r(plain), "graph": lambda r=run: r(graph)}
            times = timing.by_turns(both, rounds=rounds, clock=time.process_time)
            ratios = [a / b for a, b in zip(times["plain"], times["graph"], strict=True)]
            found[f"{name}, {what}"] = {
                "speedup": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)
            }  # fmt: skip
        assert (decoder.counts.forward, decoder.counts.backward) == (before.forward, before.backward)
        found[f"{name}, furthest apart"] = apart
    counts = decoder.counts
    return {
        **found,
        "compile_seconds": counts.seconds,
        "graphs": {"forward": counts.forward, "backward": counts.backward, "fallbacks": counts.fallbacks},
    }


def gap(
    plain: transformers_lm.TransformersLM,
    graph: transformers_lm.TransformersLM,
    params: dict[str, torch.Tensor],
    each: pack.Pack,
) -> float:
    """Return how far loss and gradients of a step are apart, of their own size."""
    (value, _, grads), (true, _, wanted) = (
        steps.loss_and_grad(one, algorithms.sft, params, [each], 0) for one in (graph, plain)
    )
    scale = max(grad.norm().item() for grad in wanted.values())
    gaps = [(grads[name] - grad).norm().item() / scale for name, grad in wanted.items()]
    return max(abs(value.item() - true.item()) / true.item(), *gaps)


def main() -> None:
    """Measure and print."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--rounds", type=int, default=9)
    words.add_argument("--json")
    words.add_argument("--sizes", choices=("symbolic", "planned"), default="symbolic")
    given = words.parse_args()
    found = measured(static=given.sizes == "planned", rounds=given.rounds)
    timing.report({**timing.machine(), given.sizes: found}, given.json)


if __name__ == "__main__":
    main()
