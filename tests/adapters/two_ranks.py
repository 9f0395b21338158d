"""What each of two processes runs for test_ranks.py; writes what it saw as JSON."""

import json
import os
import pathlib
import sys

import numpy as np
import torch

from adapters import cpu, ranks
from core import algorithms, metrics, optimizers, pack, record, reference, steps
from core.plan import sample


def samples():
    """Rows of unequal length, three of whose tokens are trained in the first half and one in the second."""
    tokens = ([1, 2, 3], [1, 2, 4, 5, 6, 7, 8, 9, 10], [5, 4])
    trained = (2, 1, 1)
    return [
        sample.Sample(tokens=np.array(t), trained=np.arange(len(t)) >= len(t) - n)
        for t, n in zip(tokens, trained, strict=True)
    ]


def packs(rank: int, num: int):
    """This rank's share: the rows go round, and there is an empty pack where none is left."""
    every = samples()
    mine = [[s] for s in every[rank::num]]
    most = -(-len(every) // num)
    counts = pack.count(every)
    needs = algorithms.sft.watches
    parts = [*mine, *([[]] * (most - len(mine)))]
    return [pack.build(p, counts, needs=needs, dtype=torch.float64) for p in parts]


def main(folder: str) -> None:
    """Sum, merge and train on what is dealt out."""
    torch.set_num_threads(1)
    team = ranks.join(cpu.DEVICE)
    mine = {
        "wide": torch.arange(5.0) * (team.index + 1),
        "narrow": torch.tensor(team.index + 1, dtype=torch.int64),
        "double": torch.full((2, 2), 0.1, dtype=torch.float64) * (team.index + 1),
    }
    before = record.tree.map(torch.clone, mine)
    total = team.sum(mine)
    untouched = all(torch.equal(mine[n], before[n]) for n in mine)
    # Micro means 1 (10 tokens) and 3 (30 tokens); one metric only one rank has.
    weights = torch.full(((10, 30)[team.index],), (1.0, 3.0)[team.index], dtype=torch.float64)
    means = metrics.collect({"micro": weights, **({"only": torch.ones(2)} if team.index else {})})
    optimizer = optimizers.adamw(rate=lambda done: 0.1)
    state = steps.init(reference.params(), optimizer, algorithms.sft, key=0)
    for _ in range(3):
        state, seen = steps.train_step(
            reference.Reference(), algorithms.sft, optimizer, state, packs(team.index, team.num), ranks=team
        )
    ranks.wait(team)
    found = {
        "index": team.index,
        "num": team.num,
        "untouched": untouched,
        "sum": {n: v.tolist() for n, v in total.items()},
        "merged": metrics.values(team.merge(means)),
        "metrics": metrics.values(seen),
        "params": {n: p.flatten().tolist() for n, p in state.params.items()},
    }
    ranks.leave()
    path = pathlib.Path(folder, f"{os.environ.get('RANK', 'alone')}.json")
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
