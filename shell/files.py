"""Writing that survives a kill: a file is either the old one or the new one, never half of either."""

import os
import pathlib


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
