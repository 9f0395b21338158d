"""Ten steps of the smallest run, every number of it: `python -m tests.golden.cpu` writes them down anew.

Kernels differ between instruction sets, so each has numbers of its own.
"""

import json
import pathlib
import sys

import torch

from shell import written

FILE = pathlib.Path(__file__).with_suffix(".json")
ARGUMENTS = (
    "sft", "--model", "tiny", "--dataset", "demo", "--dataset_split", "train[:24]", "--max_length", "64",
    "--batch_size", "4", "--max_steps", "10", "--logging_steps", "1", "--learning_rate", "1e-3",
)  # fmt: skip
NAMES = (
    "loss",
    "grad_norm",
    "learning_rate",
    "entropy",
    "mean_token_accuracy",
    "num_tokens",
    "batch/packing_ratio",
)


def kernels() -> str:
    """Name what the numbers hang on: libraries choose their kernels by the processor."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    known = {name.strip(): value.strip() for name, value in told.items()}
    processor = " ".join(known.get(n, "unknown") for n in ("vendor_id", "cpu family", "model"))
    return f"{processor} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__.split('+')[0]}"


def run(folder: pathlib.Path) -> list[dict[str, float]]:
    """Make the run with one thread and return what it logged."""
    from shell import log, train

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert train.main([*ARGUMENTS, "--output_dir", str(folder)]) == 0
    finally:
        torch.set_num_threads(before)
    return [{name: line[name] for name in NAMES} for line in log.read(folder / written.METRICS)]


def main() -> None:
    """Write the numbers of this machine's kernels beside those of others."""
    import tempfile

    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        known[kernels()] = run(pathlib.Path(folder) / "run")
    FILE.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
