"""What a command line asks to be completed, and how: words and a file to the options of sampling."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from shell import config, entries, mistake, options, outranked, translate

# The algorithm whose options of rollouts these are.
LIKE = "grpo"
OWN = ("prompt", "prompts", "raw", "output")
READ = (
    *("model", "revision", "trust_remote_code", "tokenizer", "chat_template", "chat_template_kwargs"),
    *("dtype", "rope_scaling", "attn_implementation", "init_from", "device", "seed"),
    *("dataset", "dataset_config", "dataset_split", "task_options", "max_length"),
    *("num_generations", "max_completion_length", "temperature", "top_p", "top_k", "min_p"),
    *("cache_implementation", "compile"),
)
USUAL: Mapping[str, Any] = {"num_generations": 1, "max_completion_length": 256}
"""Where sampling differs from training when nobody says."""
_ROWS = ("dataset", "dataset_config", "dataset_split", "task_options")
_FILE, _LINE = entries.RANKS


@attrs.frozen(kw_only=True)
class Asked:
    """What is asked for.

    Attributes:
        command: the model, the numbers of sampling, where prompts come from.
        texts: prompts of the command line or a text file; None: rows of the dataset.
        raw: continue texts as they are.
        greedy: take the likeliest token each time.
        output: file to write to.
    """

    command: config.Command
    texts: tuple[str, ...] | None
    raw: bool
    greedy: bool
    output: pathlib.Path | None


def keys() -> list[str]:
    """List the options that sampling reads, with their values when nobody says."""
    usual = {name: USUAL.get(name, options.default(LIKE, name)) for name in READ}
    return [name if value is None else f"{name} {value}" for name, value in usual.items()]


def read(words: Sequence[str], folder: str) -> Asked:
    """Read the words of a command line, the model first.

    Args:
        words: `MODEL --key value ...`, or `--model MODEL ...`.
        folder: where texts are put as rows.

    Raises:
        mistake.Mistake: a key that nobody reads, a wrong value, no prompt, or two kinds of them.
    """
    first = words[0].startswith("--")
    written = config.written(words if first else ["--model", *words])
    own = _own(written)
    # A run's own file names its algorithm.
    passed = [one for one in written if (one.key, one.rank) != ("algorithm", _FILE)]
    rest = outranked.left([one for one in passed if one.key not in OWN])
    given, notes = translate.ours(LIKE, rest)
    unread = [(name, one) for name, one in given.items() if name not in READ]
    for name, one in unread:
        if one.rank == _LINE:
            hint = translate.hint(name, (*READ, *OWN))
            raise mistake.Mistake(f"{one.where}: sampling does not read {name}; leave it out.{hint}")
    kept = {name: attrs.evolve(one, key=name) for name, one in given.items() if name in READ}
    greedy = "temperature" in kept and kept["temperature"].read() == 0
    if greedy:
        del kept["temperature"]
    texts = _texts(own, kept)
    if texts is not None:
        kept = {n: one for n, one in kept.items() if n not in _ROWS or one.rank != _FILE}
        kept["dataset"] = entries.Entry(
            key="dataset", value=os.path.join(folder, "rows.jsonl"), where="--prompt"
        )
    if unread:
        notes = (*notes, f"sampling does not read {', '.join(name for name, _ in unread)}")
    return Asked(
        command=attrs.evolve(_command(kept), notes=notes),
        texts=texts,
        raw=_flag(own),
        greedy=greedy,
        output=_output(own),
    )


def _command(kept: Mapping[str, entries.Entry]) -> config.Command:
    """Resolve the options, with those that make any number of completions a step of their own."""
    usual = entries.from_values({name: value for name, value in USUAL.items() if name not in kept})
    number = kept["num_generations"].read() if "num_generations" in kept else USUAL["num_generations"]
    step = {"scale_rewards": "none", "batch_size": number if isinstance(number, int) else 1}
    return config.resolved(LIKE, [*kept.values(), *usual, *entries.from_values(step)])


def _own(written: Sequence[entries.Entry]) -> dict[str, entries.Entry]:
    """Return the entries that only sampling knows, the command line's before the file's."""
    own: dict[str, entries.Entry] = {}
    for one in written:
        if one.key in OWN and (one.key not in own or one.rank >= own[one.key].rank):
            own[one.key] = one
    return own


def _texts(own: Mapping[str, entries.Entry], kept: Mapping[str, entries.Entry]) -> tuple[str, ...] | None:
    """Return the prompts that were written out, None where rows of a dataset are asked for."""
    found = {**{n: own[n] for n in ("prompt", "prompts") if n in own}, "dataset": kept.get("dataset")}
    ranks = {name: one.rank for name, one in found.items() if one is not None}
    named = [name for name, rank in ranks.items() if rank == max(ranks.values())]
    if len(named) != 1:
        came = "nothing" if not named else " and ".join(f"--{name}" for name in named)
        raise mistake.Mistake(
            f"{came} came; one of --prompt TEXT, --prompts FILE, --dataset DATASET was wanted."
        )
    if named[0] == "dataset":
        return None
    one = own[named[0]]
    if one.bare or not str(one.value).strip():
        raise mistake.Mistake(f"{one.where}: {one.came()}; a text was wanted.")
    if named[0] == "prompt":
        return tuple(map(str, one.value)) if isinstance(one.value, list) else (str(one.value),)
    try:
        lines = pathlib.Path(str(one.value)).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        why = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise mistake.Mistake(
            f"{one.where}: {one.value} cannot be read ({why}); a text file with a prompt a line was wanted."
        ) from problem
    found = tuple(line for line in lines if line.strip())
    if not found:
        raise mistake.Mistake(f"{one.where}: {one.value} has no line with a prompt.")
    return found


def _flag(own: Mapping[str, entries.Entry]) -> bool:
    """Return whether texts are continued as they are."""
    value = own["raw"].read() if "raw" in own else False
    if not isinstance(value, bool):
        raise mistake.Mistake(f"{own['raw'].where}: {own['raw'].came()}; true or false was wanted.")
    return value


def _output(own: Mapping[str, entries.Entry]) -> pathlib.Path | None:
    """Return the file to write to, which must be a new one in a folder that is there."""
    if "output" not in own:
        return None
    one = own["output"]
    path = pathlib.Path(str(one.value))
    if one.bare or path.suffix != ".jsonl":
        raise mistake.Mistake(f"{one.where}: {one.came()}; a .jsonl file was wanted.")
    why = "it is there already" if os.path.lexists(path) else _unwritable(path.parent)
    if why:
        raise mistake.Mistake(f"{one.where}: {one.came()}, and {why}; name a new file.")
    return path


def _unwritable(folder: pathlib.Path) -> str:
    """Say why no file can be made in a folder, nothing where one can."""
    if not folder.is_dir():
        return f"there is no folder {folder}"
    return "" if os.access(folder, os.W_OK) else f"{folder} cannot be written to"
