"""Runs the tests of torch.compile in a process of their own: shape checks would break its graphs."""

import os
import subprocess
import sys

import jaxtyping
import pytest

from core import schedules
from tests import paths, shapes

MARK = "pytest.mark.plain"  # only files that bear it are loaded


def test_the_plain_tests_pass_in_a_process_without_shape_checks():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment["ESPALIER_PLAIN"] = "1"
    files = sorted(
        str(path) for path in (paths.ROOT / "tests").rglob("test_*.py") if MARK in path.read_text()
    )
    command = [sys.executable, "-m", "pytest", "-m", "plain", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=paths.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]


def test_calls_into_the_core_are_checked_in_every_other_process():
    with pytest.raises(jaxtyping.TypeCheckError):
        schedules.constant(num_warmup="three")


def test_a_function_inside_of_another_is_checked_each_time_it_is_made_as_it_says_itself():
    def made(hint):
        @jaxtyping.jaxtyped(typechecker=shapes.checked)
        def inner(number: hint) -> hint:
            return number

        return inner

    for _ in range(2):
        assert made(int)(3) == 3
        assert made(str)("three") == "three"
        for hint, wrong in ((int, "three"), (str, 3)):
            with pytest.raises(jaxtyping.TypeCheckError):
                made(hint)(wrong)


@pytest.mark.plain
def test_calls_into_the_core_are_not_checked_in_a_plain_process():
    assert not hasattr(schedules.constant, "__wrapped__")
