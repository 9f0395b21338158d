"""Evaluate a model on a dataset: `python -m shell.evaluate MODEL --dataset ...`."""

import sys
from collections.abc import Sequence

from shell import config, entry, mistake

USAGE = "python -m shell.evaluate MODEL --dataset DATASET [--key value ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate as the command line says and print one JSON object; the exit status is returned."""
    words = list(sys.argv[1:] if argv is None else argv)
    return entry.guarded(lambda: run(words))


def run(words: Sequence[str]) -> int:
    """Read the words, then load torch and evaluate."""
    if words[:1] in (["-h"], ["--help"], ["help"]):
        print(f"usage: {USAGE}\n\nThe keys are those of `python -m shell.train sft`; see its --help.")
        return 0
    if not words:
        raise mistake.Mistake(f"nothing came; {USAGE} was wanted.")
    if words[0].startswith("-"):
        raise mistake.Mistake(
            f"{words[0]!r} came first; {USAGE} was wanted: name a folder, hub id or tiny first."
        )
    command = config.parse(["sft", "--model", words[0], *words[1:]])
    from shell import jobs  # torch: only after the options are right

    return jobs.evaluate(command)


if __name__ == "__main__":
    sys.exit(main())
