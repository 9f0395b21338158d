"""Writing that survives a kill: a file or a folder is the old one or the new one, never half of either."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator


def replace(path: pathlib.Path, content: bytes | str) -> None:
    """Write a whole file aside, put it on the disk, then rename it over `path`.

    Args:
        path: the file to create or replace; its folder must exist.
        content: text is written as UTF-8.
    """
    data = content.encode() if isinstance(content, str) else content
    aside = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def whole(place: pathlib.Path) -> Iterator[pathlib.Path]:
    """Give a folder to write to, put it on the disk at the end, then rename it over `place`.

    Its files may be read by whom the process lets read: safetensors keeps others out, such as a server of
    another user. What raises on the way leaves what was there.

    Args:
        place: the folder to create or replace.
    """
    place = place.resolve()
    aside = place.with_name(f".{place.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    os.umask(mask := os.umask(0))
    try:
        aside.mkdir(parents=True)
        yield aside
        for path in (*aside.rglob("*"), aside):
            if path.is_dir():
                sync_folder(path)
                continue
            path.chmod(0o666 & ~mask)
            sync(path)
        shutil.rmtree(place, ignore_errors=True)
        aside.rename(place)
        sync_folder(place.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sync(path: pathlib.Path) -> None:
    """Put a file that others wrote on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: pathlib.Path) -> None:
    """Put a folder's own entries (what was created, renamed, removed in it) on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
