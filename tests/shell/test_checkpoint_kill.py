import pytest

from tests import warm

CUT_OFF = """
import pathlib, resource, sys, torch
from shell import checkpoint, mistake
root = pathlib.Path(sys.argv[1])
checkpoint.save(root, 1, {"w": torch.ones(10)}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoint.save(root, 2, {"w": torch.ones(100_000)}, {})
except mistake.Mistake as told:
    print(told)
"""


@pytest.mark.parametrize("how", [("lines", "6"), ("moments", "15", "0")], ids=lambda how: how[0])
def test_killed_at_any_instant_of_a_save_the_newest_checkpoint_is_whole_and_right(tmp_path, how):
    what, *numbers = how
    code, out, err = warm.program("tests.shell.dying", what, str(tmp_path / "run"), *numbers)
    assert code == 0, err
    assert out


def test_a_file_that_the_system_refuses_to_let_grow_is_told_and_cleaned_up(tmp_path):
    code, out, err = warm.program("-c", CUT_OFF, str(tmp_path))
    assert code == 0, err
    told = f"checkpoint 2 (400,000 bytes of tensors) could not be saved in {tmp_path}: there is no room"
    assert told in out
    assert out.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
