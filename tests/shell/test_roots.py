"""A stranger that answers to one of our package names is told plainly."""

import base64
import hashlib
import importlib.metadata
import pathlib
import subprocess
import sys

import pytest

from shell import mistake, roots
from tests import paths


def test_the_checkout_is_accepted():
    roots.check()


@pytest.mark.parametrize("name", ["core", "adapters"])
def test_a_package_in_the_current_folder_is_refused_in_one_line_with_status_two(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    command = [sys.executable, "-m", "shell.main", "env"]
    environment = {"PYTHONPATH": str(paths.ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"package {name}: found in {tmp_path / name}" in done.stderr
    assert "start from another folder" in done.stderr


def test_a_single_file_of_that_name_is_refused(tmp_path, monkeypatch):
    (tmp_path / "adapters.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "adapters", raising=False)
    with pytest.raises(mistake.Mistake, match=r"package adapters: it is the file .*adapters\.py"):
        roots.check()


def test_another_distribution_elsewhere_is_refused(tmp_path, monkeypatch):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "core", raising=False)
    with pytest.raises(mistake.Mistake, match="in an environment of its own"):
        roots.check()


class _Installed:
    """An installed distribution that wrote down a hash for one file of the checkout."""

    def __init__(self, content: bytes):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        file = importlib.metadata.PackagePath("adapters/__init__.py")
        file.hash = importlib.metadata.FileHash(f"sha256={digest}")
        file.dist = self
        self.files = [file]

    def locate_file(self, path):
        return pathlib.Path(paths.ROOT) / path


def test_a_first_file_that_was_written_over_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: _Installed(b"something else"))
    with pytest.raises(mistake.Mistake, match=r"another distribution .* wrote over it"):
        roots.check()


def test_a_first_file_that_is_as_installed_is_accepted(monkeypatch):
    content = (paths.ROOT / "adapters" / "__init__.py").read_bytes()
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: _Installed(content))
    roots.check()
