"""What every entry point does around its work: mistakes in one line, exit statuses."""

import errno
import os
import signal
import sys
from collections.abc import Callable

from shell import mistake, roots

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


def guarded(work: Callable[[], int]) -> int:
    """Run an entry point's work and return its exit status.

    Args:
        work: returns 0 when done, 130 or 143 after a signal.

    Returns:
        The work's status; 2 for a mistake of the caller's, told in one line on standard error; 130 when
        interrupted before there was anything to save. What is our fault is raised.
    """
    try:
        roots.check()
        try:
            return work()
        finally:
            sys.stdout.flush()  # what nobody reads is met here, not when the interpreter ends
    except BrokenPipeError:
        # The reader has seen enough, as in `--help | head`; what is left goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except mistake.Mistake as told:
        print(f"error: {' '.join(str(told).split())}", file=sys.stderr)
        return 2
    except OSError as problem:
        if problem.errno not in NO_ROOM:
            raise
        where = f" ({problem.filename})" if problem.filename else ""
        told = f"nothing more could be written{where}: {problem.strerror}"
        print(f"error: {told}; make room there and run the same command again", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
