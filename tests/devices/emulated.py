"""Python in another process on which an emulated `neuron` device is installed, as AWS' package would be.

In the other process `import torch_neuronx` registers the device, and a distribution `torch-neuronx` of the
family of the installed torch is found beside it: nothing in the library knows that it is not the real one.
"""

import fcntl
import hashlib
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import pytest
import torch

from tests import paths

SOURCE = pathlib.Path(__file__).parent / "fixtures" / "torch_neuronx"
COUNTS = "EMULATED_NEURON_COUNTS"  # read by the package


@attrs.frozen(kw_only=True)
class Done:
    """A command that has ended.

    Attributes:
        status, out, err: exit status and what was printed.
        counts: as of `counts()`; empty where the device was never registered.
    """

    status: int
    out: str
    err: str
    counts: Mapping[str, Any]


def run(function: Callable[..., Any], *arguments: Any, variables: Mapping[str, str] | None = None) -> Any:
    """Call a function of a module in another process; arguments and what it returns pass as JSON.

    The device is registered before the call. `counts()` and `forget()` work inside.

    Args:
        function: stands at the top of a module that imports without the device.
        arguments: what JSON can hold.
        variables: environment variables of the process.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = pathlib.Path(folder) / "answer.json"
        name = f"{_module(function)}:{function.__qualname__}"
        command = [sys.executable, "-m", __name__, name, json.dumps(arguments), str(answer)]
        done = _started(command, environment(variables))
        assert done.returncode == 0, f"{name} failed:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        return json.loads(answer.read_text())


def command(*words: str, variables: Mapping[str, str] | None = None) -> Done:
    """Run `python WORDS`, as `command("-m", "shell.train", "sft", ...)`, where the device is installed.

    Args:
        words: after `python`.
        variables: environment variables of the process.
    """
    with tempfile.TemporaryDirectory() as folder:
        counted = pathlib.Path(folder) / "counts.json"
        done = _started([sys.executable, *words], environment({COUNTS: str(counted), **(variables or {})}))
        found = json.loads(counted.read_text()) if counted.is_file() else {}
    return Done(status=done.returncode, out=done.stdout, err=done.stderr, counts=found)


def counts() -> dict[str, Any]:
    """Return what was compiled since `forget()`, in a process that has the device.

    Returns:
        `forward` and `backward`: calls of the compiler; `graphs`: one {pass, shapes of the inputs} each, in
        their order; `signatures`: {operator(shapes, dtypes): calls} of what ran outside of graphs.
    """
    return importlib.import_module("torch_neuronx").counts()


def forget() -> None:
    """Count from zero, in a process that has the device."""
    importlib.import_module("torch_neuronx").forget()


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a process that finds the emulated package; skip where it cannot be built."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    road = os.pathsep.join((str(package()), str(paths.ROOT)))
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONPATH": road, **(variables or {})}


def package() -> pathlib.Path:
    """Return the folder that holds the package and its distribution, built now unless it is there."""
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"the emulated device needs {' and '.join(missing)}")
    folder = pathlib.Path(tempfile.gettempdir()) / f"espalier-emulated-{os.getuid()}-{_hash()}"
    if folder.is_dir():
        return folder
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=tempfile.gettempdir()) as made:
                _build(pathlib.Path(made) / "package")
                (pathlib.Path(made) / "package").rename(folder)
    return folder


def _module(function: Callable[..., Any]) -> str:
    """Return the module of a function, which may be the one that was started as a program."""
    spec = getattr(sys.modules[function.__module__], "__spec__", None)
    return function.__module__ if spec is None else spec.name


def _hash() -> str:
    """Name what the build depends on."""
    sources = b"".join(path.read_bytes() for path in _sources())
    return hashlib.blake2b(sources + f"{torch.__version__} {sys.version}".encode(), digest_size=8).hexdigest()


def _sources() -> Iterator[pathlib.Path]:
    """Walk the package's files."""
    yield from sorted(path for path in SOURCE.iterdir() if path.suffix in (".py", ".cpp"))


def _build(folder: pathlib.Path) -> None:
    """Write the package with its compiled module, and the distribution that a package manager would leave."""
    place = folder / "torch_neuronx"
    place.mkdir(parents=True)
    for path in _sources():
        shutil.copy(path, place)
    # Loading the module is part of building it, and would give this process the device.
    code = (
        "import sys, torch.utils.cpp_extension as cpp\n"
        "cpp.load('_device', [sys.argv[1] + '/_device.cpp'], build_directory=sys.argv[1],\n"
        "         extra_cflags=['-O0', '-g0', '-std=c++20'])\n"
    )
    done = _started([sys.executable, "-c", code, str(place)], {**os.environ, "MAX_JOBS": "1"})
    assert done.returncode == 0, f"the emulated device does not build:\n{done.stderr[-8000:]}"
    family = ".".join(torch.__version__.split(".")[:2])
    about = folder / f"torch_neuronx-{family}.0+emulated.dist-info"
    about.mkdir()
    text = f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {family}.0+emulated\n"
    (about / "METADATA").write_text(text)


def _started(command: list[str], variables: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    return subprocess.run(command, cwd=paths.ROOT, env=dict(variables), capture_output=True, text=True)


def _answer(name: str, arguments: str, answer: str) -> None:
    """Register the device, call a function and write down what it returns."""
    importlib.import_module("torch_neuronx")
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    pathlib.Path(answer).write_text(json.dumps(function(*json.loads(arguments))))


if __name__ == "__main__":
    _answer(*sys.argv[1:])
    # The device's library takes its threads down in no order: what is written is written.
    os._exit(0)
