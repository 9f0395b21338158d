"""SIGINT and SIGTERM turned into a question that the loop asks between steps."""

import contextlib
import signal
import threading
import types
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def caught() -> Iterator[Callable[[], int]]:
    """Catch the first SIGINT or SIGTERM; a second one interrupts at once, as if nothing were caught.

    Yields:
        A function that returns the signal's number, 0 while none came. Python lets only the main thread catch
        signals; in another one none comes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    came = 0
    names = (signal.SIGINT, signal.SIGTERM)
    before = {name: signal.getsignal(name) for name in names}

    def catch(number: int, frame: types.FrameType | None) -> None:
        nonlocal came
        came = number
        for name, handler in before.items():
            signal.signal(name, handler)

    for name in names:
        signal.signal(name, catch)
    try:
        yield lambda: came
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
