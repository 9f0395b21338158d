"""Evaluate a model on a dataset: `python -m shell.evaluate MODEL --dataset ...`."""

import sys
from collections.abc import Mapping, Sequence

import attrs

from shell import checks, config, entries, entry, mistake, options, translate

REFUSED = {
    "streaming": "evaluation reads every row once, so they are read whole",
    "dry_run": "evaluation has no plan to print; it makes no step and writes nothing",
}
# What only training reads; its file may serve evaluation too, so it is told and not refused.
TRAINING = {
    *("output_dir", "max_steps", "num_train_epochs", "resume", "save_strategy", "save_steps"),
    *("save_total_limit", "metric_for_best_model", "greater_is_better", "logging_steps", "eval_strategy"),
    *("eval_steps", "eval_on_start", "eval_dataset", "eval_split", "report_to", "price_per_hour"),
    *("shuffle_dataset", "data_seed", "disable_dropout", "gradient_checkpointing"),
}
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
    asked = ["--model", words[0], *words[1:]]
    _refuse(translate.ours("sft", config.written(asked))[0])
    command = config.parse(["sft", *asked])
    unread = [name for name in options.FIELDS if name in command.given and _is_unread(name)]
    if unread:
        told = f"evaluation does not read {', '.join(unread)}"
        command = attrs.evolve(command, notes=(*command.notes, told))
    from shell import jobs  # torch: only after the options are right

    return jobs.evaluate(command)


def _refuse(given: Mapping[str, entries.Entry]) -> None:
    """Refuse what evaluation cannot do, before an option is asked for that only training needs."""
    for name, why in REFUSED.items():
        if name in given and checks.typed("sft", name, given[name]):
            raise mistake.Mistake(f"{given[name].where}: {why}; leave it out.")


def _is_unread(name: str) -> bool:
    """Say whether an option changes nothing about an evaluation."""
    return options.known(name).group == "optimizer" or name in TRAINING


if __name__ == "__main__":
    sys.exit(main())
