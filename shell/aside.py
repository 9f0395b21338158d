"""Folders that are written once, aside, named when they are whole, and trusted while they stay so."""

import hashlib
import json
import os
import pathlib
import shutil
import socket
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from shell import files

ABOUT = "about.json"
_CHUNK = 1 << 20


def kept(
    folder: pathlib.Path,
    key: str,
    write: Callable[[pathlib.Path], Mapping[str, Any]],
    note: Callable[[str], None] | None = None,
) -> tuple[pathlib.Path, Mapping[str, Any]]:
    """Return the folder of prepared data and what is known of them, written now unless they are there.

    The files are written aside and renamed when they are whole, so an interrupted preparation leaves nothing
    that is trusted later. What was damaged since is removed and written again.

    Args:
        folder: where prepared data lie.
        key: names what is wanted.
        write: writes files into the folder it is given; returns what JSON can hold of them.
        note: told of what was damaged.
    """
    place = folder / key
    about = whole(place)
    if about is not None:
        return place, about
    folder.mkdir(parents=True, exist_ok=True)
    if place.exists():
        if note is not None:
            note(f"{place} is damaged: its rows are prepared again")
        shutil.rmtree(place)
    _sweep(folder, key)
    aside = folder / f"{key}.partial-{socket.gethostname()}-{os.getpid()}"
    aside.mkdir()
    try:
        _seal(aside, write(aside))
        _rename(aside, place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    about = whole(place)
    if about is None:
        raise OSError(f"{place} does not hold what was just written to it")
    return place, about


def _seal(folder: pathlib.Path, about: Mapping[str, Any]) -> None:
    """Write what is known of the files, with the size and the checksum of each."""
    sums = {path.name: _sum(path) for path in sorted(folder.iterdir())}
    content = {"about": about, "files": sums}
    text = json.dumps({**content, "digest": _digest(content)})
    (folder / ABOUT).write_text(text, encoding="utf-8")


def whole(folder: pathlib.Path) -> Mapping[str, Any] | None:
    """Return what is known of a folder's files; None where one is missing or not as it was written.

    Args:
        folder: one that `kept` wrote.
    """
    try:
        read = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        content = {"about": read["about"], "files": read["files"]}
        if read["digest"] != _digest(content):
            return None
        sizes = all((folder / name).stat().st_size == size for name, (size, _) in read["files"].items())
        sums = sizes and all(_sum(folder / name) == known for name, known in read["files"].items())
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    return read["about"] if sums else None


def _sum(path: pathlib.Path) -> list[int]:
    """Return a file's size and its checksum: damage is found by it, not malice, at the speed of memory."""
    checked = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checked = zlib.crc32(chunk, checked)
    return [path.stat().st_size, checked]


def _digest(content: Mapping[str, Any]) -> str:
    """Return a hash of what JSON can hold."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _rename(aside: pathlib.Path, place: pathlib.Path) -> None:
    """Put finished files in their place, on disk before they are named."""
    for path in aside.iterdir():
        files.sync(path)
    try:
        aside.rename(place)
    except OSError:
        # Another process prepared the same meanwhile; what it wrote is what we would have.
        if not (place / ABOUT).is_file():
            raise


def _sweep(folder: pathlib.Path, key: str) -> None:
    """Remove what processes of this machine left behind when they were killed."""
    for path in folder.glob(f"{key}.partial-{socket.gethostname()}-*"):
        try:
            os.kill(int(path.name.rpartition("-")[2]), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except PermissionError:
            continue
