"""Every example runs and prints what its first comment promises."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

from shell import config
from tests import paths

EXAMPLES = sorted((paths.ROOT / "examples").glob("*.py"))
FILES = sorted((paths.ROOT / "examples").glob("*.yaml"))
TRAINED = {
    "chain_sum.yaml": "grpo",
    "first_grpo.yaml": "grpo",
    "first_run.yaml": "sft",
    "first_warm_up.yaml": "sft",
}


def promise(path):
    """Return the text in backquotes after the word Prints in an example's docstring."""
    told = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.search(r"Prints[^`]*`([^`]+)`", " ".join(told.split()))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_example_prints_what_it_promises(path, tmp_path):
    if "reasoning_gym:" in path.read_text():
        pytest.importorskip("reasoning_gym")
    wanted = promise(path)
    assert wanted, "its docstring must say: Prints `...`"
    place = {"PYTHONPATH": str(paths.ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, path],
        cwd=tmp_path,
        env=os.environ | place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert wanted[1] in ran.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_of_options_is_right_and_names_files_that_are_there(path, monkeypatch):
    monkeypatch.chdir(paths.ROOT)
    chosen = config.parse([TRAINED[path.name], "--config", str(path)]).options
    assert chosen.chat_template is None or pathlib.Path(chosen.chat_template).is_file()


def test_examples_are_short_and_numbered():
    for number, path in enumerate(EXAMPLES, 1):
        assert path.name.startswith(f"{number:02d}_")
        assert len(path.read_text().splitlines()) <= 120
