"""The CPU: the reference device, on which everything runs."""

import os
import pathlib

import torch

from core import ports
from core.plan import spans

_CONTROL_GROUP = pathlib.Path("/sys/fs/cgroup/memory.max")


def memory() -> int | None:
    """Return the bytes that this process may use: the machine's, or its container's where that is less.

    Returns:
        Bytes; None where the system does not tell (not Linux).
    """
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None
    # Outside a container the file says "max", or is not there.
    limit = _CONTROL_GROUP.read_text().strip() if _CONTROL_GROUP.is_file() else "max"
    return min(machine, int(limit)) if limit.isdigit() else machine


def start(device: ports.Device) -> ports.Device:
    """Return the device: it is always there."""
    return device


def checks() -> tuple[ports.Check, ...]:
    """Look at what makes it fast."""
    instructions = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return (
        ports.Check(name="instructions", passed=instructions != "DEFAULT", told=instructions),
        ports.Check(name="threads", passed=True, told=f"{threads} (OMP_NUM_THREADS sets them)"),
    )


# Half precision is left out: without a loss scale its gradients vanish. Bfloat16 is slower here than float32.
DEVICE = ports.Device(
    name="cpu",
    type="cpu",
    static_shapes=False,
    multiple=64,
    dtypes=(torch.float32, torch.bfloat16, torch.float64),
    dtype=torch.float32,
    attention=("blocks", "mask"),
    compile={"dynamic": False},
    generation={"static": False},
    start_method=None,
    hide={},
    memory=memory,
    start=start,
    checks=checks,
    # As `python -m tests.benchmarks.prices` fitted it once on an x86-64 core with AVX-512, to two digits.
    price=spans.Price(
        launch=140000.0,
        head=11000.0,
        pair=0.22,
        masked=0.0,
        mask=9.8,
        row=2.7,
        key=2.7,
        item=300.0,
        moved=12.0,
    ),
)
