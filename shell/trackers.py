"""Other places a run is logged to, through accelerate's tracker classes."""

import hashlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shell import mistake

NAMES = ("trackio", "tensorboard", "wandb")
PROJECT = "espalier"


class Tracker(Protocol):
    """What is used of accelerate's GeneralTracker."""

    name: str

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Send the metrics of a step."""
        ...

    def finish(self) -> None:
        """Say that the run is over."""
        ...


def start(
    names: Sequence[str],
    folder: pathlib.Path | str,
    options: Mapping[str, Any],
    *,
    resumed: int | None = None,
) -> tuple[Tracker, ...]:
    """Start the trackers; on the first rank only.

    The run is named after the folder, and a resumed run goes on in the same run of the tracker. The project
    is `WANDB_PROJECT` or `TRACKIO_PROJECT` where set.

    Args:
        names: of NAMES; `none` is passed over.
        folder: output_dir; where trackers keep what they keep on disk.
        options: the run's resolved options, for the tracker's page.
        resumed: the step that the run goes on from; None for a new run.

    Raises:
        mistake.Mistake: a tracker is not known, not installed or did not start.
    """
    place = pathlib.Path(folder).resolve()
    return tuple(_start(name, place, options, resumed) for name in names if name != "none")


def renamed(values: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under the names of transformers' dashboards: `train/...` and `eval/...`.

    >>> renamed({"loss": 1.0, "eval_loss": 2.0})
    {'train/loss': 1.0, 'eval/loss': 2.0}
    """
    return {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in values.items()
    }


def _start(name: str, folder: pathlib.Path, options: Mapping[str, Any], resumed: int | None) -> Tracker:
    """Start one tracker and hand it the options."""
    if name not in NAMES:
        raise mistake.Mistake(f"report_to: {name!r} is not a tracker; choose of {', '.join(NAMES)} or none")
    # A second's worth of imports that runs without trackers do not pay.
    import accelerate
    import accelerate.tracking

    if name not in map(str, accelerate.tracking.get_available_trackers()):  # an enum, not equal to its text
        raise mistake.Mistake(f"report_to: {name} is not installed; pip install {name}, or --report_to none")
    kinds: Mapping[str, type[Any]] = accelerate.tracking.LOGGER_TYPE_TO_CLASS
    project, settings = _settings(name, folder, resumed)
    try:
        accelerate.PartialState()  # accelerate's own logging wants it
        tracker = kinds[name](project, **settings)
        tracker.main_process_only = False  # this is the first rank already
        tracker.start()
        tracker.store_init_configuration({key: _plain(value) for key, value in options.items()})
    except Exception as error:
        told = " ".join(str(error).split()) or type(error).__name__
        raise mistake.Mistake(
            f"report_to: {name} did not start: {told}; mend it, or --report_to none"
        ) from error
    return tracker


def _settings(name: str, folder: pathlib.Path, resumed: int | None) -> tuple[str, dict[str, Any]]:
    """Return the project and the settings a tracker is made with."""
    if name == "tensorboard":
        purge = {} if resumed is None else {"purge_step": resumed + 1}
        return "tensorboard", {"logging_dir": folder, **purge}
    project = os.environ.get(f"{name.upper()}_PROJECT", PROJECT)
    run = f"{folder.name}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]}"
    again = "never" if resumed is None and name == "trackio" else "allow"
    if name == "trackio":
        return project, {"name": run, "resume": again}
    return project, {"name": folder.name, "id": run, "resume": again, "dir": str(folder)}


def _plain(value: Any) -> str | int | float | bool:
    """Return an option as a value that every tracker takes."""
    return value if isinstance(value, str | int | float | bool) else str(value)
