"""What is installed is what stands here, under the names that we say."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging import requirements, version

from tests import paths

PROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
ROOTS = ("core", "adapters", "shell")
# import name -> distribution, where they differ
DISTRIBUTIONS = {"yaml": "pyyaml", "attr": "attrs"}


def declared(*lists):
    """Return the requirements of some lists by normal name."""
    every = [requirements.Requirement(line) for each in lists for line in each]
    return {one.name.lower().replace("_", "-"): one for one in every}


def pinned():
    """Return the tested version of each name in constraints.txt."""
    lines = (paths.ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of what is packaged, and return its path."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed, and the wheel is built without downloads")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *ROOTS):
        # A build leaves files beside its sources: it gets links, in a folder of its own.
        (source / name).symlink_to(paths.ROOT / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(folder)]
    done = subprocess.run([*pip, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_roots_and_the_facade_and_nothing_else(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    wanted = {
        str(path.relative_to(paths.ROOT)) for root in ROOTS for path in (paths.ROOT / root).rglob("*.py")
    }
    assert set(names) == {re.sub(r"^shell/facade/", "espalier/", name) for name in wanted}


def test_the_installed_wheel_imports_from_another_folder(wheel, tmp_path):
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "-q",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    code = "import espalier, core, adapters, shell; print(espalier.Sample.__module__, espalier.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["core.plan.sample", str(site / "espalier" / "__init__.py")], done.stderr


def test_an_installed_root_that_another_distribution_wrote_over_is_told(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (site / "adapters" / "__init__.py").write_text("# from elsewhere\n")
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "shell.main", "env"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "another distribution" in done.stderr


def test_the_console_command_is_the_entry_point():
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="espalier")
    assert command.value == PROJECT["project"]["scripts"]["espalier"]
    assert callable(command.load())


def test_every_package_of_the_roots_is_listed():
    folders = {
        path.parent.relative_to(paths.ROOT)
        for root in ROOTS
        for path in (paths.ROOT / root).rglob("__init__.py")
    }
    names = {".".join(folder.parts) for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == names - {"shell.facade"} | {"espalier"}


def test_every_import_is_declared():
    known = declared(PROJECT["project"]["dependencies"], *EXTRAS.values())
    imported = set()
    for path in (path for root in ROOTS for path in (paths.ROOT / root).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    strangers = imported - set(sys.stdlib_module_names) - set(ROOTS) - {"espalier"}
    names = {DISTRIBUTIONS.get(name, name).replace("_", "-") for name in strangers}
    assert names - set(known) == set()


def test_the_tested_versions_satisfy_the_declared_ones():
    known = declared(PROJECT["project"]["dependencies"], *EXTRAS.values())
    for name, tested in pinned().items():
        assert name in known or name == "mkdocstrings-python", name
        assert name not in known or known[name].specifier.contains(version.Version(tested)), name


def test_every_dependency_has_a_tested_version():
    asked = declared(PROJECT["project"]["dependencies"], EXTRAS["test"], EXTRAS["docs"], EXTRAS["dev"])
    assert set(asked) - set(pinned()) == set()


def test_no_extra_brings_the_placeholder_of_trainium():
    assert "torch-neuronx" not in declared(PROJECT["project"]["dependencies"], *EXTRAS.values())
