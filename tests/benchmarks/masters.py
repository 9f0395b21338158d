"""What precision costs a run: loss on held-out rows after the same steps in each, on a real small model.

    python -m tests.benchmarks.masters [--json FILE]

Supervised training of a 260,032-parameter Llama on grade-school problems, 8 rows a step, at learning rates
from that of pretraining down to that of fine-tuning. Loss in float32, and how far from it the others end,
also as a part of what float32 gained.
"""

import argparse
import contextlib
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import attrs

from core import optimizers
from shell import log, train
from tests import paths
from tests.benchmarks import timing

RATES = (1e-3, 1e-4, 2e-5)
STEPS = 60
PRECISIONS = {
    "float32": (),
    "autocast": ("--bf16",),
    "bfloat16, masters": ("--dtype", "bfloat16"),
    "bfloat16 alone": ("--dtype", "bfloat16"),
}


def words(folder: pathlib.Path, rate: float, steps: int, **changed: Any) -> list[str]:
    """Return the command line of a run, with options changed."""
    model, rows = paths.shared("models", "stories260K"), paths.shared("data", "gsm8k")
    named = {
        "model": model, "chat_template": model / "chat_template_for_tests.jinja",
        "dataset": rows / "train_2000.jsonl", "eval_dataset": rows / "test_first_300.jsonl",
        "eval_split": "train[:40]", "eval_steps": steps, "eval_on_start": "true", "max_length": 128,
        "batch_size": 8, "max_steps": steps, "learning_rate": rate, "logging_steps": steps,
        "save_strategy": "no", "output_dir": folder, **changed,
    }  # fmt: skip
    return ["sft", *(word for name, value in named.items() for word in (f"--{name}", str(value)))]


@contextlib.contextmanager
def without_masters() -> Iterator[None]:
    """Let the optimizer add its steps to the parameters themselves, moments in bfloat16 too."""

    def plain(rule: optimizers.Optimizer) -> optimizers.Optimizer:
        def update(grads: Any, state: Any, params: Any, **how: Any) -> Any:
            return rule.update({n: g.to(params[n].dtype) for n, g in grads.items()}, state, params, **how)

        return attrs.evolve(rule, update=update)

    with mock.patch.object(optimizers, "with_masters", plain):
        yield


def losses(precision: str, rate: float, steps: int = STEPS, **changed: Any) -> tuple[float, float]:
    """Return the held-out loss before and after a run, with options changed."""
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place) / "out"
        with without_masters() if precision == "bfloat16 alone" else contextlib.nullcontext():
            assert train.main([*words(folder, rate, steps, **changed), *PRECISIONS[precision]]) == 0
        found = [line["eval_loss"] for line in log.read(folder / "metrics.jsonl") if "eval_loss" in line]
    return found[0], found[-1]


def main() -> None:
    """Print a line for each learning rate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    asked = parser.parse_args()
    table = []
    for rate in RATES:
        ends = {precision: losses(precision, rate) for precision in PRECISIONS}
        start, wide = ends["float32"]
        short = {name: (end - wide) / (start - wide) for name, (_, end) in ends.items() if name != "float32"}
        away = {name: (end - wide) / wide for name, (_, end) in ends.items() if name != "float32"}
        table.append({"rate": rate, "start": start, "float32": wide, "short": short, "away": away})
        told = ", ".join(f"{name} {away[name]:+.2%} (gain {-short[name]:+.1%})" for name in short)
        print(f"{rate:g}: {start:.3f} -> {wide:.3f} in float32; {told}")
    timing.report(table, asked.json)


if __name__ == "__main__":
    main()
