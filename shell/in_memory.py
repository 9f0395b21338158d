"""Rows that a caller in Python holds: written beside the run, which is then resumed from anywhere."""

import contextlib
import hashlib
import json
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shell import about, aside, mistake, written

OPTIONS = ("dataset", "eval_dataset")


@contextlib.contextmanager
def named(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Give the options with names of files in the place of rows.

    Rows lie in `output_dir/rows`, in a folder that is named by what is in it: the same rows are the same
    dataset in another process and another start. A run that writes nothing has them in a temporary folder.

    Args:
        given: options by name. `dataset` and `eval_dataset` may be rows: mappings, in a list or in what can
            be iterated again, as a `datasets.Dataset`.

    Raises:
        mistake.Mistake: there are no rows, or a row is none, or holds what JSON cannot.
    """
    held = {name: list(given[name]) for name in OPTIONS if _are_rows(given.get(name))}
    with contextlib.ExitStack() as stack:
        place = given.get("output_dir")
        if held and (place is None or given.get("dry_run")):
            place = stack.enter_context(tempfile.TemporaryDirectory())
        yield {**given, **{name: str(_written(pathlib.Path(str(place)), name, held[name])) for name in held}}


def _are_rows(given: Any) -> bool:
    """Say whether an option is rows, and not names of where rows are."""
    if given is None or isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        return False
    if not isinstance(given, list | tuple):
        return True
    return any(
        isinstance(each, Mapping) and not ("path" in each and set(each) <= {*about.ENTRY}) for each in given
    )


def _written(folder: pathlib.Path, name: str, rows: list[Any]) -> pathlib.Path:
    """Write rows unless they are there."""
    lines = [_line(name, number, row) for number, row in enumerate(rows)]
    if not lines:
        raise mistake.Mistake(
            f"{name}: no row came; rows, each a mapping as in a JSON Lines file, were wanted"
        )
    content = "\n".join(lines) + "\n"
    digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def write(place: pathlib.Path) -> Mapping[str, Any]:
        (place / "rows.jsonl").write_text(content, encoding="utf-8")
        return {"rows": len(lines)}

    return aside.kept(folder / written.ROWS, f"{name}-{digest}", write)[0] / "rows.jsonl"


def _line(name: str, number: int, row: Any) -> str:
    """Return a row as a line of JSON."""
    if not isinstance(row, Mapping):
        raise mistake.Mistake(
            f"{name}: row {number} is a {type(row).__name__}; a mapping was wanted, as in "
            f'[{{"prompt": "...", "completion": "..."}}]'
        )
    try:
        return json.dumps(dict(row), allow_nan=False)
    except (TypeError, ValueError) as problem:
        raise mistake.Mistake(
            f"{name}: row {number} cannot be written as JSON ({problem}); text, numbers, lists and mappings "
            "of these were wanted"
        ) from problem
