"""What a person sees of a run, on standard error: a bar on a terminal, plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

import rich.console
import rich.progress

from shell import table

EVERY = 5.0
"""Seconds between lines about rows that are being tokenized."""


def interactive(stream: TextIO) -> bool:
    """Say whether a person watches the stream: the one place that decides between a bar and plain lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")


class Display:
    """The bar, the lines and the notes of one run.

    Make it first, so that notes can be told before there is anything to count.

    Attributes:
        notes: each note once, in the order they came; for run.json.
    """

    def __init__(
        self, *, shown: bool = True, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Show things on a stream.

        Args:
            shown: False on every rank but the first: notes are kept, nothing is printed.
            stream: standard error by default.
            clock: seconds.
        """
        self.notes: list[str] = []
        self._shown = shown
        self._stream = stream or sys.stderr
        self._clock = clock
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._total: int | None = None
        self._first: tuple[int, float] | None = None
        self._told: float | None = None

    def note(self, text: str) -> None:
        """Tell something once; a text that came before is not told again."""
        if text in self.notes:
            return
        self.notes.append(text)
        self._print(text)

    def lines(self, text: str) -> None:
        """Show lines that are no note: run.json has what they say in its own form.

        Args:
            text: with or without newlines.
        """
        self._print(text)

    def rows(self, read: int) -> None:
        """Tell how many rows are tokenized, now and then.

        Args:
            read: rows so far.
        """
        now = self._clock()
        self._told = now if self._told is None else self._told
        if now - self._told >= EVERY:
            self._told = now
            self._print(f"{read:,} rows tokenized")

    def start(self, total: int | None, *, done: int = 0) -> None:
        """Begin to count steps.

        Args:
            total: steps of the whole run; None if nobody knows.
            done: steps that were done before this process started.
        """
        self._total = total
        if self._shown and interactive(self._stream):
            console = rich.console.Console(file=self._stream)
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("step"),
                rich.progress.MofNCompleteColumn(),
                rich.progress.BarColumn(),
                rich.progress.TextColumn("{task.fields[shown]}"),
                console=console,
            )
            self._task = self._bar.add_task("", total=total, completed=done, shown="")
            self._bar.start()

    def step(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """Count a step as done.

        Args:
            step: steps done by now.
            values: metrics if this step is logged; None otherwise.
        """
        now = self._clock()
        self._first = self._first or (step, now)
        parts = [*_brief(values or {}), *self._left(step, now)]
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
            if values:
                self._bar.update(self._task, shown="  ".join(parts))
        elif values:
            of = "" if self._total is None else f"/{self._total}"
            self._print("  ".join([f"step {step}{of}", *parts]))

    def table(self, rows: table.Rows) -> None:
        """Show completions with their rewards: a table above the bar, or lines.

        Args:
            rows: from `answers.table`.
        """
        if self._bar is not None:
            self._bar.console.print(table.drawn(rows))
        else:
            self._print("\n".join(table.lines(rows)))

    def close(self) -> None:
        """Leave the bar as it stands and give the terminal back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _left(self, step: int, now: float) -> list[str]:
        """Estimate the time left from the steps after the first, which alone waits for a compiler."""
        if self._total is None or self._first is None or step <= self._first[0]:
            return []
        pace = (now - self._first[1]) / (step - self._first[0])
        return [f"left {_clock_text(pace * max(0, self._total - step))}"]

    def _print(self, text: str) -> None:
        """Print one plain line, above the bar if there is one."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)


def _brief(values: Mapping[str, float]) -> list[str]:
    """Choose the few metrics that fit on a line."""
    shown = {
        "loss": ".4f",
        "eval_loss": ".4f",
        "reward": ".4f",
        "eval_reward": ".4f",
        "perf/trained_tok_s": ",.0f",
    }
    units = {"perf/trained_tok_s": "{} tok/s"}
    return [units.get(n, f"{n} {{}}").format(format(values[n], f)) for n, f in shown.items() if n in values]


def _clock_text(seconds: float) -> str:
    """Write a duration as h:mm:ss.

    >>> _clock_text(3725.4)
    '1:02:05'
    """
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
