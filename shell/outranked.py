"""What a run's own file says of the weights that it began with, where a command line names others.

A run's file serves evaluation and sampling of what the run left; the weights are those that a command names.
"""

from collections.abc import Sequence

import attrs

from shell import adapter, entries, keys

_HELD = {"eval_dataset": "dataset", "eval_split": "dataset_split"}
# When a run evaluates and what it makes of that: refused where nothing is held out any more.
_WHILE_TRAINING = {
    *("eval_strategy", "eval_steps", "eval_on_start"),
    *("metric_for_best_model", "load_best_model_at_end", "greater_is_better"),
}


def left(written: Sequence[entries.Entry]) -> list[entries.Entry]:
    """Leave out what a file says of the weights that its run began with, where a command names others.

    Args:
        written: entries of a file and of a command line, by people's names or ours.
    """
    of_file, told = ({_name(one): one for one in written if one.rank == rank} for rank in entries.RANKS)
    if "model" not in told:
        return list(written)
    without = {"init_from", "revision"}
    if "model" in of_file and of_file["model"].value == told["model"].value:
        without.remove("revision")
    if "init_from" not in told:  # which weights these are put on depends on the adapter of the file
        without |= {*adapter.OWN}
    return [one for one in written if one.rank == told["model"].rank or _name(one) not in without]


def held_out(written: Sequence[entries.Entry]) -> list[entries.Entry]:
    """Take the rows that a file has to evaluate on, not those to train on, where a command names none.

    Args:
        written: entries of a file and of a command line, by people's names or ours.
    """
    file, line = entries.RANKS
    of_file = {_name(one): one for one in written if one.rank == file and one.read() is not None}
    told = {_name(one) for one in written if one.rank == line}
    if "eval_dataset" not in of_file or told & {"dataset", "eval_dataset"}:
        return list(written)
    without = {*_HELD, *_HELD.values(), *_WHILE_TRAINING}
    kept = [one for one in written if one.rank == line or _name(one) not in without]
    return [*kept, *(attrs.evolve(of_file[name], key=key) for name, key in _HELD.items() if name in of_file)]


def _name(one: entries.Entry) -> str:
    """Return the option that a key stands for."""
    return keys.RUN[one.key].name if one.key in keys.RUN else one.key
