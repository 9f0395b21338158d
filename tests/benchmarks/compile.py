"""Steps with the decoder compiled against steps without: `python -m tests.benchmarks.compile`.

An 11-million-parameter Llama on packs of changing lengths, forward and backward, by turns in one process.
Compiling comes before the rounds and is reported apart: with symbolic sizes, or at two planned ones.
"""

import argparse
import statistics

import attrs
import torch
import transformers

from adapters import compiling, loading, transformers_lm, tree_attention
from core import algorithms, pack, padded, steps
from core.plan import sizes
from tests.benchmarks import plain_step, timing

PLANNED = sizes.Sizes(nodes=(1024, 1280), edges=(1024, 1280))
NUM_ROWS = 12


def packs(num: int, *, planned: sizes.Sizes | None = None) -> list[pack.Pack]:
    """Return one pack a step, each of rows of its own."""
    found = []
    for seed in range(num):
        samples = plain_step.samples(plain_step.rows(NUM_ROWS, seed))
        counts = pack.count(samples)
        if planned is None:
            found.append(pack.build(samples, counts))
        else:
            found.append(padded.build(samples, counts, planned=planned, budget=planned.nodes[-1]))
    return found


def model() -> tuple[transformers_lm.TransformersLM, dict[str, torch.Tensor]]:
    """Return the model and its parameters."""
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(
        plain_step.config(), attn_implementation=tree_attention.NAME
    )
    return loading.bind(module)


def measured(*, static: bool, rounds: int) -> dict[str, float]:
    """Time both ways over the same packs."""
    plain, params = model()
    decoder = compiling.Decoder(plain.decode, backend="inductor", static=static, limit=compiling.FREE_GRAPHS)
    graph = attrs.evolve(plain, compiled=decoder)
    each = packs(4, planned=PLANNED if static else None)

    def over(one: transformers_lm.TransformersLM) -> None:
        for step in each:
            steps.loss_and_grad(one, algorithms.sft, params, [step], 0)

    over(graph)
    compiled = attrs.evolve(decoder.counts)
    times = timing.by_turns({"plain": lambda: over(plain), "graph": lambda: over(graph)}, rounds=rounds)
    assert (decoder.counts.forward, decoder.counts.backward) == (compiled.forward, compiled.backward)
    return {
        "speedup": timing.ratio(times["plain"], times["graph"]),
        "seconds_a_step": statistics.median(times["graph"]) / len(each),
        "compile_seconds": compiled.seconds,
        "graphs_forward": compiled.forward,
        "graphs_backward": compiled.backward,
    }


def main() -> None:
    """Measure and print."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--rounds", type=int, default=7)
    words.add_argument("--json")
    words.add_argument("--sizes", choices=("symbolic", "planned"), default="symbolic")
    given = words.parse_args()
    found = measured(static=given.sizes == "planned", rounds=given.rounds)
    timing.report({**timing.machine(), given.sizes: found}, given.json)


if __name__ == "__main__":
    main()
