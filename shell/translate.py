"""From keys as they were written to values of our own options, with a line for each that is ignored."""

import difflib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from shell import entries, keys, mistake, options

# Keys that make an option together with others; they are put together after each was read.
# The numbers are what each is when only the other is given.
_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


def ours(
    algorithm: str, written: Sequence[entries.Entry]
) -> tuple[dict[str, entries.Entry], tuple[str, ...]]:
    """Turn every entry into one of an option of ours; of two for one option the command line's wins.

    Args:
        algorithm: whose options they are.
        written: entries of a file and of a command line.

    Returns:
        The entries by the name of our option, and a line for each key that was ignored or changed.

    Raises:
        Mistake: a key that does not exist or has no equal here, or two that disagree about one option.
    """
    notes: list[str] = []
    found: dict[str, entries.Entry] = {}
    for entry in written:
        for name, read in _one(algorithm, entry, notes):
            _keep(found, name, read)
    _together(found)
    return found, tuple(notes)


def _one(algorithm: str, entry: entries.Entry, notes: list[str]) -> Iterator[tuple[str, entries.Entry]]:
    """Give the option that an entry sets, if it sets one, and note what is ignored."""
    entry = _negated(entry)
    key = entry.key
    if key in keys.HARMLESS:
        notes.append(f"{entry.where} is ignored: {keys.HARMLESS[key]}.")
    elif key in keys.REFUSED:
        _refuse(entry, keys.REFUSED[key])
    elif key in keys.RUN or key in options.FIELDS:
        run = keys.RUN.get(key, keys.Run(key))
        value = _changed(entry, run, notes)
        if value is not keys.Drop:
            yield run.name, value
    else:
        raise mistake.Mistake(_unknown(algorithm, entry))


def _changed(entry: entries.Entry, run: keys.Run, notes: list[str]) -> Any:
    """Return the entry with a value of ours, or Drop."""
    if run.change is None and not keys.is_foreign(run.name):
        return entry
    try:
        value = run.change(entry.read()) if run.change else entry.read()
        value = value if value is keys.Drop else keys.foreign(run.name, value)
    except ValueError as told:
        raise mistake.Mistake(f"{entry.where}: {entry.came()}; {told}.") from None
    if isinstance(value, keys.Noted):
        notes.append(f"{entry.where}: {value.note}.")
        value = value.value
    return value if value is keys.Drop else attrs.evolve(entry, value=value, text=False)


def _refuse(entry: entries.Entry, refused: keys.Refused) -> None:
    """Refuse a key unless it asks for what is done anyway."""
    value = entry.read()
    if not any(value == fine and isinstance(value, bool) == isinstance(fine, bool) for fine in refused.fine):
        came = "it came" if entry.bare else entry.came()
        raise mistake.Mistake(f"{entry.where}: {came}, and it has no equal here; {refused.instead}.")


def _negated(entry: entries.Entry) -> entries.Entry:
    """Read a bare `--no_key` as the key with false."""
    positive = entry.key.removeprefix("no_")
    if entry.bare and positive != entry.key and _is_key(positive) and not _is_key(entry.key):
        return attrs.evolve(entry, key=positive, value=False, bare=False)
    return entry


def _keep(found: dict[str, entries.Entry], name: str, entry: entries.Entry) -> None:
    """Add an entry; the command line wins over the file, and two of one place must agree."""
    other = found.get(name)
    if other is not None and other.rank == entry.rank and other.read() != entry.read():
        raise mistake.Mistake(
            f"{other.where} and {entry.where}: {other.came()} and {entry.came()} for {name}; keep one."
        )
    if other is None or entry.rank >= other.rank:
        found[name] = entry


def _together(found: dict[str, entries.Entry]) -> None:
    """Make options of keys that say them together."""
    if "bf16" in found:
        _half(found, found["bf16"])
    rise = found.get("warmup_steps")
    if rise is not None and isinstance(part := rise.read(), float) and math.isfinite(part):
        _rise(found, rise, part)
    parts = {name: found.pop(name) for name in _BATCH if name in found}
    if parts:
        _batch(found, parts)
        _visits(found, parts.get("gradient_accumulation_steps"))


def _visits(found: dict[str, entries.Entry], accumulation: entries.Entry | None) -> None:
    """Read `steps_per_generation`, which beside an accumulation counts its parts, as optimizer steps.

    Parts of one step are drawn from one policy, so to draw for fewer of them is to draw for the step.
    """
    told = found.get("steps_per_generation")
    if told is None or accumulation is None or told.rank > accumulation.rank:
        return
    parts, size = _count(told, 1), _count(accumulation, 1)
    if parts > size and parts % size:
        raise mistake.Mistake(
            f"{told.where}: {told.came()}; a multiple of gradient_accumulation_steps, {size}, was wanted."
        )
    found["steps_per_generation"] = attrs.evolve(told, value=max(1, parts // size), text=False)


def _rise(found: dict[str, entries.Entry], rise: entries.Entry, part: float) -> None:
    """Read `warmup_steps` below 1 as a part of the run, as transformers does."""
    del found["warmup_steps"]
    if 0 < part < 1:
        _keep(found, "warmup_ratio", attrs.evolve(rise, value=part, text=False))
    else:
        found["warmup_steps"] = attrs.evolve(rise, value=int(part) if part == int(part) else part, text=False)


def _half(found: dict[str, entries.Entry], half: entries.Entry) -> None:
    """Read `bf16` as transformers does: where it is told alone, parameters are float32."""
    if half.read() is None:
        del found["bf16"]
    elif "dtype" not in found:
        found["dtype"] = attrs.evolve(half, value="float32", text=False, bare=False)


def _batch(found: dict[str, entries.Entry], parts: Mapping[str, entries.Entry]) -> None:
    """Multiply what a device takes at once, the accumulation and the ranks."""
    last = max(parts.values(), key=lambda entry: entry.rank)
    whole = found.get("batch_size")
    if whole is not None and whole.rank > last.rank:
        return
    if whole is not None and whole.rank == last.rank:
        raise mistake.Mistake(
            f"{whole.where} and {last.where}: both say how large a batch is; keep batch_size."
        )
    value = int(os.environ.get("WORLD_SIZE", "1"))
    for name, usual in _BATCH.items():
        value *= _count(parts.get(name), usual)
    found["batch_size"] = attrs.evolve(last, value=value, text=False)


def _count(entry: entries.Entry | None, usual: int) -> int:
    """Return a whole number above 0."""
    if entry is None:
        return usual
    value = entry.read()
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise mistake.Mistake(f"{entry.where}: {entry.came()}; a whole number of at least 1 was wanted.")
    return value


def _is_key(key: str) -> bool:
    """Say whether a key is an option here or a key of people's files."""
    return any(key in table for table in (options.FIELDS, keys.RUN, keys.HARMLESS, keys.REFUSED))


def _unknown(algorithm: str, entry: entries.Entry) -> str:
    """Tell that a key does not exist, with the nearest right one."""
    told = f"{entry.where}: {entry.came()}, and no option has this name."
    inner = entry.read()
    if isinstance(inner, Mapping):
        right = [str(key) for key in inner if _is_key(str(key))]
        named = (
            right[0] if right else next((near for key in inner for near in nearest(algorithm, str(key))), "")
        )
        if named:
            return f"{told} Keys are flat: write {named} at the left margin, not under {entry.key}."
    near = nearest(algorithm, entry.key)
    return f"{told} Did you mean {near[0]}?" if near else f"{told} See --help."


def nearest(algorithm: str, key: str) -> list[str]:
    """Return the right name that is nearest to a wrong one, if any is near."""
    plain = key.replace("-", "_").lower()
    if plain in keys.NICKNAMES:
        return [keys.NICKNAMES[plain]]
    if _is_key(plain):
        return [plain]
    own = [name for name in options.FIELDS if options.reads(algorithm, name)]
    return close(plain, own) or close(plain, [*options.FIELDS, *keys.RUN])


def hint(word: str, words: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a message, which asks whether the nearest of some words was meant."""
    near = close(word, words)
    return f" Did you mean {near[0]}?" if near else otherwise


def close(word: str, words: Iterable[str]) -> list[str]:
    """Return the nearest of some words, if any is near."""
    return difflib.get_close_matches(word, list(words), n=1)
