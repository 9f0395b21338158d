"""Let a model complete prompts: `python -m shell.sample MODEL --prompt "..."`.

The engine, the template and the numbers of sampling are those that training from rewards draws with.
"""

import os
import sys
import tempfile
from collections.abc import Sequence

from shell import asked, entry, hubs, mistake

USAGE = 'python -m shell.sample MODEL --prompt "..." | --prompts FILE | --dataset DATASET [--key value ...]'
HELP = f"""usage: {USAGE}

MODEL is a folder, a hub id or tiny. Completions are printed; with --output they also go to a file.

what is completed, one of
  --prompt TEXT     a prompt, or several: as the user's message where there is a chat template
  --prompts FILE    a text file, one prompt a line
  --dataset DATASET rows with a prompt, as for `python -m shell.train grpo`: a file, a hub id, a task
beside it
  --raw             continue texts as they are, without the chat template
  --output FILE     a new .jsonl file: prompt, completion, logprob, tokens and ended of each
  --temperature 0   takes the likeliest token each time

The other keys, with what is taken when they are not set: {{keys}}.
A file of them may be named with --config, such as a run's own OUT/config.yaml; what it says of training is
named and ignored, what the command line says of weights and prompts wins over it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Complete prompts as the command line says; the exit status is returned."""
    words = list(sys.argv[1:] if argv is None else argv)
    return entry.guarded(lambda: run(words))


def run(words: Sequence[str]) -> int:
    """Read the words, then load torch and draw."""
    if words[:1] == ["help"] or {"-h", "--help"} & set(words):
        print(HELP.format(keys=", ".join(asked.keys())))
        return 0
    if not words or words[0].startswith("--prompt") or words[0] in ("--dataset", "--config"):
        raise mistake.Mistake(f"no MODEL came first; {USAGE} was wanted.")
    with tempfile.TemporaryDirectory() as folder:
        wanted = asked.read(words, folder)
        if hubs.fetched(wanted.command.options):  # what an adapter of the hub is, is known only now
            wanted = asked.read(words, folder)
        from shell import completing  # torch: only after the options are right

        try:
            return completing.complete(wanted, folder)
        except mistake.Mistake as told:  # the rows of texts lie in a file that nobody named
            text = str(told).replace(os.path.join(folder, "rows.jsonl"), "--prompt")
            raise mistake.Mistake(text) from told


if __name__ == "__main__":
    sys.exit(main())
