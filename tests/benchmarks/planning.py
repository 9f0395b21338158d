"""What planning a step costs beside the step: `python -m tests.benchmarks.planning [--json FILE]`.

Assigning samples to packs and building the packs' tensors, against forward, backward and update on the
11-million-parameter Llama.
"""

import argparse

from core import pack
from core.plan import batching
from tests.benchmarks import plain_step, step, timing


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    ours, found = plain_step.Ours(), {"machine": timing.machine(), "share_of_step": {}}
    for name, rows in step.cases().items():
        samples = plain_step.samples(rows)

        def plan(samples=samples) -> None:
            for members in batching.assign(samples, budget=1 << 20, shape=step.SHAPE)[0]:
                pack.build([samples[i] for i in members], pack.count(samples))

        times = timing.by_turns(
            {"plan": plan, "step": lambda rows=rows: ours.step(rows)}, rounds=chosen.rounds
        )
        found["share_of_step"][name] = 1 / timing.ratio(times["step"], times["plan"])
    timing.report(found, chosen.json)


if __name__ == "__main__":
    main()
