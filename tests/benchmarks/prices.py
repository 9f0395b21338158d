"""What blocks of attention cost here: `python -m tests.benchmarks.prices [--json FILE]`.

Forward and backward on one thread (OMP_NUM_THREADS=1), by its own time: the figures that a Device's `price`
holds. They are fitted once and written down, not measured at start: a choice of blocks that hung on a clock
would differ from run to run, and with it the last bits of the weights.
"""

import argparse
import itertools
import time

import attrs
import numpy as np
import torch

from core import attention
from core.plan import spans
from tests.benchmarks import timing

WIDTH, FEW, MANY = 64, 4, 20
SIZES = (8, 16, 32, 64, 128)
# Dense blocks are of any shape.
SHAPES = ((16, 512), (64, 512), (512, 16), (512, 64), (256, 256))


def seconds(table: list[tuple[int, ...]], nodes: int, heads: int, rounds: int = 25) -> float:
    """Return the least time of one forward and backward over blocks, of this thread alone."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, nodes, WIDTH, requires_grad=True) for _ in range(3))
    depths, blocks = torch.arange(nodes), torch.tensor(table)
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        sizes = nodes - depths
        out = attention.rectangles(query, key, value, blocks, depths, depths, scale=0.1, sizes=sizes)
        torch.autograd.grad(out.sum(), (query, key, value))
        times.append(time.thread_time() - start)
    return min(times)


def one_more(kind: int, queries: int, keys: int, heads: int) -> float:
    """Return the nanoseconds that one block more costs, over the same nodes."""
    step = max(queries, keys)
    nodes = MANY * step
    blocks = [(kind, i, i + queries, i, i + keys) for i in range(0, nodes, step)]
    short = min(step, 128)
    cover = [(spans.CAUSAL, i, i + short, i, i + short) for i in range(0, nodes, short)]
    first = cover if kind == spans.DENSE else []
    times = [seconds([*first, *blocks[:count]], nodes, heads) for count in (FEW, MANY)]
    return (times[1] - times[0]) / (MANY - FEW) * 1e9


def positive(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Solve least squares without negative answers: by descent along one answer after the other."""
    scale = np.linalg.norm(matrix, axis=0)
    matrix, found = matrix / scale, np.zeros(matrix.shape[1])
    for _ in range(10_000):
        for column in range(len(found)):
            rest = target - matrix @ found + matrix[:, column] * found[column]
            found[column] = max(0.0, matrix[:, column] @ rest)
    return found / scale


def fitted() -> tuple[spans.Price, list[dict]]:
    """Measure blocks of several kinds and sizes, and fit a price to relative errors, nothing below 0."""
    rows, found, table = [], [], []
    squares = [(kind, n, n) for kind in (spans.DENSE, spans.CAUSAL, spans.MASKED, spans.BATCH) for n in SIZES]
    shapes = [*squares, *((spans.DENSE, *shape) for shape in SHAPES)]
    for (kind, queries, keys), heads in itertools.product(shapes, (2, 8)):
        pairs = spans.causal_pairs(queries) if kind in {spans.CAUSAL, spans.BATCH} else queries * keys
        numbers = heads * WIDTH
        merged = (queries * numbers, keys * numbers) if kind == spans.DENSE else (0, 0)
        masks = (1, pairs) if kind == spans.MASKED else (0, 0)
        call = (0, 0) if kind == spans.BATCH else (1, heads)
        item = (heads, queries * numbers) if kind == spans.BATCH else (0, 0)
        rows.append([*call, pairs * numbers, *masks, *merged, *item])
        found.append(one_more(kind, queries, keys, heads))
        line = {"kind": kind, "queries": queries, "keys": keys, "heads": heads, "nanoseconds": found[-1]}
        table.append(line)
    fit = positive(np.array(rows) / np.array(found)[:, None], np.ones(len(found)))
    names = [field.name for field in attrs.fields(spans.Price)]
    for line, row in zip(table, rows, strict=True):
        line["fitted"] = float(np.dot(row, fit))
    return spans.Price(**dict(zip(names, fit.tolist(), strict=True))), table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    price, table = fitted()
    found = {"machine": timing.machine(), "price": attrs.asdict(price), "blocks": table}
    timing.report(found, parser.parse_args().json)


if __name__ == "__main__":
    main()
