"""Which device a run gets, on machines that this one is not."""

import pytest
import torch

from adapters import cpu, pick
from core.plan import padding


def machine(monkeypatch, accelerator, hip=None):
    """Pretend that torch sees an accelerator."""
    found = accelerator and torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(torch.version, "hip", hip)


@pytest.mark.parametrize(
    ("accelerator", "hip", "name"),
    [(None, None, "cpu"), ("cuda", None, "cuda"), ("cuda", "7.1", "rocm"), ("mps", None, "mps")],
)
def test_accelerators_are_told_apart(monkeypatch, accelerator, hip, name):
    machine(monkeypatch, accelerator, hip)
    assert pick.seen() == name


def test_a_cuda_build_without_a_gpu_is_a_cpu(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else torch.device("cuda"),
    )
    assert pick.seen() == "cpu"
    assert pick.device("auto") is cpu.DEVICE


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_machine_without_accelerators_runs_on_its_cpu(monkeypatch, name):
    machine(monkeypatch, None)
    assert pick.device(name) is cpu.DEVICE


def test_an_accelerator_that_is_passed_over_is_named(monkeypatch):
    machine(monkeypatch, "mps")
    chosen = pick.device("auto")
    assert chosen.name == "cpu"
    assert pick.why(chosen) == "accelerator mps seen, which is not supported"


def test_what_was_asked_for_needs_no_other_reason(monkeypatch):
    machine(monkeypatch, "cuda")
    assert pick.why(pick.device("cpu"), "cpu") == "asked for"


def test_a_misspelled_device_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"device 'cuad' does not exist.*Did you mean cuda"):
        pick.device("cuad")


@pytest.mark.parametrize("name", sorted(pick.DEVICES))
def test_every_device_is_filed_under_its_name_and_its_default_dtype_is_one_of_its_own(name):
    device = pick.DEVICES[name]
    assert device.name == name
    assert name in pick.NAMES
    assert device.dtype in device.dtypes


def test_the_cpu_runs_on_tensors_of_its_type():
    device = cpu.DEVICE
    for dtype in device.dtypes:
        assert (
            torch.ones(2, 2, dtype=dtype, device=device.type).matmul(torch.ones(2, 2, dtype=dtype)).sum() == 8
        )


@pytest.mark.parametrize("name", ["cpu", "cuda", "rocm"])
def test_only_devices_of_planned_sizes_draw_in_static_shapes(name):
    device = pick.DEVICES[name]
    assert device.static_shapes == device.generation["static"] is False
    assert padding.rounded(1, device.multiple) > 1


def test_memory_is_the_containers_where_that_is_less(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(cpu, "_CONTROL_GROUP", limit)
    whole = cpu.memory()
    limit.write_text("1048576\n")
    assert cpu.memory() == 1048576 < whole
    limit.write_text("max\n")
    assert cpu.memory() == whole
    limit.write_text(f"{2 * whole}\n")
    assert cpu.memory() == whole
