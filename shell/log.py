"""What a run leaves to read: metrics.jsonl, run.json, trackers.

`metrics.jsonl` holds one JSON object a logged step, in the order of steps, no step twice. A number that is
not finite is written `NaN`, `Infinity` or `-Infinity`, as Python's json, pandas and pyarrow read them: a NaN
loss is seen as one, not as a gap.
"""

import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shell import files, mistake, progress, table, trackers, written


class Journal:
    """The log of one run: its file, its trackers, its display.

    Log a step before its checkpoint is saved: a killed run then resumes at a step whose line is in the file.
    """

    def __init__(
        self,
        folder: pathlib.Path | str,
        display: progress.Display,
        *,
        resumed: int | None = None,
        report_to: tuple[trackers.Tracker, ...] = (),
        writes: bool = True,
    ) -> None:
        """Open the log of a folder.

        Args:
            folder: output_dir; created if missing.
            display: where people watch.
            resumed: the step that the run goes on from: later lines are removed; None starts the file anew.
            report_to: trackers that were started.
            writes: False on every rank but the first: nothing is written.
        """
        self.display = display
        self._folder = pathlib.Path(folder)
        self._trackers = list(report_to)
        self._writes = writes
        self._last: dict[str, Any] = {}
        self._rows: table.Rows = ()
        if writes:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._completions = table.File(self._folder, resumed=resumed)
            lines = [] if resumed is None else list(_until(self._folder / written.METRICS, resumed, display))
            files.replace(self._folder / written.METRICS, "".join(map(_line, lines)))
            self._last = lines[-1] if lines else {}
            self._file = (self._folder / written.METRICS).open("r+b", buffering=0)
            self._end = self._file.seek(0, os.SEEK_END)
            self._start = self._end - len(_line(self._last).encode()) if lines else self._end

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step; more of the step that was logged last join its line.

        Args:
            step: steps done.
            values: by name; evaluation under `eval_...`.
        """
        self.display.step(step, values)
        if not self._writes:
            return
        again = self._last.get("step") == step
        self._start = self._start if again else self._end
        self._last = {**(self._last if again else {"step": step}), **values, "step": step}
        self._put(_line(self._last).encode())
        self._track(step, values)

    def completions(self, step: int, rows: table.Rows, *, shown: bool) -> None:
        """Write what was drawn for a step into its file, and show some of it.

        Args:
            step: that it is trained in first.
            rows: from `answers.table`; may be none.
            shown: show a table, too: of these, or of those that came last.
        """
        self._rows = rows or self._rows
        if rows and all(row.get("reward", 0.0) is None for row in rows):
            names = ", ".join(n.removeprefix("rewards/") for n in rows[0] if n.startswith("rewards/"))
            self.display.note(
                f"every reward function ({names}) returned None for all completions of a step: it trains "
                "nothing by rewards"
            )
        if self._writes and rows:
            self._completions.write(step, rows)
        if shown and self._rows:
            self.display.table(self._rows)
            self._rows = ()

    def sync(self) -> None:
        """Put the metrics so far on the disk: before a checkpoint, so that none is newer than its lines."""
        if self._writes:
            self._completions.sync()
            os.fsync(self._file.fileno())

    def run(self, facts: Mapping[str, Any]) -> None:
        """Write run.json, whole, and put the metrics on the disk; at the end."""
        self.sync()
        if self._writes:
            files.replace(self._folder / written.RUN, json.dumps(dict(facts), indent=2) + "\n")

    def close(self) -> None:
        """Finish the trackers, the bar and the file."""
        self.display.close()
        for tracker in list(self._trackers):
            self._spare(tracker, tracker.finish)
        if self._writes:
            self._file.close()

    def _put(self, line: bytes) -> None:
        """Write the whole line at once, over the one its step had: a kill leaves the old one or the new."""
        left = memoryview(line)
        try:
            self._file.seek(self._start)
            while left:
                left = left[self._file.write(left) :]
            self._end = self._file.tell()
            self._file.truncate()
        except OSError as error:
            raise mistake.Mistake(
                f"{self._folder / written.METRICS} could not be written: {error.strerror}; "
                "make room there and run the same command again"
            ) from error

    def _track(self, step: int, values: Mapping[str, float]) -> None:
        """Send metrics to the trackers."""
        for tracker in list(self._trackers):
            self._spare(tracker, lambda each=tracker: each.log(trackers.renamed(values), step=step))

    def _spare(self, tracker: trackers.Tracker, action: Callable[[], None]) -> None:
        """Act on a tracker; one that fails is told of and left, for a run is worth more than its page."""
        try:
            action()
        except Exception as error:
            self._trackers.remove(tracker)
            self.display.note(f"{tracker.name} failed and is no longer reported to: {error}")


def read(path: pathlib.Path | str) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl."""
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def _until(path: pathlib.Path, step: int, display: progress.Display) -> Iterator[dict[str, Any]]:
    """Read the lines up to a step; what cannot be read (cut by a kill) is dropped and told."""
    text = path.read_text(errors="replace") if path.exists() else ""
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            found = json.loads(line)
            if found["step"] <= step:
                yield found
        except (ValueError, TypeError, KeyError):
            display.note(f"line {number} of {path} is not a logged step and was dropped")


def _line(values: Mapping[str, Any]) -> str:
    """Return a line of metrics.jsonl; numbers of arrays and tensors become floats."""
    return json.dumps(dict(values), default=float) + "\n"
