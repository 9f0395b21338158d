"""Which device a run uses."""

import difflib

import torch

from adapters import cpu
from core import ports

# What an option may say. A name that is known but has no Device here is refused by name.
NAMES = ("cpu", "cuda", "rocm", "neuron")
DEVICES = {device.name: device for device in (cpu.DEVICE,)}


def seen() -> str:
    """Name the accelerator that PyTorch can use on this machine, `cpu` where there is none.

    Returns:
        One of `cpu`, `cuda`, `rocm`, `neuron`, or torch's own name for an accelerator that we do not know.
    """
    # Without check_available, a CUDA build answers `cuda` on a machine that has no GPU.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    # ROCm calls itself cuda; the version string is what tells them apart.
    return "rocm" if accelerator.type == "cuda" and torch.version.hip else accelerator.type


def device(name: str = "auto") -> ports.Device:
    """Return the Device of that name; `auto` is the machine's accelerator where we support it, else the CPU.

    Args:
        name: `auto` or one of `NAMES`.

    Raises:
        ValueError: the name does not exist, or its device is not built yet.
    """
    if name == "auto":
        return DEVICES.get(seen(), cpu.DEVICE)
    if name in DEVICES:
        return DEVICES[name]
    built = ", ".join(("auto", *DEVICES))
    if name in NAMES:
        raise ValueError(f"device {name} is not built yet in this version; one of {built} was wanted.")
    near = difflib.get_close_matches(name, ("auto", *NAMES), n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"device {name!r} does not exist; one of {built} was wanted.{hint}")


def why(chosen: ports.Device, name: str = "auto") -> str:
    """Say in a phrase why `device(name)` is what it is, so that no accelerator is passed over in silence.

    Args:
        chosen: what `device(name)` returned.
        name: what was asked for.
    """
    found = seen()
    if name != "auto":
        return "asked for"
    if found == chosen.name:
        return "no accelerator seen" if found == "cpu" else "accelerator seen"
    return f"accelerator {found} seen, but {found} is not built yet in this version"
