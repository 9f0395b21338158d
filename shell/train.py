"""Train a model: `python -m shell.train ALGORITHM [--config FILE.yaml] [--key value ...]`."""

import sys
from collections.abc import Sequence

from shell import config, entry, places


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; the exit status is returned.

    Returns:
        0 done, 2 the caller's mistake, 143 or 130 after SIGTERM or SIGINT with a checkpoint saved; what is
        our fault is raised.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    return entry.guarded(lambda: run(words))


def run(words: Sequence[str]) -> int:
    """Read the words, then load torch and train."""
    command = config.fetched(lambda: config.parse(words))
    places.placed(command.options)
    from shell import jobs  # torch: only after the options are right

    return jobs.train(command)


if __name__ == "__main__":
    sys.exit(main())
