"""Writing that survives a kill: what stands at a name is the old or the new, never half of either."""

import contextlib
import errno
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
    """Give a folder to write to, put it on the disk at the end, then let it take the name of `place`.

    Its files may be read by whom the process lets read: safetensors keeps others out, such as a server of
    another user. What raises on the way leaves what was there. The old folder is renamed to a hidden name,
    the new one to its place, and then the old one is removed: a kill between the two renames leaves none at
    that name and both beside it, whole. The next write puts the old one back, or removes what a kill left.

    Args:
        place: the folder to create or replace. An empty one that cannot be renamed, such as a mount point,
            gets the files one by one.
    """
    place = place.resolve()
    aside, old = _beside(place)
    _settle(place, old)
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
        _named(aside, place, old)
        sync_folder(place.parent)
    finally:
        _settle(place, old)
        shutil.rmtree(aside, ignore_errors=True)


def check(place: pathlib.Path) -> None:
    """Try what `whole` needs: make a folder beside a place, or in its nearest parent, and remove it again.

    Args:
        place: the folder to create or replace.

    Raises:
        OSError: it cannot be made.
    """
    aside, _ = _beside(place.resolve())
    near = next(folder for folder in aside.parents if os.path.lexists(folder))
    shutil.rmtree(near / aside.name, ignore_errors=True)
    (near / aside.name).mkdir()
    (near / aside.name).rmdir()


def _beside(place: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Return where a folder is written, and where the one that it replaces is until it is removed."""
    return place.with_name(f".{place.name}.partial"), place.with_name(f".{place.name}.replaced")


def _named(aside: pathlib.Path, place: pathlib.Path, old: pathlib.Path) -> None:
    """Rename a folder to its place, what had the name before out of the way."""
    try:
        if place.is_dir():
            place.rename(old)
        aside.rename(place)
    except OSError as problem:
        if problem.errno not in (errno.EBUSY, errno.EXDEV) or not place.is_dir():
            raise
        if any(place.iterdir()):
            # EXDEV: a layer of a container's image, whose folders are copied to be moved.
            if problem.errno == errno.EBUSY:
                raise
            shutil.move(place, old)
            aside.rename(place)
            return
        _moved_into(aside, place)


def _moved_into(aside: pathlib.Path, place: pathlib.Path) -> None:
    """Move what is in a folder into an empty one, which is empty again where that fails."""
    try:
        for path in aside.iterdir():
            shutil.move(path, place / path.name)
        for path in (*place.rglob("*"), place):  # another file system has copies
            sync_folder(path) if path.is_dir() else sync(path)
    except BaseException:
        for path in place.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def _settle(place: pathlib.Path, old: pathlib.Path) -> None:
    """Put a folder that was renamed out of the way back where nothing took its place, and else remove it."""
    if old.is_dir() and not os.path.lexists(place):
        old.rename(place)
    shutil.rmtree(old, ignore_errors=True)


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
