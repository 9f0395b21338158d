"""Run as a program: a training run that dies by SIGKILL again and again, and must end like one that did not.

    python -m tests.shell.killed moments ROOT COUNT SEED   at random moments after the first step
    python -m tests.shell.killed lines ROOT COUNT SEED     at random lines of what saves, logs and loops
    python -m tests.shell.killed saves ROOT COUNT SEED     when a file is put on the disk

Children are forked from one process that has torch loaded. Extra options of the run come as OPTIONS (JSON).
"""

import json
import os
import pathlib
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch

from shell import checkpoint, files, finish, jobs, log, loop
from tests.shell import runs

OURS = {module.__file__ for module in (checkpoint, files, finish, jobs, log, loop)}
STEPS = 8
OPTIONS = {"max_steps": STEPS, "save_steps": 1, "logging_steps": 3, **json.loads(os.environ.get("OPTIONS", "{}"))}


def train(folder: pathlib.Path) -> int:
    """Train in this process, silently."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    return runs.run(folder, **OPTIONS)


def fork(body: Callable[[], int]) -> int:
    """Run `body` in a child that ends with its status; return the child's number."""
    child = os.fork()
    if not child:
        status = 1
        try:
            status = body()
        finally:
            os._exit(status)
    return child


def status(child: int) -> int:
    """Wait for a child and return its status, negative after a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def at_a_moment(folder: pathlib.Path, generator: random.Random) -> int:
    """Die some time after the first step was logged."""
    child = fork(lambda: train(folder))
    file = folder / "metrics.jsonl"
    while not (file.exists() and file.stat().st_size) and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    timer = threading.Timer(generator.uniform(0, 0.5), os.kill, (child, signal.SIGKILL))
    timer.start()
    code = status(child)
    timer.cancel()
    return code


def at_a_line(folder: pathlib.Path, generator: random.Random) -> int:
    """Die before a line of ours; far lines are as likely as near ones, so some runs go far."""
    line, count = int(10 ** generator.uniform(1.5, 3.7)), 0

    def local(frame, event, arg):
        nonlocal count
        count += event == "line"
        if count == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return local

    def body():
        sys.settrace(lambda frame, event, arg: local if frame.f_code.co_filename in OURS else None)
        return train(folder)

    return status(fork(body))


def at_a_save(folder: pathlib.Path, generator: random.Random) -> int:
    """Die when a file is about to be put on the disk."""
    number, count = generator.randint(1, 40), 0

    def fsync(descriptor):
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def body():
        os.fsync = fsync
        return train(folder)

    return status(fork(body))


def main(how: str, root: pathlib.Path, count: int, seed: int) -> None:
    """Let a run die, and start it again, until it has died often enough; then compare."""
    generator = random.Random(seed)
    die = {"moments": at_a_moment, "lines": at_a_line, "saves": at_a_save}[how]
    assert status(fork(lambda: train(root / "whole"))) == 0
    deaths = 0
    while deaths < count:
        code = die(root / "killed", generator)
        assert code in (0, -signal.SIGKILL), code
        deaths += code != 0
        if code == 0:
            assert status(fork(lambda: train(root / "killed"))) == 0
            runs.same(root / "whole", root / "killed", STEPS)
            shutil.rmtree(root / "killed")
    assert status(fork(lambda: train(root / "killed"))) == 0
    runs.same(root / "whole", root / "killed", STEPS)
    left = {path.name for path in (root / "killed").iterdir()}
    assert left == {path.name for path in (root / "whole").iterdir()}, left
    print(f"died {deaths} times")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] != "moments":
        os.fsync = lambda descriptor: None  # what a killed process wrote stays; only a machine that dies needs it
    main(sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
