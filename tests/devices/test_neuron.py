"""Trainium: which package is let in, which cores, what is kept, and what children see."""

import importlib
import json
import os
import sys
import types

import pytest
import torch

from adapters import neuron, pick
from tests.devices import emulated

FAMILY = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a function that installs a distribution of a version whose package only raises."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(neuron.CORES, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)

    def install(version):
        about = tmp_path / f"torch_neuronx-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {version}\n")
        package = tmp_path / "torch_neuronx"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
        importlib.invalidate_caches()

    return install


def refused(name="neuron"):
    with pytest.raises(ValueError, match="device neuron") as told:
        pick.device(name)
    assert "\n" not in str(told.value)
    assert neuron.PACKAGE not in sys.modules
    return str(told.value)


def test_a_missing_package_is_told_with_the_family_to_install(site):
    told = refused()
    assert "torch-neuronx is not installed" in told
    assert f"torch-neuronx=={FAMILY}.*" in told


@pytest.mark.parametrize("version", ["1.0", "1.0.0"])
def test_the_placeholder_of_pypi_is_told_and_never_imported(site, version):
    site(version)
    told = refused()
    assert f"torch-neuronx {version} is the placeholder" in told
    assert "pip uninstall" in told


@pytest.mark.parametrize("version", ["2.9.0.2.11", "99.14.3.0", f"{FAMILY}9.0", "1.13.1.1.19", "unknown"])
def test_a_package_of_another_family_is_told_and_never_imported(site, version):
    site(version)
    told = refused()
    assert f"torch-neuronx {version} is not of the family of torch {torch.__version__}" in told


@pytest.mark.parametrize("version", [f"{FAMILY}.3.0", f"{FAMILY}.3.0.1234+abc"])
def test_a_package_that_fits_is_imported_and_what_it_raises_is_told(site, version, monkeypatch):
    monkeypatch.delenv(neuron.CACHE, raising=False)
    site(version)
    assert "RuntimeError: imported" in refused()
    os.environ.pop(neuron.CACHE, None)


def test_a_package_that_pytorch_imported_by_itself_keeps_its_own_cache_and_that_is_told(site, monkeypatch):
    monkeypatch.delenv(neuron.CACHE, raising=False)
    monkeypatch.setitem(sys.modules, neuron.PACKAGE, types.ModuleType(neuron.PACKAGE))
    site(f"{FAMILY}.3.0")
    neuron.load()
    assert neuron.CACHE not in os.environ
    found = {check.name: check for check in neuron.checks()}["compile cache"]
    assert not found.passed
    assert found.told == f"not kept between restarts: set {neuron.CACHE} before the run"


def test_auto_passes_a_broken_package_over_and_says_so(site):
    site("1.0")
    found = pick.device("auto")
    assert found.name == "cpu"
    assert "neuron passed over: torch-neuronx 1.0 is the placeholder" in pick.why(found)
    assert neuron.PACKAGE not in sys.modules


def test_other_devices_never_look_at_the_package(site):
    site(f"{FAMILY}.3.0")
    assert pick.device("cpu").name == "cpu"
    assert neuron.PACKAGE not in sys.modules


@pytest.mark.parametrize("cores", ["0,1", "0-1", "2,3", "2-3", "0-3", "0,1,2,3", "0-1,2-3", " 3, 2 "])
def test_pairs_and_all_four_cores_are_taken(cores):
    assert neuron.cores_fault({neuron.CORES: cores}, "trn2.3xlarge") is None


@pytest.mark.parametrize("cores", ["0", "0,2", "1,2", "1-2", "0-2", "1-3", "4,5", "0-7"])
@pytest.mark.parametrize("machine", ["trn2.3xlarge", ""])
def test_other_sets_of_cores_are_refused(cores, machine):
    told = neuron.cores_fault({neuron.CORES: cores}, machine)
    assert told is not None
    assert f"{neuron.CORES}={cores}" in told
    assert "0,1 or 2,3 or 0-3" in told


@pytest.mark.parametrize("cores", ["a", "0,0", "1-0", "0;1", "-1", "0,"])
@pytest.mark.parametrize("machine", ["trn2.3xlarge", "trn2.48xlarge"])
def test_what_names_no_cores_is_refused(cores, machine):
    assert "core numbers were wanted" in str(neuron.cores_fault({neuron.CORES: cores}, machine))


def test_a_larger_machine_has_more_cores():
    assert neuron.cores_fault({neuron.CORES: "8-11"}, "trn2.48xlarge") is None
    assert neuron.cores_fault({}, "trn2.3xlarge") is None


def _picked(name):
    before = "torch_neuronx" in sys.modules
    device = pick.device(name)
    place = torch.ones(2, device=device.type).device.type
    passed = {check.name: check.passed for check in device.checks()}
    return [
        before,
        device.name,
        place,
        pick.why(device, name),
        os.environ[neuron.CACHE],
        passed,
        device.memory(),
    ]


CODE = "import json, sys; from tests.devices import test_neuron as t; print(json.dumps(t.{}))"


def told(call, **variables):
    done = emulated.command("-c", CODE.format(call), variables=variables)
    assert done.status == 0, done.err
    return json.loads(done.out)


def test_auto_finds_a_package_that_fits_and_takes_its_device():
    # Nothing is written here: the emulated package compiles nothing.
    before, name, place, why, cache, passed, memory = told("_picked('auto')", XDG_CACHE_HOME="/srv/cache")
    assert not before
    assert (name, place, why) == ("neuron", "neuron", "accelerator seen")
    assert cache == "/srv/cache/espalier/neuron"
    assert passed == {
        "torch-neuronx": True, "cores": True, "compile cache": True, "a product of matrices": True
    }  # fmt: skip
    assert memory == 24 << 30


def test_a_cache_that_was_named_stays_and_a_temporary_one_is_told():
    _, _, _, why, cache, passed, _ = told("_picked('neuron')", **{neuron.CACHE: "/tmp/neff_cache"})
    assert (cache, why) == ("/tmp/neff_cache", "asked for")
    assert not passed["compile cache"]


def _hidden():
    try:
        pick.device("neuron")
    except ValueError as problem:
        return [pick.device("auto").name, str(problem), "torch_neuronx" in sys.modules]
    return []


def test_children_that_the_device_is_hidden_from_neither_see_nor_import_it():
    name, problem, imported = told("_hidden()", **neuron.DEVICE.hide)
    assert name == "cpu"
    assert "hides the cores" in problem
    assert not imported


@pytest.mark.parametrize(
    ("words", "variables", "told"),
    [
        (["--dtype", "float64"], {}, "dtype float64 does not exist on neuron; use one of bfloat16, float32"),
        ([], {neuron.CORES: "0,2"}, "a trn2.3xlarge runs on cores 0,1 or 2,3 or 0-3 only"),
    ],
)
def test_what_trainium_lacks_is_refused_by_name_before_a_model_is_loaded(tmp_path, words, variables, told):
    command = (
        "-m",
        "shell.train",
        "sft",
        "--model",
        str(tmp_path),
        "--dataset",
        "demo",
        "--device",
        "neuron",
    )
    done = emulated.command(*command, "--output_dir", str(tmp_path / "out"), *words, variables=variables)
    assert done.status == 2
    assert told in done.err
    assert done.err.count("\n") == 1
