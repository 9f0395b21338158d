"""Two runs of one job side by side: `python -m shell.compare A B`, folders that runs have written.

Speed, memory and cost come from run.json, losses from metrics.jsonl, and what was asked for from config.yaml:
options that change a result and differ are told first, since then it is not one job.
"""

import json
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import yaml

from shell import entry, mistake, options, written

USAGE = "python -m shell.compare A B"
HELP = f"""usage: {USAGE}

A and B are output folders of runs, as of one job on two devices. A table is printed: what each took, and B
over A. Cost needs --price_per_hour in the runs that are compared."""


@attrs.frozen(kw_only=True)
class Ended:
    """A run that is over.

    Attributes:
        folder: where it wrote.
        facts: its run.json.
        asked: its config.yaml.
        losses: by step, as they were logged.
    """

    folder: pathlib.Path
    facts: Mapping[str, Any]
    asked: Mapping[str, Any]
    losses: Mapping[int, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the exit status is returned."""
    words = list(sys.argv[1:] if argv is None else argv)
    return entry.guarded(lambda: run(words))


def run(words: Sequence[str]) -> int:
    """Read both runs and print what they took."""
    if {"-h", "--help", "help"} & set(words):
        print(HELP)
        return 0
    if len(words) != 2:
        raise mistake.Mistake(f"{len(words)} words came; two folders of runs were wanted: {USAGE}.")
    first, second = (read(pathlib.Path(word)) for word in words)
    print("\n".join([*differing(first, second), *table(first, second)]))
    return 0


def read(folder: pathlib.Path) -> Ended:
    """Read what a run left.

    Args:
        folder: its output folder.

    Raises:
        mistake.Mistake: it is none, or the run has not ended.
    """
    try:
        facts = json.loads((folder / written.RUN).read_text())
        asked = yaml.safe_load((folder / written.CONFIG).read_text())
        lines = [json.loads(line) for line in (folder / written.METRICS).read_text().splitlines()]
        losses = {line["step"]: line["loss"] for line in lines if isinstance(line.get("loss"), int | float)}
        facts["reached"]["trained_tokens"]
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as problem:
        told = getattr(problem, "strerror", None) or f"{type(problem).__name__}: {problem}"
        raise mistake.Mistake(
            f"{folder}: no run that has ended is there ({told}); name the output_dir of one."
        ) from problem
    return Ended(folder=folder, facts=facts, asked=asked, losses=losses)


def differing(first: Ended, second: Ended) -> list[str]:
    """Name the options that change a result and are not the same."""
    a, b = ({**one.asked, "algorithm": one.facts.get("algorithm")} for one in (first, second))
    names = ["algorithm", *(name for name in options.FIELDS if options.known(name).result)]
    lines = [f"  {name}: {a.get(name)} and {b.get(name)}" for name in names if a.get(name) != b.get(name)]
    return ["not one job, since these differ:", *lines, ""] if lines else []


def table(first: Ended, second: Ended) -> list[str]:
    """Lay both runs out in columns, with the ratio of the second to the first."""
    rows = [("", str(first.folder), str(second.folder), "second / first")]
    for name in ("device", "ranks", "attention"):
        rows.append((name, str(first.facts.get(name, "-")), str(second.facts.get(name, "-")), ""))
    for name, value in FIGURES.items():
        a, b = value(first), value(second)
        ratio = f"{b / a:.3g}" if a and b is not None else ""
        rows.append((name, _told(a), _told(b), ratio))
    rows.append(("furthest apart in loss", "", "", apart(first, second)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def apart(first: Ended, second: Ended) -> str:
    """Return the largest relative difference of two losses of one step."""
    shared = sorted({*first.losses} & {*second.losses})
    if not shared:
        return "no step was logged by both"
    gaps = {step: abs(first.losses[step] - second.losses[step]) for step in shared}
    gaps = {step: gap / max(abs(first.losses[step]), 1e-12) for step, gap in gaps.items()}
    worst = max(gaps, key=lambda step: math.inf if math.isnan(gaps[step]) else gaps[step])
    return f"{gaps[worst]:.2g} at step {worst}"


def _told(value: float | None) -> str:
    """Print a figure, or that there is none."""
    return "-" if value is None else f"{value:.6g}"


def _reached(name: str, scale: float = 1.0) -> Callable[[Ended], float | None]:
    """Return what reads a figure that a run reached; None where it has none."""

    def value(one: Ended) -> float | None:
        found = one.facts["reached"].get(name)
        return None if found is None else found * scale

    return value


def _on_device(one: Ended) -> float | None:
    """Return the most that the device's allocator gave out; None where nobody asked (memory_report)."""
    found = one.facts.get("memory", {}).get("reached", {})
    return found["peak_bytes"] / 2**30 if "allocator" in found.get("how", "") else None


def _seconds(*parts: str) -> Callable[[Ended], float | None]:
    """Return what adds up the seconds of some parts of a run."""
    return lambda one: sum(one.facts.get("wall_seconds", {}).get(part, 0.0) for part in parts)


FIGURES: Mapping[str, Callable[[Ended], float | None]] = {
    "steps": _reached("steps"),
    "trained tokens": _reached("trained_tokens"),
    "trained tokens a second": _reached("perf/trained_tok_s"),
    "tokens run a second": _reached("perf/forwarded_tok_s"),
    "seconds before the first step": _seconds("preparing", "loading"),
    "seconds in steps": _seconds("steps"),
    "peak memory of the process, GiB": _reached("peak_memory_bytes", 2**-30),
    "peak memory of the device, GiB": _on_device,
    "cost per million trained tokens": _reached("cost_per_million_trained_tokens"),
    "last loss": lambda one: one.losses[max(one.losses)] if one.losses else None,
}


if __name__ == "__main__":
    sys.exit(main())
