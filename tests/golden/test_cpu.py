"""The smallest run gives the numbers that were written down, to the last bit."""

import json

import pytest

from tests.golden import cpu


def test_ten_steps_give_the_numbers_that_were_written_down(tmp_path):
    known = json.loads(cpu.FILE.read_text())
    if cpu.kernels() not in known:
        pytest.skip(f"no golden numbers for {cpu.kernels()}; python -m tests.golden.cpu writes them")
    assert cpu.run(tmp_path / "run") == known[cpu.kernels()]
