"""Training from Python: the same options, checks and loop as the command line."""

import pathlib
import signal
from collections.abc import Callable
from typing import Any

from core import algorithms
from shell import config, in_memory, jobs, mistake

OWN = config.CALLERS


def train(algorithm: str | algorithms.Algorithm, **options: Any) -> pathlib.Path:
    """Train as `python -m shell.train` does.

    Args:
        algorithm: a built-in name, `module:name`, or an Algorithm of the caller's own.
        options: as in docs/options.md, `model` and `dataset` and `output_dir` at least. `dataset` and
            `eval_dataset` may be rows, in a list or a `datasets.Dataset`, which are written to
            `output_dir/rows`. `reward_funcs` may be a function, or a list with functions in it.

    Returns:
        The output folder, with `model/`, `metrics.jsonl` and `run.json`; a dry run writes nothing.

    Raises:
        mistake.Mistake: the caller's mistake, in one line.
        KeyboardInterrupt, SystemExit: after SIGINT or SIGTERM, when the checkpoint is saved.
    """
    own = None if isinstance(algorithm, str) else algorithm
    if own is not None and not isinstance(own, algorithms.Algorithm):
        raise mistake.Mistake(f"algorithm is a {type(own).__name__}; a name or an Algorithm was wanted")
    functions, named = _functions(options.get("reward_funcs"))
    word = OWN if own is not None else str(algorithm)
    with in_memory.named({**options, **named}) as given:
        command = config.fetched(lambda: config.from_values(word, given))
        status = jobs.train(command, own, functions)
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if status:
        raise SystemExit(status)
    return pathlib.Path(str(command.options.output_dir))


def _functions(given: Any) -> tuple[tuple[str | Callable[..., Any], ...], dict[str, Any]]:
    """Return reward functions of the caller's own, and the names that the options know them by.

    A run that goes on is compared by these names; what a function does, nobody can compare.
    """
    listed = tuple(given) if isinstance(given, list | tuple) else () if given is None else (given,)
    if not any(callable(each) for each in listed):
        return (), {}
    names = [f"custom:{getattr(f, '__name__', type(f).__name__)}" if callable(f) else f for f in listed]
    return listed, {"reward_funcs": names}
