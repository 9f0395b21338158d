"""Run as a program: dies by SIGKILL at chosen instants of a save, and checks what is left each time.

    python -m tests.shell.dying lines ROOT [STRIDE]      at every STRIDE-th line of our code
    python -m tests.shell.dying moments ROOT COUNT SEED  at random moments, inside of libraries too

Children are forked from one process that has torch loaded, so that hundreds of deaths take seconds.
"""

import os
import pathlib
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable

import torch

from shell import checkpoint, files

OURS = {checkpoint.__file__, files.__file__}


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(40_000) * step, "bias": torch.full((3,), float(step), dtype=torch.bfloat16)}


def save(root: pathlib.Path, step: int) -> None:
    checkpoint.save(
        root, step, state(step), {"step": step}, extra=lambda folder: (folder / "more").write_text("x")
    )
    checkpoint.prune(root, 1, newest=step)


def check(root: pathlib.Path, steps: set[int]) -> int:
    """Return the step of the newest checkpoint, having compared it with what it must hold."""
    told: list[str] = []
    newest = checkpoint.newest(root, note=told.append)
    halves = [folder.name for folder in root.glob("checkpoint-*") if checkpoint.fault(folder)]
    assert not halves, halves
    assert newest is not None, f"nothing is left: {list(root.iterdir())}, {told}"
    assert not told, told
    saved = checkpoint.load(newest)
    assert saved.step in steps, (saved.step, steps)
    assert saved.values == {"step": saved.step}
    assert all(torch.equal(saved.tensors[path], tensor) for path, tensor in state(saved.step).items())
    return saved.step


def fork(body: Callable[[], None]) -> int:
    """Run `body` in a child that ends with it; return the child's number."""
    child = os.fork()
    if not child:
        body()
        os._exit(0)
    return child


def killed_at(line: int, body: Callable[[], None]) -> None:
    """Run `body` and die before the given line of our code."""
    count = 0

    def local(frame, event, arg):
        nonlocal count
        if event == "line":
            count += 1
            if count == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return local

    sys.settrace(lambda frame, event, arg: local if frame.f_code.co_filename in OURS else None)
    body()
    sys.settrace(None)


def lines(root: pathlib.Path, stride: int) -> None:
    """Die at lines of a save of a new step, then of a step that is there already."""
    for new in (2, 1):
        line, alive, seen = 1, False, set()
        while not alive:
            shutil.rmtree(root, ignore_errors=True)
            save(root, 1)
            child = fork(lambda new=new, line=line: killed_at(line, lambda: save(root, new)))
            alive = os.waitpid(child, 0)[1] == 0
            checkpoint.sweep(root)
            seen.add(check(root, {1, new}))
            save(root, 3)
            assert check(root, {3}) == 3
            assert [path.name for path in root.iterdir()] == ["checkpoint-3"]
            line += stride
        assert seen == {1, new}, seen
        print(f"died at {line // stride - 1} lines")


def moments(root: pathlib.Path, count: int, seed: int) -> None:
    """Die at random moments of a loop of saves, and go on from what is left."""
    generator = random.Random(seed)
    save(root, 1)
    step = 1
    for _ in range(count):

        def loop(first: int = step + 1) -> None:
            for new in range(first, 1 << 30):
                save(root, new)

        child = fork(loop)
        timer = threading.Timer(generator.uniform(0.001, 0.06), os.kill, (child, signal.SIGKILL))
        timer.start()
        os.waitpid(child, 0)
        timer.join()
        step = check(root, set(range(step, 1 << 20)))
        checkpoint.sweep(root)
        assert check(root, {step}) == step
    print(f"came to step {step}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: (
        None
    )  # what a killed process wrote stays; only a machine that dies needs the disk
    what, folder, *numbers = sys.argv[1:]
    {"lines": lines, "moments": moments}[what](pathlib.Path(folder), *map(int, numbers))
