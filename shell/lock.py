"""One process at a time in an output folder."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from shell import mistake, written

_held: set[int] = set()


@contextlib.contextmanager
def hold(folder: pathlib.Path | str) -> Iterator[None]:
    """Keep other processes out of a folder for as long as the block runs.

    The kernel drops the lock when the process dies, however it dies, so nothing has to be cleaned by hand.
    The lock file itself stays: removing it would let two processes hold locks on two files of one name.

    Args:
        folder: created if missing.

    Raises:
        mistake.Mistake: another process holds the folder, or it cannot be written.
    """
    root = pathlib.Path(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / written.LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise mistake.Mistake(
            f"output_dir {root} cannot be written ({error.strerror}); choose another output_dir"
        ) from error
    try:
        _take(descriptor, root)
        _held.add(descriptor)
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _take(descriptor: int, root: pathlib.Path) -> None:
    """Take the lock and write who holds it, or tell who does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        raise mistake.Mistake(
            f"output_dir {root} is in use by another run (process {holder}); "
            "wait for it to end, stop it, or choose another output_dir"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _let_go() -> None:
    """Close inherited descriptors: a worker that outlives its killed parent must not keep the lock."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)
