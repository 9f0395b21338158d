"""The console command `espalier`: one subcommand for each entry point."""

import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from shell import mistake, roots, translate

# Each module has `main(argv) -> exit status`, and is imported when asked for: help and mistakes stay quick.
COMMANDS = {
    "train": ("shell.train", "train a model: ALGORITHM [--config FILE.yaml] [--key value ...]"),
    "evaluate": ("shell.evaluate", "evaluate a model on a dataset"),
    "sample": ("shell.sample", 'let a model complete prompts: MODEL --prompt "..."'),
    "compare": ("shell.compare", "lay two runs of one job side by side: speed, memory, cost and losses"),
    "merge": ("shell.merge", "merge an adapter into its base: ADAPTER OUTPUT_DIR [--dtype float32]"),
    "env": ("shell.env", "print what this machine and installation are, ready to paste into a report"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the words after `espalier`; the process's own when None.

    Returns:
        The exit status: 0 done, 2 the caller's mistake, 1 ours.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        roots.check()
        if not words or words[0] in ("-h", "--help", "help"):
            print(_usage())
            return 0 if words else 2
        if words[0] == "--version":
            print(importlib.metadata.version(roots.DISTRIBUTION))
            return 0
        module, _ = COMMANDS[_known(words[0])]
    except mistake.Mistake as told:
        print(f"espalier: {told}", file=sys.stderr)
        return 2
    return importlib.import_module(module).main(words[1:])


def _known(command: str) -> str:
    """Return the command, or refuse it with the nearest right name."""
    if command in COMMANDS:
        return command
    wanted, hint = ", ".join(COMMANDS), translate.hint(command, COMMANDS, " See espalier --help.")
    raise mistake.Mistake(f"command {command!r} does not exist; one of {wanted} was wanted.{hint}")


def _usage() -> str:
    """Describe the subcommands."""
    lines = [f"  {name:<10}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: espalier COMMAND [...]", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
