"""Run as a program: a training run that dies by SIGKILL again and again, and must end like one that did not.

    python -m tests.shell.killed ROOT SEED moments=COUNT   at random moments after the first step
    python -m tests.shell.killed ROOT SEED lines=COUNT     at random lines of what saves, logs and loops
    python -m tests.shell.killed ROOT SEED saves=COUNT     when a file is put on the disk
    python -m tests.shell.killed ROOT SEED draws=COUNT     in the middle of completions, at a token's draw

Children are forked from one process that has torch loaded. Further options of the run: OPTIONS (JSON).
"""

import json
import os
import pathlib
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable

import torch

from adapters import sampling
from shell import answers, buffer, checkpoint, files, jobs, log, loop, refill, rollout, rounds, table
from shell import finish as ending
from tests.shell import runs

WATCHED = (
    answers,
    buffer,
    checkpoint,
    files,
    ending,
    jobs,
    log,
    loop,
    refill,
    rollout,
    rounds,
    sampling,
    table,
)
OURS = {module.__file__ for module in WATCHED}
STEPS = 8
OPTIONS = {"max_steps": STEPS, "save_steps": 1, "logging_steps": 3}
OPTIONS |= json.loads(os.environ.get("OPTIONS", "{}"))


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
    """Die some time after the first step that is logged."""
    timer = threading.Timer(generator.uniform(0, 0.5), os.kill, (os.getpid(), signal.SIGKILL))
    record = log.Journal.log

    def body():
        timer.args = (os.getpid(), signal.SIGKILL)
        timer.daemon = True

        def first(*args):
            log.Journal.log = record
            timer.start()
            record(*args)

        log.Journal.log = first
        return train(folder)

    return status(fork(body))


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
        os.fsync = lambda descriptor: None  # what a killed process wrote stays without it
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


def at_a_draw(folder: pathlib.Path, generator: random.Random) -> int:
    """Die when a token of some completions has been drawn and the next has not."""
    number, count, draw = generator.randint(2, 30), 0, sampling.draws.draw

    def drawn(*args):
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(*args)

    def body():
        sampling.draws.draw = drawn
        return train(folder)

    return status(fork(body))


def main(root: pathlib.Path, seed: int, plan: dict[str, int]) -> None:
    """Let runs die, and start them again, until they have died often enough; then compare."""
    generator = random.Random(seed)
    ways = {"moments": at_a_moment, "lines": at_a_line, "saves": at_a_save, "draws": at_a_draw}
    assert status(fork(lambda: train(root / "whole"))) == 0
    for how, count in plan.items():
        deaths = 0
        while deaths < count:
            code = ways[how](root / "killed", generator)
            assert code in (0, -signal.SIGKILL), code
            deaths += code != 0
            if code == 0:
                finish(root)
        finish(root)
        print(f"{how} {deaths}")


def finish(root: pathlib.Path) -> None:
    """Run to the end and compare; then away with it."""
    assert status(fork(lambda: train(root / "killed"))) == 0
    runs.same(root / "whole", root / "killed", STEPS)
    left = {path.name for path in (root / "killed").iterdir()}
    assert left == {path.name for path in (root / "whole").iterdir()}, left
    shutil.rmtree(root / "killed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    counts = dict(word.split("=") for word in sys.argv[3:])
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), {how: int(count) for how, count in counts.items()})
