"""The disk as tests need it: what is written is there for every process at once, and nobody waits for it.

A write that is waited for takes milliseconds, a small run makes thirty. What it adds is for a machine that
loses its power; a process that is killed leaves the same with and without.
"""

import os


def hurry() -> None:
    """Let `os.fsync` of this process and of its forks see that a file is open, and return."""
    os.fsync = _looked


def _looked(descriptor: int) -> None:
    """Raise what `os.fsync` raises for a descriptor that is not open."""
    os.fstat(descriptor)
