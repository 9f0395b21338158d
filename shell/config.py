"""Options of a run, read from a command line and a YAML file; mistakes are told before torch is imported.

`ALGORITHM [--config FILE.yaml] [--key value ...]`; the command line wins over the file. A flag may stand bare
(`--streaming`) or be switched off (`--streaming false`, `--no_streaming`). Lists and mappings are YAML
(`--dataset '[a.jsonl, {path: hub/id, split: dev}]'`); a list may also be several words (`--key one two`).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from shell import (
    about,
    adapter,
    checks,
    entries,
    hubs,
    manual,
    mistake,
    options,
    rollout_checks,
    source_checks,
    translate,
)
from shell.options import Options

CALLERS = "custom:algorithm"
"""The name of an Algorithm that is handed over in Python; no file can name it."""
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@attrs.frozen(kw_only=True)
class Command:
    """What was asked for.

    Attributes:
        algorithm: a name, or `module:name` of a caller's own.
        options: every option, resolved.
        given: names of the options that were set, not left at their defaults.
        notes: a line for each key that was ignored or read as something else.
    """

    algorithm: str
    options: Options
    given: frozenset[str]
    notes: tuple[str, ...]


def parse(argv: Sequence[str]) -> Command:
    """Read a command line.

    Args:
        argv: the words after the program's name.

    Returns:
        The algorithm and every option, resolved.

    Raises:
        Mistake: one line: where, what came, what was wanted, and the nearest right name.
        SystemExit: status 0, when help was asked for and printed.
    """
    words = list(argv)
    if not words:
        raise mistake.Mistake(
            f"no algorithm came; one of {options.names()} or module:name was wanted. See --help."
        )
    if words[0] == "help" or "-h" in words or "--help" in words:
        known = words[0] if words[0] in about.ALGORITHMS or _OWN.fullmatch(words[0]) else None
        print(manual.usage(known))
        raise SystemExit(0)
    algorithm = _algorithm(words[0])
    return resolved(algorithm, written(words[1:]))


def fetched(read: Callable[[], Command]) -> Command:
    """Read options, and once more where an adapter that they name by its hub id had to be fetched first.

    Args:
        read: the same words or values each time.

    Raises:
        Mistake: as `parse`, or the hub cannot be reached.
    """
    command = read()
    return read() if hubs.fetched(command.options) else command


def written(words: Sequence[str]) -> list[entries.Entry]:
    """Return the entries of a command line and of the file that it names.

    Args:
        words: after the algorithm.

    Raises:
        Mistake: as `parse`.
    """
    written = entries.from_words(words)
    files = [entry for entry in written if entry.key == "config"]
    told = [entry for entry in written if entry.key != "config"]
    for entry in files:
        if not entry.text:
            raise mistake.Mistake(f"--config: {entry.came()}; one YAML file was wanted.")
        told = [*entries.from_file(entry.value), *told]
    return told


def from_values(algorithm: str, values: Mapping[str, Any]) -> Command:
    """Read options that a Python caller gives by keyword; the same rules as on a command line.

    Args:
        algorithm: a name, or `module:name`.
        values: by key, ours or people's.

    Returns:
        The algorithm and every option, resolved.

    Raises:
        Mistake: as `parse`.
    """
    return resolved(algorithm, entries.from_values(values))


def to_yaml(chosen: Options) -> str:
    """Write options as a file that `parse` reads back to the same ones."""
    kept = {
        name: value
        for name, value in plain(chosen).items()
        if value is not None or options.FIELDS[name].default is not None
    }
    return entries.dump(kept)


def to_file(command: Command, max_length: int | None) -> str:
    """Write what ran as a file that training and evaluation read back: its algorithm stands in it, too.

    Args:
        command: what was asked for.
        max_length: most tokens of a sequence, as the model holds it.
    """
    named = {} if command.algorithm == CALLERS else {"algorithm": command.algorithm}
    ran = attrs.evolve(command.options, max_length=max_length)
    return (entries.dump(named) if named else "") + to_yaml(ran)


def plain(chosen: Options) -> dict[str, Any]:
    """Return options by name, as YAML holds them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in attrs.asdict(chosen, recurse=False).items()
    }


def changes(old: Mapping[str, Any], new: Options) -> list[str]:
    """Name the options whose change gives other weights, so that a run cannot be continued under them.

    Args:
        old: options of the run that is there, as its config.yaml has them.
        new: options now.

    Returns:
        Names in the order of the options.
    """
    now = plain(new)
    usual = plain(Options())
    return [
        name
        for name, value in now.items()
        if options.known(name).result and old.get(name, usual[name]) != value
    ]


def every(interval: float, num_steps: int) -> int:
    """Return the whole steps of `logging_steps`, `save_steps` or `eval_steps` in a run.

    Args:
        interval: steps, or below 1 a part of the run.
        num_steps: steps of the whole run.
    """
    return max(1, whole(interval * num_steps)) if interval < 1 else int(interval)


def whole(steps: float) -> int:
    """Return the whole steps that a part of a step counts as; 0.07 * 100 is 7, though not to the last bit."""
    return math.ceil(round(steps, 9))


def resolved(word: str, written: Sequence[entries.Entry]) -> Command:
    """Turn entries into options: names, types, what follows from others, what excludes others.

    Args:
        word: the algorithm, as it came.
        written: what was set, by a command line or a file or a call.

    Raises:
        Mistake: as `parse`.
    """
    algorithm = _algorithm(word)
    given, notes = translate.ours(algorithm, _agreeing(algorithm, written))
    checks.read(algorithm, given)
    values = {name: options.default(algorithm, name) for name in options.FIELDS}
    asked = {name: entry for name, entry in given.items() if options.reads(algorithm, name)}
    values |= {name: checks.typed(algorithm, name, entry) for name, entry in asked.items()}
    chosen = _derived(_under(algorithm, Options(**values), given), given)
    checks.together(algorithm, chosen, given)
    return Command(
        algorithm=algorithm,
        options=chosen,
        given=frozenset(given),
        notes=(*notes, *_remarks(algorithm, chosen, given)),
    )


def settled(command: Command, kin: str) -> Command:
    """Give what nobody set under a caller's own algorithm the defaults of the built-in one that is nearest.

    What an algorithm trains on is known only when its module is imported, so this comes after `parse`.

    Args:
        command: of a `module:name`; any other is returned as it is.
        kin: the built-in algorithm that trains the same rows.

    Raises:
        Mistake: its rollouts cannot be as they are asked for.
    """
    if command.algorithm in about.ALGORITHMS:
        return command
    usual = {
        name: options.default(kin, name)
        for name in options.FIELDS
        if options.known(name).differs and name not in command.given
    }
    changed = {name: value for name, value in usual.items() if value != getattr(command.options, name)}
    wrong = rollout_checks.prompts(command.options) if kin == about.KIN["prompts"] else None
    if wrong is not None:
        raise mistake.Mistake(f"{wrong[0]}: {wrong[1]}")
    told = ", ".join(f"{name} {entries.shown(value)}" for name, value in changed.items())
    note = (f"as {kin}, which trains the same rows: {told}",) if changed else ()
    return attrs.evolve(
        command, options=attrs.evolve(command.options, **changed), notes=(*command.notes, *note)
    )


def _agreeing(algorithm: str, written: Sequence[entries.Entry]) -> list[entries.Entry]:
    """Leave out the algorithm that a run's own file names, which must be the one that is asked for."""
    for one in written:
        if one.key == "algorithm" and one.value != algorithm:
            raise mistake.Mistake(f"{one.where}: {one.came()}, and {algorithm} is asked for; keep one.")
    return [one for one in written if one.key != "algorithm"]


def _under(algorithm: str, chosen: Options, given: Mapping[str, entries.Entry]) -> Options:
    """Give what nobody set the default that it has under the loss that was asked for."""
    free = [name for name in options.FIELDS if name not in given and options.reads(algorithm, name)]
    usual = {name: options.known(name).under for name in free}
    kind = chosen.loss_type if isinstance(chosen.loss_type, str) else ""
    return attrs.evolve(chosen, **{name: by[kind] for name, by in usual.items() if kind in by})


def _derived(chosen: Options, given: Mapping[str, entries.Entry]) -> Options:
    """Settle the options that follow from others."""
    strategy = chosen.eval_strategy
    if strategy is None:
        strategy = "steps" if chosen.eval_steps else "epoch" if chosen.eval_dataset else "no"
    settled: dict[str, Any] = {"eval_strategy": strategy}
    if strategy == "steps" and chosen.eval_steps is None:
        settled["eval_steps"] = chosen.logging_steps
    if (strategy != "no" or chosen.eval_on_start) and chosen.eval_dataset is None:
        settled["eval_dataset"] = chosen.dataset
    rows = settled.get("eval_dataset", chosen.eval_dataset)
    if rows is not None and chosen.eval_split is None:
        settled["eval_split"] = "train" if source_checks.is_file(rows) else "test"
    if chosen.save_strategy != "steps" and "save_steps" not in given:
        settled["save_steps"] = None
    if chosen.load_best_model_at_end and chosen.metric_for_best_model is None:
        settled["metric_for_best_model"] = "loss"
    return adapter.settled(attrs.evolve(chosen, **settled), given)


def _remarks(algorithm: str, chosen: Options, given: Mapping[str, entries.Entry]) -> list[str]:
    """Say what a caller may not expect of options that are right."""
    told = adapter.remarks(algorithm, chosen, given)
    if chosen.max_steps is None or not options.asked(algorithm, chosen, given, "num_train_epochs"):
        return told
    where = given["num_train_epochs"].where
    return [*told, f"{where} is ignored: max_steps {chosen.max_steps} says how long the run is."]


def _algorithm(word: str) -> str:
    """Return an algorithm that can be run, or refuse it."""
    if about.ALGORITHMS.get(word) or _OWN.fullmatch(word):
        return word
    if word in about.ALGORITHMS:
        raise mistake.Mistake(
            f"algorithm {word!r}: it is not built yet; {options.names()} or module:name was wanted."
        )
    near = about.KINDRED.get(word.lower())
    hint = f" Did you mean {near}?" if near else translate.hint(word, about.ALGORITHMS, " See --help.")
    raise mistake.Mistake(
        f"algorithm {word!r}: it does not exist; one of {options.names()} or module:name was wanted.{hint}"
    )
