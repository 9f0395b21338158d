"""AMD GPUs through ROCm: torch calls them `cuda`, and its version string tells them apart."""

import attrs
import torch

from adapters import cuda
from core import ports


def start(device: ports.Device) -> ports.Device:
    """Return the device as this machine has it.

    Args:
        device: as it is on a GPU that has everything.

    Raises:
        ValueError: this build of PyTorch has no ROCm, or sees no GPU.
    """
    if not torch.version.hip:
        raise ValueError(
            f"device rocm: torch {torch.__version__} is built without ROCm; install a build with it "
            "(pytorch.org, Get Started), or take --device cpu."
        )
    if not torch.cuda.is_available():
        raise ValueError(
            "device rocm: PyTorch sees no AMD GPU; see that rocminfo lists one and that HIP_VISIBLE_DEVICES, "
            "ROCR_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES do not hide it, or take --device cpu."
        )
    return cuda.as_found(device)


# CUDA_VISIBLE_DEVICES alone hides nothing where a HIP_ or ROCR_ variable is set; HIP_VISIBLE_DEVICES does.
DEVICE = attrs.evolve(
    cuda.DEVICE,
    name="rocm",
    hide={"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
    start=start,
)
