"""Draw the rewards of a run by step: `python -m tests.benchmarks.curve OUT/metrics.jsonl curve.svg`."""

import json
import pathlib
import sys

import matplotlib as mpl
from matplotlib import pyplot

SHOWN = {
    "reward": ("prompts that are trained on", "#b7c4b1"),
    "eval_reward": ("prompts that are not", "#2e6b34"),
}


def main(source: str, target: str) -> None:
    """Read a log and write a picture."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "espalier"  # the same log gives the same file
    lines = [json.loads(line) for line in pathlib.Path(source).read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(6, 2.6), layout="constrained")
    for name, (label, color) in SHOWN.items():
        steps, values = zip(*((line["step"], line[name]) for line in lines if name in line), strict=True)
        axes.plot(steps, values, color=color, marker="o" if name.startswith("eval") else "", label=label)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
