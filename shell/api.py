"""Training from Python: the same options, checks and loop as the command line."""

import pathlib
import signal
from typing import Any

from core import algorithms
from shell import config, jobs

OWN = "custom:algorithm"


def train(algorithm: str | algorithms.Algorithm, **options: Any) -> pathlib.Path:
    """Train as `python -m shell.train` does.

    Args:
        algorithm: a built-in name, `module:name`, or an Algorithm of the caller's own.
        options: as in docs/options.md, `model` and `dataset` and `output_dir` at least.

    Returns:
        The output folder, with `model/`, `metrics.jsonl` and `run.json`; a dry run writes nothing.

    Raises:
        mistake.Mistake: the caller's mistake, in one line.
        KeyboardInterrupt, SystemExit: after SIGINT or SIGTERM, when the checkpoint is saved.
    """
    own = None if isinstance(algorithm, str) else algorithm
    command = config.from_values(OWN if own is not None else str(algorithm), options)
    status = jobs.train(command, own)
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if status:
        raise SystemExit(status)
    return pathlib.Path(str(command.options.output_dir))
