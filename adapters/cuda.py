"""NVIDIA GPUs through CUDA; AMD's share what torch calls by the same name."""

import os

import attrs
import torch

from core import ports


def memory() -> int | None:
    """Return the bytes that are free on the current GPU."""
    return torch.cuda.mem_get_info()[0]


def start(device: ports.Device) -> ports.Device:
    """Return the device as this machine has it.

    Args:
        device: as it is on a GPU that has everything.

    Raises:
        ValueError: this build of PyTorch has no CUDA, or sees no GPU.
    """
    if torch.version.hip:
        raise ValueError("device cuda: this PyTorch is built for ROCm; --device rocm was wanted.")
    if torch.version.cuda is None:
        raise ValueError(
            f"device cuda: torch {torch.__version__} is built without CUDA; install a build with it "
            "(pytorch.org, Get Started), or take --device cpu."
        )
    if not torch.cuda.is_available():
        raise ValueError(
            "device cuda: PyTorch sees no NVIDIA GPU; see that nvidia-smi lists one and that "
            "CUDA_VISIBLE_DEVICES does not hide it, or take --device cpu."
        )
    return as_found(device)


def as_found(device: ports.Device) -> ports.Device:
    """Take the GPU that is this rank's, and return the device as that one is.

    Without bfloat16 where the GPU only emulates it, which is slower than float32.

    Args:
        device: as it is on a GPU that has everything.
    """
    # Before anything runs there: each rank would keep a context on the first GPU. As accelerate counts them.
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return device
    kept = tuple(dtype for dtype in device.dtypes if dtype != torch.bfloat16)
    return attrs.evolve(device, dtypes=kept, dtype=torch.float32)


def checks() -> tuple[ports.Check, ...]:
    """Look at the GPU and whether it computes what it should."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info()
    room = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB"
    narrow = torch.cuda.is_bf16_supported(including_emulation=False)
    return (
        ports.Check(name="GPUs", passed=True, told=f"{torch.cuda.device_count()} x {properties.name}"),
        ports.Check(name="free memory", passed=free > total // 2, told=room),
        ports.Check(name="bfloat16", passed=narrow, told="native" if narrow else "missing: float32 is taken"),
        product("cuda"),
    )


def product(place: str) -> ports.Check:
    """Multiply two small matrices on a device.

    Args:
        place: torch's name of the device.
    """
    try:
        left = torch.arange(12.0).reshape(3, 4)
        found = (left.to(place) @ left.to(place).T).cpu()
    except (AssertionError, RuntimeError) as problem:  # torch asserts where it is built without the device
        first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        return ports.Check(name="a product of matrices", passed=False, told=first)
    right = torch.allclose(found, left @ left.T)
    return ports.Check(name="a product of matrices", passed=right, told="right" if right else "wrong")


# In half precision gradients vanish without a loss scale, so it is left out.
DEVICE = ports.Device(
    name="cuda",
    type="cuda",
    static_shapes=False,
    multiple=128,
    dtypes=(torch.bfloat16, torch.float32, torch.float64),
    dtype=torch.bfloat16,
    attention=("flex", "blocks", "mask"),
    compile={"dynamic": False},
    generation={"static": False},
    start_method="spawn",
    hide={"CUDA_VISIBLE_DEVICES": ""},
    memory=memory,
    start=start,
    checks=checks,
)
