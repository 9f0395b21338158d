"""The page that shows how a loss is added shows what works: its diffs apply, the tests they bring pass."""

import os
import re
import shutil
import subprocess
import sys

from tests import paths

PAGE = (paths.ROOT / "docs" / "adding-a-loss.md").read_text()
TREES = ("core", "adapters", "shell", "tests")
ALONE = ("__pycache__", "benchmarks", "recipes")
ASKED = """
from core.losses import policy, preference
from shell import config, methods

few = ["--model", "tiny", "--dataset", "rows.jsonl"]
dpo = methods.dpo(config.parse(["dpo", *few, "--loss_type", "dpop", "--dpop_lambda", "3"]).options)
assert (dpo.loss.func, dpo.loss.keywords) == (preference.dpop, {"beta": 0.1, "dpop_lambda": 3.0})
grpo = methods.BUILT["grpo"](config.parse(["grpo", *few, "--loss_type", "topr"]).options)
assert (grpo.loss.keywords["loss"], grpo.couples) == (policy.topr, "sample")
"""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def run(folder, *words):
    """Run Python in a copy of the tree; return what it printed."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**plain, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_the_diffs_apply_and_the_tests_that_they_bring_pass(tmp_path):
    for name in TREES:
        shutil.copytree(paths.ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns(*ALONE))
    shutil.copy(paths.ROOT / "pyproject.toml", tmp_path)
    for diff in blocks("diff"):
        done = subprocess.run(
            ["git", "apply", "-"], input=diff, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    files = ("test_preference_loops.py", "test_policy_loops.py")
    told = run(
        tmp_path,
        *("-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/properties/test_algorithms.py"),
        *(f"tests/core/{file}" for file in files),
        *("-k", "((dpop or topr) and not compiled) or every_loss_is or named_loss"),
    )
    assert set(re.findall(r"\[(preferences dpop|topr)\] PASSED", told)) == {"preferences dpop", "topr"}
    run(tmp_path, "-c", ASKED)


def test_the_algorithm_without_a_change_of_the_library_has_every_property():
    (code,) = blocks("python")
    exec(code, {})
