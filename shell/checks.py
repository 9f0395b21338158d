"""What the values of options must be, alone and together, told before anything heavy is imported."""

import datetime
import functools
import importlib.util
import math
import netrc
import os
import pathlib
import types
import typing
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jsonargparse

from shell import (
    about,
    adapter,
    entries,
    loss_checks,
    mistake,
    options,
    rope,
    shape_checks,
    source_checks,
    translate,
)

Given = entries.Given

LARGEST = 2**31 - 1
"""Most of a whole number whose option says no other: beyond it sums and products leave what tables hold."""
# What YAML writes; true and false are whole numbers.
_PLAIN = (str, int, float, datetime.date, types.NoneType)
_SCHEDULE = ("min_lr", "min_lr_rate")
_NUMBERS = {bool, int, float}
_NAMES = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    types.NoneType: "null",
}


def typed(algorithm: str, name: str, entry: entries.Entry) -> Any:
    """Return an entry's value as its option's type.

    Raises:
        Mistake: the value has another type or is out of range.
    """
    kinds, taken = _kinds(options.FIELDS[name].type), options.choices(algorithm, name)
    came = _came(entry, kinds, bool(taken))
    if isinstance(came, str) and not taken and kinds & _NUMBERS and kinds <= {*_NUMBERS, types.NoneType}:
        came = entries.read(came)
        if isinstance(came, str):
            raise _unfit(algorithm, name, entry)
    # The parser reads every text once more, so that "null" would be null and {x: "1"} a number.
    if (isinstance(came, dict) and dict in kinds) or (
        isinstance(came, str) and str in kinds and not taken and not entry.text
    ):
        return came
    try:
        value = _parser(name).parse_object({name: came}, defaults=False)[name]
    except (jsonargparse.ArgumentError, ValueError, TypeError):
        raise _unfit(algorithm, name, entry) from None
    if value is None and not _may_be_null(algorithm, name):
        raise _unfit(algorithm, name, entry)
    _fit(algorithm, name, entry, value)
    listed = options.known(name).choices
    if listed is not None:
        value = _chosen(algorithm, name, entry, value)
    return value


def wanted(algorithm: str, name: str) -> str:
    """Say in words what an option takes."""
    taken = options.choices(algorithm, name)
    kinds = _kinds(options.FIELDS[name].type)
    words = [f"one of {', '.join(taken)}"] if taken else []
    several = tuple in kinds and (options.known(name).choices is None or algorithm == "dpo")
    words += ["a list of them" if taken else "a list"] if several else []
    words += ["a mapping"] if dict in kinds else []
    if not taken:
        numbers = [float] if float in kinds else [int] if int in kinds else []
        words += [_NAMES[kind] for kind in (*numbers, bool, str) if kind in kinds]
    else:
        words += [_NAMES[kind] for kind in (int, bool) if kind in kinds]
    words += ["null"] if types.NoneType in kinds and _may_be_null(algorithm, name) else []
    known = options.known(name)
    limits = (
        ("at least", known.low),
        ("above", known.above),
        ("at most", known.high),
        ("below", known.below),
    )
    bounds = " and ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)
    return " or ".join(words) + (f", {bounds}" if bounds else "")


def together(algorithm: str, chosen: options.Options, given: Given) -> None:
    """Refuse options that exclude each other, or that do nothing without another.

    Raises:
        Mistake: names both.
    """
    for check in (
        _blank,
        _needed,
        source_checks.check,
        _misplaced,
        _warmup,
        _schedule,
        _rope,
        _intervals,
        _saving,
        _evaluation,
        _best,
        _trackers,
        shape_checks.check,
        adapter.check,
    ):
        check(chosen, given)
    loss_checks.check(algorithm, chosen, given)
    for name, entry in given.items():
        known, value = options.known(name), getattr(chosen, name)
        if not known.built and value != options.default(algorithm, name):
            raise mistake.Mistake(
                f"{entry.where}: {value!r} came, and {name} is not built yet; leave it out."
            )


def read(algorithm: str, given: Given) -> None:
    """Refuse an option that the algorithm does not read.

    Raises:
        Mistake: names both.
    """
    for name, entry in given.items():
        only = options.known(name).only
        if only is not None and not options.reads(algorithm, name) and entry.read() is not None:
            readers = " ".join(reader for reader in only if reader != about.OWN)
            raise mistake.Mistake(
                f"{entry.where}: {name} is not read by {algorithm}; leave it out ({readers} read it)."
            )


def _fit(algorithm: str, name: str, entry: entries.Entry, value: Any) -> None:
    """Refuse a number that is not finite or not within its option's limits, alone or in a list."""
    high = options.known(name).high
    if isinstance(value, tuple) and not all(_in_range(name, one) for one in value):
        limit = "" if high is None else f", at most {high:g}"
        raise mistake.Mistake(f"{entry.where}: {entry.came()}; finite numbers were wanted{limit}.")
    if high is None and isinstance(value, int) and value > LARGEST:
        raise mistake.Mistake(f"{entry.where}: {entry.came()}; at most {LARGEST} was wanted.")
    if not _in_range(name, value):
        raise _unfit(algorithm, name, entry)


def _unfit(algorithm: str, name: str, entry: entries.Entry) -> mistake.Mistake:
    """Tell that a value has another type or is out of range, with the nearest choice."""
    hint = translate.hint(str(entry.value), options.choices(algorithm, name))
    key = "" if entry.where.endswith((entry.key, f"{entry.key}=")) and entry.key == name else f" for {name}"
    return mistake.Mistake(f"{entry.where}: {entry.came()}; {wanted(algorithm, name)} was wanted{key}.{hint}")


@functools.cache
def _parser(name: str) -> jsonargparse.ArgumentParser:
    """Make the parser of one option, which knows its type."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{name}", type=options.FIELDS[name].type)
    return parser


def _came(entry: entries.Entry, kinds: set[Any], listed: bool) -> Any:
    """Return an entry's value, a word read as YAML where the option does not take words as they are."""
    if not entry.text:
        return entry.value
    read = entry.read()
    if isinstance(read, list | dict):
        return read if kinds & {tuple, dict} else entry.value
    return entry.value if listed or str in kinds else read


def _may_be_null(algorithm: str, name: str) -> bool:
    """Say whether null is a value: where an algorithm gives an option a number, null is none."""
    only = options.known(name).only
    unset = only is None or only.get(options.reader(algorithm)) is None
    return options.optional(name) and unset


def _in_range(name: str, value: Any) -> bool:
    """Say whether a number is finite and within an option's limits; what is none has no limits."""
    known = options.known(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    return (
        math.isfinite(value)
        and (known.low is None or value >= known.low)
        and (known.high is None or value <= known.high)
        and (known.above is None or value > known.above)
        and (known.below is None or value < known.below)
    )


def _chosen(algorithm: str, name: str, entry: entries.Entry, value: Any) -> Any:
    """Refuse a value that is not listed, and take a list of one for the one."""
    listed = (value,) if isinstance(value, str) else value or ()
    taken = options.choices(algorithm, name)
    odd = len(listed) != 1 and algorithm != "dpo" and value is not None
    if odd or any(one not in taken for one in listed):
        raise _unfit(algorithm, name, entry)
    return listed[0] if len(listed) == 1 else value


def _kinds(kind: Any) -> set[Any]:
    """Return what an annotation is made of, Literals and what containers hold left out."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(_kinds, typing.get_args(kind)))
    return set() if origin is Literal else {origin or kind}


def _both(given: Given, first: str, second: str, why: str) -> mistake.Mistake:
    """Name two options that exclude each other, each where it stands."""
    places = " and ".join(given[name].where if name in given else name for name in (first, second))
    return mistake.Mistake(f"{places}: {why}")


def _blank(chosen: options.Options, given: Given) -> None:
    """Refuse text without a letter, as a path the current folder, and text that cannot be a name."""
    for name, entry in given.items():
        value = getattr(chosen, name)
        if isinstance(value, str) and not value.strip():
            raise mistake.Mistake(f"{entry.where}: {value!r} came; {options.known(name).text}.")
        odd = next((one for one in _parts(value) if not isinstance(one, _PLAIN)), None)
        if odd is not None:
            raise mistake.Mistake(f"{entry.where}: {odd!r:.60} came; text, numbers or lists were wanted.")
        if any(isinstance(one, str) and "\0" in one for one in _parts(value)):
            raise mistake.Mistake(f"{entry.where}: {entry.came()}; text without NUL characters was wanted.")


def _parts(value: Any) -> Iterator[Any]:
    """Give everything in a value that is neither a list nor a mapping, however deep."""
    if isinstance(value, Mapping):
        yield from _parts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _parts(one)
    else:
        yield value


def _needed(chosen: options.Options, given: Given) -> None:
    """Ask for what has no default."""
    for name, example in (("model", "tiny"), ("dataset", "rows.jsonl")):
        if not getattr(chosen, name):
            raise mistake.Mistake(
                f"--{name}: nothing came; {options.known(name).text}, as in --{name} {example}."
            )
    if chosen.streaming and chosen.max_steps is None:
        where = given["streaming"].where if "streaming" in given else "streaming"
        raise mistake.Mistake(f"{where}: a stream has no last row, and max_steps is not set; set max_steps.")


def _misplaced(chosen: options.Options, given: Given) -> None:
    """Refuse options that stand inside the mapping of another."""
    for key in chosen.chat_template_kwargs or {}:
        # A template's `tools` are its own.
        if key in options.FIELDS and key != "tools":
            raise _both(given, "chat_template_kwargs", key, f"write {key} beside it, not inside.")


def _warmup(chosen: options.Options, given: Given) -> None:
    """Take one warm-up at most, and none where the schedule has none."""
    if chosen.warmup_steps and chosen.warmup_ratio:
        raise _both(given, "warmup_steps", "warmup_ratio", "both say how long the warm-up is; keep one.")
    if chosen.lr_scheduler_type == "constant" and (chosen.warmup_steps or chosen.warmup_ratio):
        name = "warmup_steps" if chosen.warmup_steps else "warmup_ratio"
        raise _both(given, "lr_scheduler_type", name, "constant has no warm-up; constant_with_warmup has.")


def _schedule(chosen: options.Options, given: Given) -> None:
    """Check the numbers of the one schedule that has any."""
    numbers = chosen.lr_scheduler_kwargs or {}
    where = given["lr_scheduler_kwargs"].where if "lr_scheduler_kwargs" in given else "lr_scheduler_kwargs"
    for key, value in numbers.items():
        if key not in _SCHEDULE:
            hint = translate.hint(str(key), _SCHEDULE)
            raise mistake.Mistake(f"{where}: {key!r} came; {' or '.join(_SCHEDULE)} was wanted.{hint}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise mistake.Mistake(f"{where}: {key} {value!r} came; a number of at least 0 was wanted.")
        highest = 1 if key == "min_lr_rate" else chosen.learning_rate
        if value > highest:
            of = "a part of learning_rate" if key == "min_lr_rate" else "learning_rate"
            raise mistake.Mistake(
                f"{where}: {key} {value!r} came as the least rate; at most {highest:g} was wanted, {of}."
            )
    if len(numbers) > 1:
        raise mistake.Mistake(f"{where}: min_lr and min_lr_rate both say where the schedule ends; keep one.")
    if bool(numbers) != (chosen.lr_scheduler_type == "cosine_with_min_lr"):
        why = "cosine_with_min_lr needs min_lr or min_lr_rate, and no other schedule reads them."
        raise _both(given, "lr_scheduler_type", "lr_scheduler_kwargs", why)


def _rope(chosen: options.Options, given: Given) -> None:
    """Check the type and the factor of scaled positions."""
    if chosen.rope_scaling is not None:
        where = given["rope_scaling"].where if "rope_scaling" in given else "rope_scaling"
        rope.check(chosen.rope_scaling, where)


def _intervals(chosen: options.Options, given: Given) -> None:
    """Take whole steps, or a part of the run."""
    for name in ("logging_steps", "save_steps", "eval_steps"):
        value = getattr(chosen, name)
        if value is not None and value > 1 and value != int(value):
            where = given[name].where if name in given else name
            raise mistake.Mistake(
                f"{where}: {value} came; whole steps, or a part of the run below 1, were wanted."
            )


def _saving(chosen: options.Options, given: Given) -> None:
    """Take save_steps where saving goes by steps."""
    if chosen.save_strategy != "steps" and chosen.save_steps is not None:
        raise _both(
            given, "save_strategy", "save_steps", f"{chosen.save_strategy} does not go by steps; keep one."
        )


def _evaluation(chosen: options.Options, given: Given) -> None:
    """Take eval_steps and eval_dataset where something is evaluated, and something to evaluate on."""
    strategy = chosen.eval_strategy
    if strategy != "steps" and chosen.eval_steps is not None:
        raise _both(given, "eval_strategy", "eval_steps", f"{strategy} does not go by steps; keep one.")
    if strategy == "no" and not chosen.eval_on_start:
        if chosen.eval_dataset is not None:
            raise _both(given, "eval_strategy", "eval_dataset", "no evaluates nothing; keep one.")
        return
    told = given.get("eval_dataset")
    own_split = any("split" in row for row in source_checks.listed(chosen.dataset))
    if (told is None or told.read() is None) and (own_split or source_checks.is_file(chosen.dataset)):
        name = next(name for name in ("eval_strategy", "eval_steps", "eval_on_start") if name in given)
        raise mistake.Mistake(
            f"{given[name].where}: dataset names no test split beside it; set eval_dataset."
        )


def _best(chosen: options.Options, given: Given) -> None:
    """Take a best metric where there are metrics."""
    if chosen.metric_for_best_model and chosen.eval_strategy == "no":
        name = next(n for n in ("metric_for_best_model", "load_best_model_at_end") if n in given)
        raise _both(given, name, "eval_dataset", "nothing is evaluated; set eval_dataset.")
    if chosen.greater_is_better is not None and not chosen.metric_for_best_model:
        raise _both(
            given, "greater_is_better", "metric_for_best_model", "the first is of the second; set both."
        )


def _trackers(chosen: options.Options, given: Given) -> None:
    """Look for each tracker's package and login, importing neither."""
    for name in chosen.report_to:
        where = given["report_to"].where if "report_to" in given else "report_to"
        if importlib.util.find_spec(name) is None:
            raise mistake.Mistake(f"{where}: {name} came, and it is not installed; pip install {name}.")
        if name == "wandb" and not _wandb_login(os.environ):
            why = (
                "WANDB_API_KEY is not set and netrc has no login; run `wandb login` or set WANDB_MODE=offline"
            )
            raise mistake.Mistake(f"{where}: wandb came without a login: {why}.")


def _wandb_login(variables: Mapping[str, str]) -> bool:
    """Say whether Weights & Biases would find a login, or needs none."""
    if variables.get("WANDB_API_KEY") or variables.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    path = pathlib.Path(variables.get("NETRC") or pathlib.Path.home() / ".netrc")
    host = urllib.parse.urlparse(variables.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
