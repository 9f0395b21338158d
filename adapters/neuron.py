"""AWS Trainium through torch-neuronx, which registers the device `neuron` when it is imported.

The package is looked at before it is imported: PyPI holds another of its name that raises.
"""

import importlib
import importlib.metadata
import os
import pathlib
import re
import sys
from collections.abc import Mapping

import torch

from adapters import cuda
from core import ports

DISTRIBUTION = "torch-neuronx"
PACKAGE = "torch_neuronx"
CORES = "NEURON_RT_VISIBLE_CORES"
CACHE = "TORCH_NEURONX_NEFF_CACHE_DIR"
# What may be seen of the four cores of a trn2.3xlarge: a pair, or all.
SETS = (frozenset({0, 1}), frozenset({2, 3}), frozenset(range(4)))
_GUIDE = "docs/devices/trainium.md says how"
_PRODUCT = pathlib.Path("/sys/devices/virtual/dmi/id/product_name")


def fault() -> str | None:
    """Say what keeps the installed package from being imported, None where nothing does; imports nothing."""
    family = ".".join(torch.__version__.split(".")[:2])
    wanted = f"install torch-neuronx=={family}.* from AWS' own index ({_GUIDE})"
    version = installed()
    if version is None:
        return f"torch-neuronx is not installed; {wanted}."
    if re.match(r"1\.0(\.0)*$", version):
        return (
            f"torch-neuronx {version} is the placeholder of that name on PyPI, which only raises: "
            f"pip uninstall torch-neuronx, then {wanted}."
        )
    if version.split(".")[:2] != family.split("."):
        return (
            f"torch-neuronx {version} is not of the family of torch {torch.__version__}: {wanted}, or the "
            "torch that it was made for."
        )
    return None


def installed() -> str | None:
    """Return the version of the distribution that is installed; imports nothing."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def hidden(variables: Mapping[str, str] = os.environ) -> bool:
    """Say whether the cores are hidden from this process, as they are from the children of a run."""
    return CORES in variables and not variables[CORES].strip()


def cores_fault(variables: Mapping[str, str] = os.environ, machine: str | None = None) -> str | None:
    """Say what is wrong with the set of cores that a process may see; None where nothing is.

    Args:
        variables: the environment.
        machine: the instance's type. None: this machine's. One that is not known, or no Trainium instance,
            is held to the rule of a trn2.3xlarge.
    """
    told = variables.get(CORES)
    if told is None:
        return None
    seen = _cores(told)
    if seen is None:
        return f"{CORES}={told}: core numbers were wanted, as in 0,1 or 0-3."
    machine = _machine() if machine is None else machine
    larger = machine.startswith("trn") and machine != "trn2.3xlarge"
    if larger or seen in SETS:
        return None
    return f"{CORES}={told}: a trn2.3xlarge runs on cores 0,1 or 2,3 or 0-3 only; set one of these, or none."


def load() -> None:
    """Import the package, once everything that can be checked before has passed.

    Raises:
        ValueError: a check fails, or the import does.
    """
    if hidden():
        raise ValueError(f"device neuron: {CORES} is empty, which hides the cores; name cores or unset it.")
    wrong = fault() or cores_fault()
    if wrong is not None:
        raise ValueError(f"device neuron: {wrong}")
    # Read when the package is imported. What is compiled outlives a temporary folder: the next run finds it.
    # Where PyTorch has imported the package by itself it is too late, and the variable must say nothing else.
    if PACKAGE not in sys.modules:
        os.environ.setdefault(CACHE, str(cache()))
    try:
        importlib.import_module(PACKAGE)
    except Exception as problem:  # whatever a driver that is missing or too old makes it raise
        first = (str(problem).strip().splitlines() or [""])[0]
        raise ValueError(
            f"device neuron: torch-neuronx {installed()} is installed, and importing it fails "
            f"({type(problem).__name__}: {first}); see that neuron-ls lists the cores."
        ) from problem


def cache() -> pathlib.Path:
    """Return where compiled graphs are kept when nobody says: a folder of the user's that lasts."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "espalier" / "neuron"


def start(device: ports.Device) -> ports.Device:
    """Return the device, its package imported.

    Args:
        device: the device.

    Raises:
        ValueError: the package is missing, is the placeholder, or does not fit torch; the cores are not a set
            that the machine runs; or no core is seen.
    """
    load()
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != "neuron":
        raise ValueError(
            f"device neuron: torch-neuronx {installed()} is imported and sees no NeuronCore; see that "
            "neuron-ls lists one and that no other process holds it."
        )
    return device


def memory() -> int | None:
    """Return the bytes of one core; None where the package does not tell."""
    properties = getattr(torch.get_device_module("neuron"), "get_device_properties", None)
    return None if properties is None else getattr(properties(0), "total_memory", None)


def checks() -> tuple[ports.Check, ...]:
    """Look at the package, the cores, the cache and whether a core computes what it should."""
    wrong, wrong_cores = fault(), cores_fault()
    cores = os.environ.get(CORES, "all")
    return (
        ports.Check(name="torch-neuronx", passed=wrong is None, told=wrong or f"{installed()} fits torch"),
        ports.Check(name="cores", passed=wrong_cores is None, told=wrong_cores or cores),
        _lasting(os.environ.get(CACHE)),
        cuda.product("neuron"),
    )


def _lasting(folder: str | None) -> ports.Check:
    """Look at where compiled graphs go."""
    lasts = folder is not None and not folder.startswith(("/tmp/", "/var/tmp/", "/dev/shm/"))
    told = "kept between runs" if lasts else f"not kept between restarts: set {CACHE} before the run"
    return ports.Check(name="compile cache", passed=lasts, told=told)


def _cores(told: str) -> frozenset[int] | None:
    """Return the cores that a text such as `0,2-3` names; None where it names none or one twice."""
    found: list[int] = []
    for part in told.split(","):
        span = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if span is None:
            return None
        first, last = int(span[1]), int(span[2] or span[1])
        found += range(first, last + 1)
    return frozenset(found) if found and len(found) == len({*found}) else None


def _machine() -> str:
    """Return the instance's type as its firmware tells it; empty where it does not."""
    return _PRODUCT.read_text().strip() if _PRODUCT.is_file() else ""


DEVICE = ports.Device(
    name="neuron",
    type="neuron",
    static_shapes=True,
    # From 512 on multiples of it: what kernels of attention that work in tiles of that size ask for.
    multiple=(128, 512),
    # 64-bit types narrow to 32 in silence, so float64 is not among them.
    dtypes=(torch.bfloat16, torch.float32),
    dtype=torch.bfloat16,
    attention=("mask",),
    compile={"backend": "neuron", "dynamic": False},
    generation={"static": True, "chunk": 128, "on_host": True},
    start_method="spawn",
    hide={CORES: "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    memory=memory,
    start=start,
    checks=checks,
)
