"""What `dataset` and `eval_dataset` must be, told before anything heavy is imported."""

import sys
from collections.abc import Mapping
from typing import Any

from shell import about, entries, mistake, options, translate


def check(chosen: options.Options, given: Mapping[str, entries.Entry]) -> None:
    """Check each entry of a list of datasets.

    Args:
        chosen: the options.
        given: where those that were written stand.

    Raises:
        mistake.Mistake: names the entry.
    """
    for name in ("dataset", "eval_dataset"):
        where = given[name].where if name in given else name
        rows = listed(getattr(chosen, name))
        for row in rows:
            _entry(where, row)
        weights = [row.get("weight") for row in rows]
        if None in weights and any(weights):
            raise mistake.Mistake(
                f"{where}: some entries came with a weight and some without; all or none were wanted."
            )


def is_file(rows: about.Rows) -> bool:
    """Say whether rows come from files that are named, which have no splits."""
    return any(str(row.get("path", "")).endswith(about.FILES) for row in listed(rows))


def listed(rows: about.Rows) -> list[dict[str, Any]]:
    """Return the datasets of an option, each as a mapping."""
    several = rows if isinstance(rows, tuple) else () if rows is None else (rows,)
    return [row if isinstance(row, dict) else {"path": row} for row in several]


def _entry(where: str, row: Mapping[str, Any]) -> None:
    """Check one entry that is a mapping."""
    for key in row:
        if key not in about.ENTRY:
            hint = translate.hint(str(key), about.ENTRY)
            raise mistake.Mistake(
                f"{where}: {key!r} came in an entry; {', '.join(about.ENTRY)} were wanted.{hint}"
            )
    path = row.get("path")
    if not isinstance(path, str) or not path.strip():
        raise mistake.Mistake(f"{where}: {row!r} came; an entry with a path was wanted.")
    for key in ("split", "config"):
        value = row.get(key)
        if value is not None and not (isinstance(value, str) and value.strip()):
            raise mistake.Mistake(f"{where}: {key} {value!r} came in an entry; text was wanted.")
    weight = row.get("weight")
    if weight is None:
        return
    odd = isinstance(weight, bool) or not isinstance(weight, int | float)
    if odd or not 0 < weight <= sys.float_info.max:
        raise mistake.Mistake(f"{where}: weight {repr(weight)[:40]} came; a number above 0 was wanted.")
