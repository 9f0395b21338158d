"""Run as a program by a launcher: each rank makes the runs of a plan, one after the other.

    torchrun --nproc_per_node 2 -m tests.shell.ranked PLAN.json

The plan maps folders to options.
"""

import json
import pathlib
import sys

from tests.shell import runs


def main(file: str) -> int:
    """Make the runs."""
    plan = json.loads(pathlib.Path(file).read_text())
    return max(runs.run(pathlib.Path(folder), **options) for folder, options in plan.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
