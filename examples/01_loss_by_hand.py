"""A loss by hand: sequences to a forest, scores to one number and its gradient, without the shell.

Three answers share a prompt of four tokens; in the forest each of its tokens runs once, and nothing changes
but the work. Prints `28 tokens in 18 nodes, loss gap below 1e-12: True`.
"""

import numpy as np

import espalier as es

PROMPT = [1, 2, 3, 4]
ANSWERS = [[5, 6, 7, 8, 9], [5, 6, 1], [2, 2, 2, 2, 2, 2, 2, 0]]


def focal(scores, batch):
    """Care less for tokens that are already likely: (1 - p)^2 times the negative log-likelihood."""
    p = scores.logprobs.exp().detach()
    return -((1 - p) ** 2) * scores.logprobs, {"probability": p}


mine = es.algorithms.sft.evolve(loss=focal)
es.check(mine)  # tree = alone, additive, order-free, finite, pure, true coupling

rows = [np.array(PROMPT + answer, np.int64) for answer in ANSWERS]
samples = [
    es.Sample(tokens=row, trained=np.arange(len(row)) >= len(PROMPT), group=0, unit=i)
    for i, row in enumerate(rows)
]
counts = es.pack.count(samples)
model, params = es.reference.Reference(), es.reference.params()

forest = [es.pack.build(samples, counts)]
alone = [es.pack.build([one], counts) for one in samples]
shared, metrics, grads = es.steps.loss_and_grad(model, mine, params, forest, key=0)
single, _, _ = es.steps.loss_and_grad(model, mine, params, alone, key=0)

tokens, nodes = sum(map(len, rows)), len(forest[0].tokens)
print(f"{tokens} tokens in {nodes} nodes, loss gap below 1e-12: {abs(shared - single).item() < 1e-12}")
