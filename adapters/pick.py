"""Which device a run uses."""

import difflib
import multiprocessing

import torch

from adapters import cpu, cuda, neuron, rocm
from core import ports

DEVICES = {device.name: device for device in (cpu.DEVICE, cuda.DEVICE, rocm.DEVICE, neuron.DEVICE)}
# What an option may say.
NAMES = tuple(DEVICES)


def seen() -> str:
    """Name the accelerator that PyTorch can use on this machine, `cpu` where there is none.

    Returns:
        One of `cpu`, `cuda`, `rocm`, `neuron`, or torch's own name for an accelerator that we do not know.
    """
    return _look()[0]


def device(name: str = "auto") -> ports.Device:
    """Return the Device of that name; `auto` is the machine's accelerator where we support it, else the CPU.

    Args:
        name: `auto` or one of `NAMES`.

    Raises:
        ValueError: the name does not exist, or its device cannot be used here.
    """
    if name == "auto":
        return _started(DEVICES.get(seen(), DEVICES["cpu"]))
    if name in DEVICES:
        return _started(DEVICES[name])
    near = difflib.get_close_matches(name, ("auto", *NAMES), n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(
        f"device {name!r} does not exist; one of {', '.join(('auto', *NAMES))} was wanted.{hint}"
    )


def passed_over(chosen: ports.Device) -> str | None:
    """Say in a phrase which accelerator `auto` left aside, and why; None where it left none.

    Args:
        chosen: what was taken instead.
    """
    found, fault = _look()
    if fault is not None:
        return f"neuron passed over: {fault}"
    known = found in ("cpu", chosen.name)
    return None if known else f"accelerator {found} seen, which is not supported"


def why(chosen: ports.Device, name: str = "auto") -> str:
    """Say in a phrase why `device(name)` is what it is, so that no accelerator is passed over in silence.

    Args:
        chosen: what `device(name)` returned.
        name: what was asked for.
    """
    if name != "auto":
        return "asked for"
    return passed_over(chosen) or ("no accelerator seen" if chosen.name == "cpu" else "accelerator seen")


def _started(device: ports.Device) -> ports.Device:
    """Make a device ready, and let child processes of whoever starts some begin as it needs."""
    found = device.start(device)
    # What was chosen before stays: a program that has children already knows what it does.
    if found.start_method and multiprocessing.get_start_method(allow_none=True) is None:
        multiprocessing.set_start_method(found.start_method)
    return found


def _look() -> tuple[str, str | None]:
    """Name the accelerator, and say what keeps torch-neuronx, where it is installed, from being one."""
    # Without check_available, a CUDA build answers `cuda` on a machine that has no GPU.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        # ROCm calls itself cuda; the version string is what tells them apart.
        return "rocm" if accelerator.type == "cuda" and torch.version.hip else accelerator.type, None
    if neuron.installed() is None or neuron.hidden():
        return "cpu", None
    try:
        return _started(neuron.DEVICE).name, None  # torch knows of it once the package is imported
    except ValueError as problem:
        return "cpu", str(problem).removeprefix("device neuron: ").rstrip(".")
