"""How benchmarks take time: contenders by turns in one process, medians of ratios."""

import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def by_turns(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warm: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Run each contender once a round; the order turns from round to round.

    Args:
        contenders: what is timed, by name.
        rounds: how often each runs.
        warm: run all once more before, which does not count; without it the caller has done so.
        clock: tells seconds; `time.process_time`, with one thread, leaves out what neighbors take.

    Returns:
        Seconds of each round by name.
    """
    names, times = list(contenders), {name: [] for name in contenders}
    for turn in range(0 if warm else 1, rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = clock()
            contenders[name]()
            if turn:
                times[name].append(clock() - start)
    return times


def ratio(slow: list[float], fast: list[float]) -> float:
    """Return how many times faster `fast` is: the median over rounds of the ratio inside a round."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def peak_bytes(work: Callable[[], Any]) -> int:
    """Return by how much a piece of work raises this process's resident memory at its highest (Linux)."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _resident("VmRSS")
    work()
    return max(0, _resident("VmHWM") - before)


def _resident(name: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def machine() -> dict[str, Any]:
    """Describe where this was measured."""
    return {"processor": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}


def report(found: Any, path: str | None) -> None:
    """Print figures as JSON and write them where asked."""
    text = json.dumps(found, indent=2)
    print(text)
    if path:
        pathlib.Path(path).write_text(text + "\n")
