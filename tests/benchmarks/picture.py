"""Draw a real forest as it is laid out: `python -m tests.benchmarks.picture FILE.svg`.

Sixteen answers to one game-of-24 puzzle, from the optional data folder: the attention that the forest allows,
each heavy chain's causal block and each rectangle outlined. Needs the `plots` extra.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Polygon, Rectangle

from core.plan import prefix_tree
from tests.benchmarks import step


def main() -> None:
    """Draw."""
    rows = step.cases()["game24, a group of 16"]
    tree = prefix_tree.build(rows)
    nodes = len(tree.tokens)
    _, axes = plt.subplots(figsize=(9, 9))
    for number, (start, stop) in enumerate(tree.chains.tolist()):
        corners = [(start, start), (start, stop), (stop, stop)]
        axes.add_patch(Polygon(corners, closed=True, color=plt.get_cmap("tab20")(number % 20)))
    for top, bottom, left, right in tree.rectangles.tolist():
        shape = Rectangle(
            (left, top), right - left, bottom - top, facecolor="0.85", edgecolor="0.4", linewidth=0.5
        )
        axes.add_patch(shape)
    axes.set(
        xlim=(0, nodes), ylim=(nodes, 0), xlabel="keys (nodes in preorder)", ylabel="queries", aspect="equal"
    )
    raw, pairs = sum(map(len, rows)), int((tree.depths + 1).sum())
    axes.set_title(
        f"{len(rows)} samples, {raw} tokens -> {nodes} nodes; {len(tree.chains)} causal blocks (colored), "
        f"{len(tree.rectangles)} rectangles (gray)\n"
        f"{pairs} pairs, {pairs / np.square(nodes):.1%} of a dense mask"
    )
    plt.savefig(sys.argv[1], bbox_inches="tight")


if __name__ == "__main__":
    main()
