"""GPUs on a machine that has none: what torch would say is pretended, or parsed by torch itself."""

import itertools
import json
import multiprocessing
import subprocess
import sys

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from adapters import cuda, pick, rocm

LISTS = st.one_of(
    st.lists(st.integers(0, 7), unique=True, min_size=1, max_size=4).map(lambda n: ",".join(map(str, n))),
    st.sampled_from(["", "-1", "GPU-3b1f", "0,1,2,3"]),
)
NAMES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def gpu(monkeypatch, *, hip=None, built="13.0", available=True, narrow=True):
    """Pretend that there is a GPU, of AMD's where `hip` is a version."""
    found = torch.device("cuda") if available else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None if hip else built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: narrow)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (60 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    started = []
    monkeypatch.setattr(multiprocessing, "set_start_method", started.append)
    return started


@pytest.mark.parametrize(("hip", "name"), [(None, "cuda"), ("7.1", "rocm")])
def test_auto_takes_the_gpu_by_its_maker(monkeypatch, hip, name):
    gpu(monkeypatch, hip=hip)
    found = pick.device("auto")
    assert found == pick.device(name)
    assert (found.name, found.type, found.dtype) == (name, "cuda", torch.bfloat16)
    assert found.memory() == 60 << 30
    assert pick.why(found) == "accelerator seen"


@pytest.mark.parametrize("hip", [None, "7.1"])
@pytest.mark.parametrize(("rank", "index"), [(None, 0), ("0", 0), ("1", 1), ("3", 1)])
def test_a_rank_takes_its_own_gpu_before_anything_runs_on_one(monkeypatch, hip, rank, index):
    gpu(monkeypatch, hip=hip)
    if rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", rank)
    came = []
    monkeypatch.setattr(torch.cuda, "set_device", came.append)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: came.append("asked")
    )
    pick.device("auto")
    assert came == [index, "asked"]


@pytest.mark.parametrize(("before", "wanted"), [(None, ["spawn"]), ("fork", [])])
def test_children_of_a_process_with_a_gpu_are_spawned_unless_it_was_chosen_before(
    monkeypatch, before, wanted
):
    started = gpu(monkeypatch)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: before)
    pick.device("cuda")
    assert started == wanted
    pick.device("cpu")
    assert started == wanted


def test_a_gpu_that_only_emulates_bfloat16_takes_float32(monkeypatch):
    gpu(monkeypatch, narrow=False)
    found = pick.device("cuda")
    assert found.dtype == torch.float32
    assert torch.bfloat16 not in found.dtypes


@pytest.mark.parametrize(
    ("name", "pretended", "told"),
    [
        ("cuda", {"built": None, "available": False}, "is built without CUDA"),
        ("cuda", {"available": False}, "sees no NVIDIA GPU"),
        ("cuda", {"hip": "7.1"}, "--device rocm was wanted"),
        ("rocm", {"available": False}, "is built without ROCm"),
        ("rocm", {"hip": "7.1", "available": False}, "sees no AMD GPU"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_with_what_to_do(monkeypatch, name, pretended, told):
    gpu(monkeypatch, **pretended)
    with pytest.raises(ValueError, match=told) as refused:
        pick.device(name)
    assert "\n" not in str(refused.value)


def test_checks_tell_a_gpu_that_others_fill_and_one_that_does_not_compute(monkeypatch):
    gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"name": "Some GPU"})
    )
    found = {check.name: check for check in pick.device("cuda").checks()}
    assert found["GPUs"].told == "2 x Some GPU"
    assert not found["free memory"].passed
    assert found["bfloat16"].passed
    assert not found["a product of matrices"].passed  # this machine has no GPU


def test_a_product_on_the_cpu_is_right():
    assert cuda.product("cpu").passed


def _parsed(version, environments):
    """Return what torch makes of each environment, its own parsing run in a process that has nothing else."""
    code = (
        "import json, os, sys, torch\n"
        "torch.version.hip = json.loads(sys.argv[1])\n"
        "names = json.loads(sys.argv[2])\n"
        "found = []\n"
        "for given in json.loads(sys.argv[3]):\n"
        "    for name in names:\n"
        "        os.environ.pop(name, None)\n"
        "    os.environ.update(given)\n"
        "    try:\n"
        "        found.append(torch.cuda._parse_visible_devices())\n"
        "    except RuntimeError as problem:\n"
        "        found.append(str(problem))\n"
        "print(json.dumps(found))\n"
    )
    words = [json.dumps(version), json.dumps(NAMES), json.dumps(environments)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _environments():
    """List what a launcher may have set, each variable to each kind of value or not at all."""
    values = (None, "", "0", "0,1", "3")
    return [
        {name: value for name, value in zip(NAMES, chosen, strict=True) if value is not None}
        for chosen in itertools.product(values, repeat=3)
    ]


def test_children_of_a_rocm_run_see_no_gpu_whatever_was_set():
    given = _environments()
    assert set(map(str, _parsed("7.1", [{**one, **rocm.DEVICE.hide} for one in given]))) == {"[]"}


def test_cudas_variable_alone_would_leave_gpus_of_rocm_in_sight():
    left = _parsed("7.1", [{**one, **cuda.DEVICE.hide} for one in _environments()])
    assert [0] in left
    assert [0, 1] in left


def test_children_of_a_cuda_run_see_no_gpu_whatever_was_set():
    given = _environments()
    assert set(map(str, _parsed(None, [{**one, **cuda.DEVICE.hide} for one in given]))) == {"[]"}


@hypothesis.given(st.dictionaries(st.sampled_from(NAMES), LISTS))
def test_no_value_of_any_variable_undoes_the_hiding(given):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.1")
        for name in NAMES:
            patch.delenv(name, raising=False)
        for name, value in {**given, **rocm.DEVICE.hide}.items():
            patch.setenv(name, value)
        assert torch.cuda._parse_visible_devices() == []
