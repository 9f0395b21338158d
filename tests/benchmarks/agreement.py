"""How far runs over two processes are from that of one: `python -m tests.benchmarks.agreement [--json FILE]`.

Ten steps of the built-in model in each precision, by one process, by two gloo processes that hold parameters
whole, and by two that split them. The largest relative distance of a logged loss, and of a parameter.
"""

import argparse
import contextlib
import io
import json
import pathlib
import tempfile
from typing import Any

from tests import paths
from tests.benchmarks import timing
from tests.shell import runs

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
STEPS = {"max_steps": 10, "save_strategy": "no"}
PRECISIONS = ("float32", "float64")
RANKS: dict[str, dict[str, Any]] = {"two, whole": {}, "two, split": {"fsdp": True}}


def plans() -> dict[str, dict[str, Any]]:
    """Return the options of each run; the last batch of an epoch is ragged."""
    pairs = {
        "algorithm": "dpo", "dataset": paths.shared("data", "lf_demo", "dpo_en_200.jsonl"),
        "dataset_split": "train[:40]", "max_length": 512, "batch_size": 3,
    }  # fmt: skip
    drawn = {
        "algorithm": "grpo", "dataset": "task:letters", "dataset_split": "train[:6]", "batch_size": 8,
        "num_generations": 4, "max_completion_length": 12, "max_length": "null", "beta": 0.1,
        "reward_funcs": "tests.shell.words:spread",
    }  # fmt: skip
    named = {
        "sft": {"dataset_split": "train[:13]", "max_length": 96},
        "dpo": pairs,
        "dpo, an adapter": {**pairs, "use_peft": True},
    }
    every = {**named, "grpo": drawn}
    return {
        f"{name}, {dtype}": {**STEPS, **plan, "dtype": dtype}
        for name, plan in every.items()
        for dtype in PRECISIONS
    }


def losses(folder: pathlib.Path) -> list[float]:
    """Return the logged losses of a run."""
    return [line["loss"] for line in runs.metrics(folder) if "loss" in line]


def main() -> None:
    """Run everything and print a line for each plan."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--json")
    asked, found = parser.parse_args(), {}
    with tempfile.TemporaryDirectory() as place:
        root = pathlib.Path(place)
        for how, more in RANKS.items():
            plan = {str(root / f"{how}, {name}"): {**told, **more} for name, told in plans().items()}
            (root / "plan.json").write_text(json.dumps(plan, default=str))
            process = runs.start(*LAUNCHER, "-m", "tests.shell.ranked", str(root / "plan.json"))
            _, told = process.communicate()
            assert process.returncode == 0, told
        for name, told in plans().items():
            with contextlib.redirect_stderr(io.StringIO()):
                alone = runs.made(root / name, **told)
            for how in RANKS:
                two = root / f"{how}, {name}"
                pairs = zip(losses(two), losses(alone), strict=True)
                found[f"{name}, {how}"] = line = {
                    "loss": max(abs(x - y) / max(abs(y), 1e-3) for x, y in pairs),
                    "weights": runs.apart(runs.weights(two), runs.weights(alone)),
                }
                print(f"{name:26}{how:12} loss {line['loss']:.1e}  weights {line['weights']:.1e}")
    timing.report(found, asked.json)


if __name__ == "__main__":
    main()
