"""Folders that are written once, aside, and named when they are whole."""

import os
import pathlib
import shutil
import socket
from collections.abc import Callable

from shell import files


def kept(folder: pathlib.Path, key: str, write: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Return the folder of prepared data, written now unless it is there.

    The files are written aside and renamed when they are whole, so an interrupted preparation leaves nothing
    that is trusted later.

    Args:
        folder: where prepared data lie.
        key: names what is wanted.
        write: writes files into the folder it is given, `about.json` among them.
    """
    place = folder / key
    if not (place / "about.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder, key)
        aside = folder / f"{key}.partial-{socket.gethostname()}-{os.getpid()}"
        aside.mkdir()
        try:
            write(aside)
            _rename(aside, place)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return place


def _rename(aside: pathlib.Path, place: pathlib.Path) -> None:
    """Put finished files in their place, on disk before they are named."""
    for path in aside.iterdir():
        files.sync(path)
    try:
        aside.rename(place)
    except OSError:
        # Another process prepared the same meanwhile; what it wrote is what we would have.
        if not (place / "about.json").is_file():
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
