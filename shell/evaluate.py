"""Evaluate a model on a dataset: `python -m shell.evaluate MODEL --algorithm NAME --dataset ...`.

The numbers are those that a run of the algorithm logs as `eval_...` when it evaluates the same weights on
the same rows: the loss over all rows, or, of an algorithm that learns from rewards, what completions of the
prompts are worth.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence

import attrs

from shell import about, checks, config, entries, entry, mistake, options, outranked, translate

REFUSED = {
    "streaming": "evaluation reads every row once, so they are read whole",
    "dry_run": "evaluation has no plan to print; it makes no step and writes nothing",
}
# What only training reads; its file may serve evaluation too, so it is told and not refused.
TRAINING = {
    *("output_dir", "max_steps", "num_train_epochs", "resume", "save_strategy", "save_steps"),
    *("save_total_limit", "metric_for_best_model", "load_best_model_at_end", "greater_is_better"),
    *("logging_steps", "eval_strategy"),
    *("eval_steps", "eval_on_start", "eval_dataset", "eval_split", "report_to", "price_per_hour"),
    *("shuffle_dataset", "data_seed", "disable_dropout", "gradient_checkpointing", "activation_offloading"),
    *("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "fsdp"),
    *("precompute_ref_log_probs", "memory_report", "count_signatures"),
    *("dynamic_sampling", "num_iterations", "steps_per_generation", "num_generations"),
}
USAGE = "python -m shell.evaluate MODEL [--algorithm NAME] --dataset DATASET [--key value ...]"
HELP = f"""usage: {USAGE}

MODEL is a folder, a hub id or tiny; --model MODEL says the same. NAME is {{names}} or module:name, sft when
it is not set. One JSON object is printed: what a run of that algorithm logs as eval_... on the same rows.

The reference that dpo, kto or a caller's own compares MODEL with is, in this order: --ref_model; MODEL
itself, where --init_from names the weights that are evaluated; what the run began with that left MODEL as
its model/. Of grpo and rloo, prompts are completed, once each and always with the same draws, and scored by
reward_funcs.

The other keys are those of `python -m shell.train NAME`; see its --help. What only training reads is named
and ignored, so that a run's own config.yaml serves: --config OUT/config.yaml. Its eval_dataset, where it has
one, is what is evaluated on, unless --dataset says other rows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate as the command line says and print one JSON object; the exit status is returned."""
    words = list(sys.argv[1:] if argv is None else argv)
    return entry.guarded(lambda: run(words))


def run(words: Sequence[str]) -> int:
    """Read the words, then load torch and evaluate."""
    if words[:1] == ["help"] or {"-h", "--help"} & set(words):
        print(HELP.format(names=options.names()))
        return 0
    command = config.fetched(lambda: _command(words))
    unread = [name for name in options.FIELDS if name in command.given and _is_unread(command, name)]
    if unread:
        told = f"evaluation does not read {', '.join(unread)}"
        command = attrs.evolve(command, notes=(*command.notes, told))
    from shell import jobs  # torch: only after the options are right

    return jobs.evaluate(command)


def _command(words: Sequence[str]) -> config.Command:
    """Read the algorithm and the options."""
    if not words:
        raise mistake.Mistake(f"nothing came; {USAGE} was wanted.")
    first = words[0]
    if first in about.ALGORITHMS and not pathlib.Path(first).exists():
        raise mistake.Mistake(
            f"{first!r} came first, where MODEL was wanted: {USAGE}; say --algorithm {first}."
        )
    written = config.written(words if first.startswith("-") else ["--model", *words])
    named = [one for one in written if one.key == "algorithm"]
    for one in named:
        if not isinstance(one.value, str) or one.bare:
            raise mistake.Mistake(f"{one.where}: {one.came()}; {options.names()} or module:name was wanted.")
    word = max(named, key=lambda one: one.rank).value if named else "sft"
    asked = outranked.left([one for one in written if one.key != "algorithm"])
    _refuse(word, translate.ours(word, asked)[0])
    held = outranked.held_out(asked)
    command = config.resolved(word, held)
    if held == asked:
        return command
    note = f"the rows are eval_dataset {command.options.dataset} of the file, {command.options.dataset_split}"
    return attrs.evolve(command, notes=(*command.notes, note))


def _refuse(algorithm: str, given: Mapping[str, entries.Entry]) -> None:
    """Refuse what evaluation cannot do, before an option is asked for that only training needs."""
    for name, why in REFUSED.items():
        if name in given and checks.typed(algorithm, name, given[name]):
            raise mistake.Mistake(f"{given[name].where}: {why}; leave it out.")


def _is_unread(command: config.Command, name: str) -> bool:
    """Say whether an option changes nothing about an evaluation."""
    group = options.known(name).group
    by_rewards = command.algorithm in about.POLICY  # no loss is computed then
    return group == "optimizer" or name in TRAINING or (by_rewards and group == "loss")


if __name__ == "__main__":
    sys.exit(main())
