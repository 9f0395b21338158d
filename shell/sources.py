"""Where rows come from: files, folders, the hub, built-in tasks. Rows are plain dictionaries.

Files are read here rather than by a dataframe library, which gives each row, as nulls, the fields that only
others have (tools, tool calls), copies the file into a cache elsewhere, and cannot say which line is broken.
Rows are counted from 0, lines from 1.
"""

import hashlib
import itertools
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from shell import about, demo, mistake, readers, tasks, translate

Row = readers.Row
Located = readers.Located

_SLICED = re.compile(r"(?P<name>[\w.-]+?)(?:\[(?P<start>(-?\d+%?)?):(?P<stop>(-?\d+%?)?)\])?")
_KEPT_ASIDE = re.compile(r"(test|validation|valid|val|dev|evaluation|eval)([^a-z]|$)", re.IGNORECASE)


@attrs.frozen(kw_only=True)
class Source:
    """One place that rows come from.

    Attributes:
        name: how messages call it.
        read: from a row number on, yields where each row stands (for messages) and the row.
        fingerprint: changes when the rows change.
        weight: its share of an epoch beside the other sources; None when sources are simply joined.
    """

    name: str
    read: Callable[[int], Iterator[Located]]
    fingerprint: str
    weight: float | None = None


def find(
    dataset: str | Sequence[str | Mapping[str, Any]],
    *,
    config: str | None = None,
    split: str | None = None,
    streaming: bool = False,
    task_options: Mapping[str, Any] | None = None,
) -> tuple[Source, ...]:
    """Find everything that a `dataset` option names. Nothing is read but what a fingerprint needs.

    Args:
        dataset: a file, a folder (of files, or saved by `datasets`), a hub id, a built-in task; or a list of
            these, each alone or as `{path, weight, split, config}`. Weights are shares; where one has a
            weight, all need one.
        config: the hub dataset's configuration.
        split: default `train`; `train[:100]` takes the first rows.
        streaming: read the hub row by row instead of downloading first.
        task_options: of the tasks among them: size, seed, and what a task takes.

    Raises:
        Mistake: when something is not there, or the list is not as described.
    """
    entries = [dataset] if isinstance(dataset, str) else list(dataset)
    if not entries:
        raise mistake.Mistake("dataset is an empty list; name a file, a folder, a hub id or a built-in task.")
    wanted = [_entry(entry, config, split) for entry in entries]
    weighted = [entry for entry in wanted if entry["weight"] is not None]
    if weighted and len(weighted) < len(wanted):
        raise mistake.Mistake(
            "dataset: some of the entries have a weight and some none; give each one or none of them."
        )
    return tuple(
        attrs.evolve(
            _source(entry["path"], entry["config"], entry["split"], streaming, task_options),
            weight=entry["weight"],
        )
        for entry in wanted
    )


def _entry(entry: str | Mapping[str, Any], config: str | None, split: str | None) -> dict[str, Any]:
    """Bring one entry of the list into one form."""
    if isinstance(entry, str):
        entry = {"path": entry}
    if (
        not isinstance(entry, Mapping)
        or not isinstance(entry.get("path"), str)
        or set(entry) - set(about.ENTRY)
    ):
        raise mistake.Mistake(
            f"dataset: {entry!r} is neither a path nor a mapping with the keys {', '.join(about.ENTRY)}."
        )
    return {
        "path": entry["path"],
        "weight": _weight(entry),
        "split": entry.get("split") or split or "train",
        "config": entry.get("config") or config,
    }


def _weight(entry: Mapping[str, Any]) -> float | None:
    """Return an entry's weight."""
    weight = entry.get("weight")
    if weight is None:
        return None
    if (
        isinstance(weight, bool)
        or not isinstance(weight, int | float)
        or not 0 < weight <= sys.float_info.max
    ):
        raise mistake.Mistake(
            f"dataset: the weight of {entry['path']} is {str(weight)[:40]}; a number above 0 is wanted."
        )
    return float(weight)


def _source(
    path: str, config: str | None, split: str, streaming: bool, settings: Mapping[str, Any] | None
) -> Source:
    """Tell what a name means, and open it."""
    try:
        return _opened(path, config, split, streaming, settings)
    except OSError as error:
        raise _unread(path, error) from error


def _unread(path: str | pathlib.Path, error: OSError) -> mistake.Mistake:
    """Say that the system does not let a file or folder be read."""
    name = str(path) if len(str(path)) <= 200 else f"{str(path)[:100]}... ({len(str(path))} characters)"
    where = f" ({error.filename})" if error.filename and len(str(error.filename)) <= 200 else ""
    return mistake.Mistake(
        f"dataset: {name} cannot be read{where}: {error.strerror or mistake.line(error)}; "
        "a file or folder that you may read is wanted."
    )


def _opened(
    path: str, config: str | None, split: str, streaming: bool, settings: Mapping[str, Any] | None
) -> Source:
    """Open what a name means; what the system refuses is raised as it comes."""
    name, start, stop = _slice(split)
    place = pathlib.Path(os.path.expanduser(path))
    if "[" in name and (path == "demo" or tasks.is_task(path) or place.exists()):
        raise mistake.Mistake(
            f"dataset_split is {split!r}; of files, a split and rows or percents of them are wanted, as in "
            "train[10:20], train[:80%] or train[-100:]."
        )
    if path == "demo" or tasks.is_task(path):
        return _sliced(_made(path, name, settings), start, stop)
    if place.is_file():
        if name != "train":
            raise mistake.Mistake(_no_split(place, "a file", split))
        return _sliced(_file(place), start, stop)
    if place.is_dir() and any(
        (place / known).exists() for known in ("dataset_info.json", "dataset_dict.json", "state.json")
    ):
        return _sliced(_saved(place, name), start, stop)
    if place.is_dir():
        return _sliced(_folder(place, name), start, stop)
    if os.path.lexists(place) or _is_local(path):
        raise _missing(path, place)
    return _hub(path, config, split, streaming)


def _no_split(place: pathlib.Path, what: str, split: str) -> str:
    """Say that what has no splits was asked for one."""
    return (
        f"dataset: {place} is {what} without splits, and the split {split!r} came; leave the split out for "
        "all of its rows, take some as train[:100], or name the file that holds that split."
    )


def _made(path: str, split: str, settings: Mapping[str, Any] | None) -> Source:
    """Make the rows of the built-in dataset or of a task."""
    if path != "demo":
        return _named(path, tasks.rows(path, split, settings))
    if split not in demo.SPLITS:
        raise mistake.Mistake(f"dataset demo has no split {split!r}; it has {' and '.join(demo.SPLITS)}.")
    return _named(path, demo.rows(split))


def _slice(split: str) -> tuple[str, str, str]:
    """Read `train[10:20]`, `train[:80%]`, `train[-100:]`."""
    match = _SLICED.fullmatch(split)
    if match is None:
        return split, "", ""
    return match["name"], match["start"] or "", match["stop"] or ""


def _sliced(source: Source, first: str, last: str) -> Source:
    """Keep the rows of a slice; rows are counted where its ends are parts of them, or count from the last."""
    if not first and not last:
        return source
    counted = any(end.startswith("-") or end.endswith("%") for end in (first, last))
    total = sum(1 for _ in source.read(0)) if counted else 0
    start = _row(first, total) if first else 0
    stop = _row(last, total) if last else None

    def read(number: int) -> Iterator[Located]:
        rows = source.read(start + number)
        return rows if stop is None else itertools.islice(rows, max(stop - start - number, 0))

    return attrs.evolve(source, read=read, fingerprint=_digest(f"{source.fingerprint}[{start}:{stop}]"))


def _row(end: str, total: int) -> int:
    """Return the row that an end of a slice names; a percent becomes the nearest one, as in datasets."""
    row = round(float(end[:-1]) * total / 100) if end.endswith("%") else int(end)
    return max(0, row + total if end.startswith("-") else row)


def _file(path: pathlib.Path) -> Source:
    """Open one file by its suffix."""
    known = {
        ".jsonl": readers.json_lines,
        ".json": readers.whole_json,
        ".parquet": readers.parquet,
        ".csv": readers.table,
    }
    if path.suffix not in known:
        raise mistake.Mistake(
            f"dataset: {path} ends in {path.suffix or 'nothing'}; wanted is one of {' '.join(about.FILES)}."
        )
    with path.open("rb") as file:
        fingerprint = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    reader = known[path.suffix]

    def read(first: int) -> Iterator[Located]:
        try:
            yield from reader(path, first)
        except OSError as error:
            raise _unread(path, error) from error

    return Source(name=str(path), read=read, fingerprint=fingerprint)


def _folder(path: pathlib.Path, split: str) -> Source:
    """Join the files of a folder by name: those of the split where names begin with one.

    Where none does, all are the split `train`, but those that are named as what is kept aside.
    """
    files = sorted(file for file in path.iterdir() if file.suffix in about.FILES)
    if not files:
        raise mistake.Mistake(
            f"dataset: the folder {path} holds no file that ends in one of {' '.join(about.FILES)}."
        )
    named = [file for file in files if re.match(rf"{re.escape(split)}([^a-z]|$)", file.stem)]
    if not named and split != "train":
        raise mistake.Mistake(
            f"dataset: no file of the folder {path} begins with the split's name {split!r}; there are "
            f"{', '.join(file.name for file in files[:8])}."
        )
    rest = [file for file in files if not _KEPT_ASIDE.match(file.stem)]
    if not named and not rest:
        raise mistake.Mistake(
            f"dataset: the folder {path} has no file for the split {split!r}; there are "
            f"{', '.join(file.name for file in files[:8])}. Name one of them as the dataset, or its split."
        )
    parts = [_file(file) for file in named or rest]

    def read(first: int) -> Iterator[Located]:
        return itertools.islice(itertools.chain.from_iterable(part.read(0) for part in parts), first, None)

    return Source(
        name=str(path), read=read, fingerprint=_digest(" ".join(part.fingerprint for part in parts))
    )


def _saved(path: pathlib.Path, split: str) -> Source:
    """Open a folder written by `save_to_disk`."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise mistake.Mistake(f"dataset: the folder {path} cannot be read: {mistake.line(error)}.") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise mistake.Mistake(
                f"dataset: {path} has no split {split!r}; it has {', '.join(map(str, loaded))}."
            )
        loaded = loaded[split]
    elif split not in ("train", str(loaded.split)):
        raise mistake.Mistake(_no_split(path, "a saved dataset", split))
    return _loaded(str(path), loaded)


def _hub(path: str, config: str | None, split: str, streaming: bool) -> Source:
    """Open a dataset of the hub, or its cached copy when the hub cannot be reached. No code of it is run."""
    import datasets
    import huggingface_hub
    from datasets import config as settings

    offline = settings.HF_HUB_OFFLINE
    try:
        if not _reached(path):
            # Without this the library asks again and again for half a minute before it looks into its cache.
            settings.HF_HUB_OFFLINE = True
        loaded = datasets.load_dataset(path, config, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = " ".join(str(error).split())[:300]
        raise mistake.Mistake(
            f"dataset: {path!r} is no file or folder here and no built-in task (demo); the hub: {reason}"
        ) from error
    finally:
        settings.HF_HUB_OFFLINE = offline
    return _loaded(path, loaded)


def _reached(path: str) -> bool:
    """Tell whether the hub answers for this name at once."""
    import huggingface_hub

    try:
        huggingface_hub.HfApi().dataset_info(path, timeout=10)
    except huggingface_hub.errors.HfHubHTTPError:
        # It answers, and what it says (no such dataset, no right to it) the loader will say better.
        return True
    except Exception:
        # Whatever else keeps the answer away, from whichever HTTP library: it is not there.
        return False
    return True


def _loaded(name: str, loaded: Any) -> Source:
    """Wrap a dataset of the `datasets` library, whole or streamed."""

    def read(first: int) -> Iterator[Located]:
        if first >= getattr(loaded, "num_rows", first + 1):
            return
        rows = loaded.skip(first) if first else loaded
        for number, row in enumerate(rows, first):
            yield f"row {number} of {name}", row

    return Source(name=name, read=read, fingerprint=str(getattr(loaded, "_fingerprint", "") or name))


def _named(name: str, rows: Sequence[Row]) -> Source:
    """Read from rows that were made in memory."""

    def read(first: int) -> Iterator[Located]:
        return ((f"row {number} of {name}", row) for number, row in enumerate(rows[first:], first))

    return Source(name=name, read=read, fingerprint=_digest(json.dumps(rows)))


def _digest(text: str) -> str:
    """Return a short hash."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _is_local(path: str) -> bool:
    """Say whether a name can be none of the hub's."""
    suffix = pathlib.Path(path).suffix
    return suffix in about.FILES or path.startswith((".", "/", "~")) or path.count("/") > 1


def _missing(path: str, place: pathlib.Path) -> mistake.Mistake:
    """Say that there is nothing of a name, or what is there that is neither a file nor a folder."""
    if not os.path.lexists(place):
        return mistake.Mistake(f"dataset: there is no file or folder {path}{_nearest(place)}.")
    what = "a link to where nothing is" if place.is_symlink() else "a pipe or a device, read only once"
    return mistake.Mistake(f"dataset: {path} is {what}; a file of rows or a folder of files is wanted.")


def _nearest(path: pathlib.Path) -> str:
    """Name what is in the folder and reads like the missing name."""
    if not path.parent.is_dir():
        return f" (there is no folder {path.parent} either)"
    close = translate.close(path.name, [entry.name for entry in path.parent.iterdir()])
    return f"; did you mean {path.parent / close[0]}" if close else ""
