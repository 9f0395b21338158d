"""Files of rows, read row by row: JSON, one object a line or whole, CSV and parquet.

Each reader yields, from a row number on, where a row stands (for messages) and the row. What cannot be read,
or could be read in two ways, is told with its line.
"""

import csv
import itertools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shell import mistake

Row = Mapping[str, Any]
Located = tuple[str, Row]

DEEPEST = 100
"""Levels of lists and objects in a row: everything that walks through rows can be sure of that."""

_QUOTED = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_STEPS = bytes(set(range(256)) - set(b"[{]}"))
_LARGEST_FIELD = 2**31 - 1


def json_lines(path: pathlib.Path, first: int) -> Iterator[Located]:
    """Read one object a line; empty lines are no rows."""
    with path.open("rb") as file:
        filled = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for row, (number, line) in enumerate(itertools.islice(filled, first, None), first):
            where = f"row {row} (line {number} of {path})"
            yield where, _object(parsed(line, f"{path}, line {number}"), where)


def whole_json(path: pathlib.Path, first: int) -> Iterator[Located]:
    """Read a list of objects; a file that holds one object a line is read as such."""
    data = path.read_bytes()
    head = data.lstrip(b"\xef\xbb\xbf \t\r\n")
    if head[:1] == b"{" and len(data.splitlines()) > 1 and _is_whole(head.splitlines()[0]):
        yield from json_lines(path, first)
        return
    rows, doubled = _decoded(data, str(path))
    if isinstance(rows, Mapping) and isinstance(rows.get("data"), list):
        rows = rows["data"]
    if isinstance(rows, Mapping):
        rows = [rows]
    if not isinstance(rows, list):
        raise mistake.Mistake(
            f"{path} holds a {type(rows).__name__}; a list of objects is wanted, or one object a line."
        )
    if doubled:
        inside = (f"row {number} of {path}" for number, row in enumerate(rows) if _holds(row, doubled[0][0]))
        raise _twice(next(inside, str(path)), doubled)
    for number, row in enumerate(rows[first:], first):
        where = f"row {number} of {path}"
        yield where, _object(row, where)


def table(path: pathlib.Path, first: int) -> Iterator[Located]:
    """Read a CSV table with a header; every value is text."""
    csv.field_size_limit(_LARGEST_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            _once(rows.fieldnames or (), f"{path}, line 1")
            for number, row in enumerate(itertools.islice(rows, first, None), first):
                if None in row or None in row.values():
                    raise mistake.Mistake(
                        f"{path}, line {rows.line_num}, has more or fewer columns than its header."
                    )
                yield f"row {number} (line {rows.line_num} of {path})", row
        except (csv.Error, UnicodeDecodeError) as error:
            raise mistake.Mistake(
                f"{path}, line {rows.line_num + 1}, cannot be read: {mistake.line(error)}; mend or remove it."
            ) from error


def parquet(path: pathlib.Path, first: int) -> Iterator[Located]:
    """Read a table batch by batch."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _once(file.schema_arrow.names, str(path))
            batches = file.iter_batches(batch_size=1000)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(itertools.islice(rows, first, None), first):
                yield f"row {number} of {path}", row
    except mistake.Mistake:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        # A damaged page is an error of input, its text one of decoding, its dates one of range.
        raise mistake.Mistake(f"{path} cannot be read as parquet: {mistake.line(error)}.") from error


def parsed(data: bytes | str, where: str) -> Any:
    """Parse JSON.

    Args:
        data: the text, as UTF-8 or decoded.
        where: what it is, for messages.

    Raises:
        Mistake: says where it is broken, nested too deeply, or names something twice.
    """
    value, doubled = _decoded(data, where)
    if doubled:
        raise _twice(where, doubled)
    return value


def _decoded(data: bytes | str, where: str) -> tuple[Any, list[tuple[Any, str]]]:
    """Parse JSON; return with it the first object that has a name twice, if there is one, and the name."""
    doubled: list[tuple[Any, str]] = []

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs) and not doubled:
            names = [name for name, _ in pairs]
            doubled.append((result, next(name for name in names if names.count(name) > 1)))
        return result

    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        if _depth(text) > DEEPEST:
            raise mistake.Mistake(
                f"{where} nests lists and objects more than {DEEPEST} deep; flatten or remove the row."
            )
        return json.loads(text, object_pairs_hook=made), doubled
    except mistake.Mistake:
        raise
    except UnicodeDecodeError as error:
        raise mistake.Mistake(
            f"{where} is not UTF-8 (byte {error.start}); save the file as UTF-8."
        ) from error
    except ValueError as error:
        raise mistake.Mistake(f"{where} is not JSON: {mistake.line(error)}; mend or remove it.") from error


def _depth(text: str) -> int:
    """Return how deeply JSON is nested, where that may be too deep; without recursion, as it may be deep."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return 0
    bare = _QUOTED.sub(b"", text.encode(errors="surrogatepass"))
    return int(np.frombuffer(bare.translate(_STEPS, _NO_STEPS), np.int8).cumsum().max(initial=0))


def _is_whole(line: bytes) -> bool:
    """Tell whether a line is JSON by itself."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _object(row: Any, where: str) -> Row:
    """Refuse rows that are no objects."""
    if not isinstance(row, Mapping):
        raise mistake.Mistake(f"{where} is a {type(row).__name__}; an object with named columns is wanted.")
    return row


def _holds(value: Any, wanted: Any) -> bool:
    """Tell whether an object is another, or has it inside."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return value is wanted or any(_holds(part, wanted) for part in parts)


def _twice(where: str, doubled: Sequence[tuple[Any, str]]) -> mistake.Mistake:
    """Say that an object has two values of one name."""
    return mistake.Mistake(f"{where}: an object has {doubled[0][1]!r} twice; which is meant? Remove one.")


def _once(names: Sequence[str], where: str) -> None:
    """Refuse a table that has two columns of one name."""
    again = sorted({name for name in names if list(names).count(name) > 1})
    if again:
        raise mistake.Mistake(f"{where}: the column {again[0]!r} stands twice in the header; rename one.")
