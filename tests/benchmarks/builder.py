"""How much faster the tree builder is than a trie of Python dicts, one a token.

    python -m tests.benchmarks.builder [--json FILE]

Both get the same int64 arrays and return the same arrays (tokens, depths, ends, parents, leaves), the dicts
in the order in which they were filled. Runs are interleaved; ratios are of medians.
"""

import argparse
import json
import statistics
import sys
import time

import numpy as np

from core.plan import prefix_tree

WANTED = 100
ROUNDS = 15


def dict_trie(sequences: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Build the tree token by token: one dict of children a node, then one walk in preorder."""
    tokens: list[int] = []
    depths: list[int] = []
    children: list[dict[int, int]] = []
    roots: dict[int, int] = {}
    paths: list[list[int]] = []
    for sequence in sequences:
        below = roots
        nodes = []
        for depth, token in enumerate(sequence.tolist()):
            if token not in below:
                below[token] = len(tokens)
                tokens.append(token)
                depths.append(depth)
                children.append({})
            nodes.append(below[token])
            below = children[nodes[-1]]
        paths.append(nodes)
    order: list[int] = []
    parents: list[int] = []
    ends = [0] * len(tokens)
    place = [0] * len(tokens)
    stack = [(node, -1, False) for node in reversed(roots.values())]
    while stack:
        node, parent, done = stack.pop()
        if done:
            ends[place[node]] = len(order)
            continue
        place[node] = len(order)
        order.append(node)
        parents.append(parent)
        stack.append((node, parent, True))
        stack.extend((child, place[node], False) for child in reversed(children[node].values()))
    return {
        "tokens": np.array([tokens[node] for node in order]),
        "depths": np.array([depths[node] for node in order]),
        "ends": np.array(ends),
        "parents": np.array(parents),
        "leaves": np.array([place[nodes[-1]] if nodes else -1 for nodes in paths]),
    }


def node_set(tokens: np.ndarray, parents: np.ndarray) -> list[int]:
    """Return every node as a hash of all tokens from its root to it, sorted."""
    digests: list[int] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        above = digests[parent] if parent >= 0 else 0
        digests.append(hash((above, token)))
    return sorted(digests)


def fan(generator: np.random.Generator, prompt: int, samples: int, answer: int) -> list[np.ndarray]:
    """Return answers to one prompt."""
    shared = generator.integers(0, 50_000, prompt)
    return [np.concatenate([shared, generator.integers(0, 50_000, answer)]) for _ in range(samples)]


def agent(generator: np.random.Generator, turns: int, trunk: int, branch: int) -> list[np.ndarray]:
    """Return one sample a turn: the conversation so far, and a side branch that is not continued."""
    so_far = np.zeros(0, np.int64)
    rows = []
    for _ in range(turns):
        so_far = np.concatenate([so_far, generator.integers(0, 50_000, trunk)])
        rows.append(np.concatenate([so_far, generator.integers(0, 50_000, branch)]))
    return rows


def seconds(build, rows: list[np.ndarray]) -> float:
    """Return the seconds that one build takes."""
    start = time.perf_counter()
    build(rows)
    return time.perf_counter() - start


def measure(rows: list[np.ndarray]) -> dict[str, float | bool]:
    """Compare both builders on one set of rows."""
    ours, theirs = prefix_tree.build(rows), dict_trie(rows)
    same = node_set(ours.tokens, ours.parents) == node_set(theirs["tokens"], theirs["parents"])
    fast, slow, spelled = [], [], []
    for _ in range(ROUNDS):
        slow.append(seconds(dict_trie, rows))
        fast.extend(seconds(prefix_tree.build, rows) for _ in range(5))
        spelled.append(seconds(lambda rows: prefix_tree.paths(prefix_tree.build(rows)), rows))
    median = statistics.median
    return {
        "tokens": sum(map(len, rows)),
        "nodes": len(ours.tokens),
        "microseconds": 1e6 * median(fast),
        "microseconds_with_paths": 1e6 * median(spelled),
        "dict_trie_microseconds": 1e6 * median(slow),
        "ratio": median(slow) / median(fast),
        "ratio_with_paths": median(slow) / median(spelled),
        "same_nodes": same,
    }


def main() -> int:
    """Print one line a case; exit 1 where a ratio is below what is wanted or the nodes differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="file for the figures")
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    cases = {
        "prompt of 4,096 with 16 answers of 512": fan(generator, 4096, 16, 512),
        "prompt of 1,024 with 8 answers of 1,024": fan(generator, 1024, 8, 1024),
        "48 turns of 400 and a side branch of 600": agent(generator, 48, 400, 600),
    }
    results = {name: measure(rows) for name, rows in cases.items()}
    for name, result in results.items():
        print(
            f"{name}: {result['ratio']:.0f}x ({result['microseconds']:.0f} us against "
            f"{result['dict_trie_microseconds']:.0f} us; with every path spelled out "
            f"{result['ratio_with_paths']:.0f}x), "
            f"nodes {'equal' if result['same_nodes'] else 'DIFFER'}"
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)
    return 0 if all(r["ratio"] >= WANTED and r["same_nodes"] for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
