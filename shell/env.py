"""What this machine and installation are, ready to paste into a report: no secrets, no paths."""

import importlib.metadata
import json
import os
import pathlib
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shell import mistake, roots

PACKAGES = (
    "accelerate", "attrs", "datasets", "einops", "jaxtyping", "jsonargparse", "numpy", "optree", "pyyaml",
    "rich", "safetensors", "tokenizers", "torch", "transformers", "peft", "torch-neuronx", "triton",
)  # fmt: skip

# Only these are read: others may hold tokens.
VARIABLES = (
    "ACCELERATE_TORCH_DEVICE", "ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE", "LOCAL_RANK", "MKL_NUM_THREADS", "NEURON_CC_FLAGS", "NEURON_RT_NUM_CORES",
    "NEURON_RT_VISIBLE_CORES", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "RANK", "ROCR_VISIBLE_DEVICES", "TORCHDYNAMO_DISABLE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_LOGS", "WORLD_SIZE",
)  # fmt: skip

USAGE = "usage: python -m shell.env [--json]"

Report = dict[str, dict[str, object]]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report.

    Args:
        argv: `--json` for JSON; the process's own words when None.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    try:
        roots.check()
        if words not in ([], ["--json"]):
            raise mistake.Mistake(f"option {' '.join(words)!r} does not exist; --json or nothing was wanted.")
    except mistake.Mistake as told:
        print(f"espalier env: {told}", file=sys.stderr)
        return 2
    found = report(looking=True)
    print(json.dumps(found, indent=2) if words else text(found))
    return 0


def report(*, looking: bool = False) -> Report:
    """Return what is known, by section.

    Args:
        looking: look at the device too: its checks, and a small forest through its attention.
    """
    return {
        "espalier": {"version": _version(roots.DISTRIBUTION)},
        "machine": _machine(),
        "packages": {name: _version(name) for name in PACKAGES},
        **_torch(looking=looking),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def text(found: Mapping[str, Mapping[str, object]]) -> str:
    """Lay the report out in aligned lines."""
    lines = []
    for section, entries in found.items():
        lines.append(section)
        lines += [f"  {name:<28}{value}" for name, value in entries.items()] or ["  (nothing set)"]
    return "\n".join(lines)


def _version(distribution: str) -> str:
    """Return the version that is installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> dict[str, object]:
    """Describe the computer and the interpreter."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "platform": platform.platform(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "processor": _processor(),
        "cores": f"{usable} of {os.cpu_count()} usable",
    }


def _processor() -> str:
    """Name the processor's model where the system tells, else its architecture."""
    told = pathlib.Path("/proc/cpuinfo")
    for line in told.read_text().splitlines() if told.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _torch(*, looking: bool) -> Report:
    """Describe PyTorch's build, the device that a run would get, and every accelerator in sight."""
    # A report is wanted most where the installation is broken: an import that fails is a line of it.
    try:
        import torch

        from adapters import pick, self_test
    except Exception as error:
        return {"torch": {"import failed": f"{type(error).__name__}: {error}".splitlines()[0]}}
    return {
        "torch": {
            "cuda build": torch.version.cuda or "no",
            "rocm build": torch.version.hip or "no",
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "threads between operations": torch.get_num_interop_threads(),
        },
        **_device(pick, self_test if looking else None),
    }


def _device(pick: Any, self_test: Any) -> Report:
    """Describe the device that a run would get, what it can do, and what looking at it finds."""
    import torch

    notes: Sequence[str] = ()
    try:
        device = pick.device()
        if self_test is not None:
            device, notes = self_test.tested(device, device.dtype)
    except ValueError as problem:  # an accelerator that is there and cannot be used is what the report is for
        return {"device": {"picked": "none", "fault": str(problem)}}
    memory = device.memory()
    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    looked = () if self_test is None else device.checks()
    checks: dict[str, object] = {one.name: f"{'ok' if one.passed else 'LOOK'}: {one.told}" for one in looked}
    if notes:
        checks["attention"] = f"LOOK: {'; '.join(notes)}"
    multiple = device.multiple if isinstance(device.multiple, tuple) else (device.multiple,)
    return {
        "device": {
            "picked": f"{device.name} ({pick.why(device)})",
            "accelerators": f"{accelerators} ({pick.seen()})" if accelerators else "none",
            "dtype": _name(device.dtype),
            "dtypes": ", ".join(map(_name, device.dtypes)),
            "tree attention": ", ".join(device.attention),
            "shapes": "planned: each new one is compiled" if device.static_shapes else "any",
            "sizes": "multiples of " + ", from the next on of ".join(map(str, multiple)),
            "generation": "static cache" if device.generation["static"] else "growing cache",
            "memory": "unknown" if memory is None else f"{memory / 2**30:.1f} GiB",
            "hidden from children by": " ".join(f"{n}={v}" for n, v in device.hide.items()) or "nothing",
        },
        **({"checks": checks} if checks else {}),
    }


def _name(dtype: object) -> str:
    """Return a dtype's name without torch's."""
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
