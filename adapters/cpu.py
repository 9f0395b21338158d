"""The CPU: the reference device, on which everything runs."""

import os
import pathlib

import torch

from core import ports

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


# Half precision is left out: without a loss scale its gradients vanish. Bfloat16 is slower here than float32.
DEVICE = ports.Device(
    name="cpu",
    type="cpu",
    static_shapes=False,
    dtypes=(torch.float32, torch.bfloat16, torch.float64),
    dtype=torch.float32,
    attention=("rectangles", "mask"),
    hide={},
    memory=memory,
)
