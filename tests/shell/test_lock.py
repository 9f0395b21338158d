import os
import signal
import subprocess
import sys

import pytest

from shell import lock, mistake, written
from tests import paths

HOLD = """
import os, sys
from shell import lock
with lock.hold(sys.argv[1]):
    # A worker that outlives its killed parent, as one of a data loader might.
    told, tell = os.pipe()
    worker = os.fork()
    if not worker:
        os.write(tell, b"!")  # it runs, and has let go of what it inherited
        sys.stdin.read()
        os._exit(0)
    os.read(told, 1)
    print(os.getpid(), flush=True)
    os.waitpid(worker, 0)
"""


def holder(folder):
    command = [sys.executable, "-c", HOLD, str(folder)]
    return subprocess.Popen(
        command, cwd=paths.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def test_a_folder_that_another_run_holds_is_refused_and_free_again_once_that_run_is_killed(tmp_path):
    with holder(tmp_path) as other:
        number = other.stdout.readline().strip()
        told = f"output_dir {tmp_path} is in use .*process {number}"
        with pytest.raises(mistake.Mistake, match=told), lock.hold(tmp_path):
            pytest.fail("two runs hold one folder")
        os.kill(int(number), signal.SIGKILL)
        other.wait()
        with lock.hold(tmp_path):
            assert (tmp_path / written.LOCK).read_text().strip() == str(os.getpid())


def test_one_process_cannot_hold_a_folder_twice_but_again_afterwards(tmp_path):
    with lock.hold(tmp_path / "new" / "run"):
        with pytest.raises(mistake.Mistake), lock.hold(tmp_path / "new" / "run"):
            pytest.fail("one folder is held twice")
        with lock.hold(tmp_path / "other"):
            pass
    with lock.hold(tmp_path / "new" / "run"):
        pass


def test_an_error_inside_frees_the_folder(tmp_path):
    with pytest.raises(RuntimeError), lock.hold(tmp_path):
        raise RuntimeError
    with lock.hold(tmp_path):
        pass


def test_an_output_dir_that_is_a_file_is_told(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(mistake.Mistake, match="out cannot be written"), lock.hold(tmp_path / "out"):
        pytest.fail("a file was held")
