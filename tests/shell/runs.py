"""Small training runs for the tests: started in this process or in another, and what they leave."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import safetensors.torch
import torch

from shell import log, train
from tests import paths

SMALL = (
    *("--model", "tiny", "--dataset", "demo", "--dataset_split", "train[:24]", "--max_length", "64"),
    *("--batch_size", "6", "--logging_steps", "1", "--learning_rate", "1e-3"),
)
# What a clock or the memory of the process says, and what hangs on the number of ranks.
MEASURED = ("step_time", "perf/trained_tok_s", "perf/forwarded_tok_s", "peak_memory_gb")
PLANNED = (
    *("batch/packing_ratio", "batch/flop_ratio", "batch/row_fill_frac", "batch/row_imbalance"),
    "batch/pad_frac",
)


def words(folder: pathlib.Path, **options: Any) -> list[str]:
    """Return a command line: the small run with options added or replaced; `algorithm` is sft by default."""
    algorithm = options.pop("algorithm", "sft")
    named = dict(zip(SMALL[::2], SMALL[1::2], strict=True))
    named |= {f"--{name}": _word(value) for name, value in options.items()}
    return [algorithm, "--output_dir", str(folder), *(word for pair in named.items() for word in pair)]


def run(folder: pathlib.Path, **options: Any) -> int:
    """Train in this process; return the exit status."""
    return train.main(words(folder, **options))


def made(folder: pathlib.Path, **options: Any) -> pathlib.Path:
    """Train in this process, which must succeed; return the folder."""
    assert run(folder, **options) == 0
    return folder


def start(*command: str, cwd: pathlib.Path | None = None, **variables: str) -> subprocess.Popen[str]:
    """Start Python in another process, on one thread."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(paths.ROOT), **variables}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd or paths.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def done(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Wait for a process; return its status, standard output and standard error."""
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


def weights(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the trained model, or of its adapter."""
    return safetensors.torch.load_file(folder / trained(folder))


def trained(folder: pathlib.Path) -> str:
    """Return the file that a run left, below its folder: a model, or an adapter."""
    name = "model/adapter_model.safetensors"
    return name if (folder / name).exists() else "model/model.safetensors"


def facts(folder: pathlib.Path) -> dict[str, Any]:
    """Return run.json."""
    return json.loads((folder / "run.json").read_text())


def metrics(folder: pathlib.Path, *but: str) -> list[dict[str, Any]]:
    """Return the logged lines without what a clock says, and without more names."""
    lines = log.read(folder / "metrics.jsonl")
    return [{n: v for n, v in line.items() if n not in (*MEASURED, *but)} for line in lines]


def content(folder: pathlib.Path) -> dict[str, bytes]:
    """Return every file below a folder but the lock, by name."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def steps(folder: pathlib.Path) -> list[int]:
    """Return the steps of the checkpoints, in order."""
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


def same(one: pathlib.Path, other: pathlib.Path, step: int) -> None:
    """Assert that two runs ended alike to the bit: model, state of the optimizer, and metrics."""
    for name in (trained(other), f"checkpoint-{step}/tensors-00001.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert metrics(one) == metrics(other)


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest relative distance of two models, parameter by parameter."""
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).norm() / other[n].norm()) for n in one)


def _word(value: Any) -> str:
    """Write an option's value as a word."""
    return str(value).lower() if isinstance(value, bool) else str(value)
