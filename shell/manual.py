"""What is written about options: help on the command line and a page of the documentation."""

import argparse
import json
from typing import Any

from shell import about, checks, keys, options

_FORM = "python -m shell.train ALGORITHM [--config FILE.yaml] [--key value ...]"
_WRITING = (
    "The command line wins over the file. Flags: --key, --key false or --no_key. Lists: --key one two, or "
    "--key '[one, two]'. Mappings: --key '{a: 1}'. Keys of TRL and transformers configurations are read too."
)

_OWN = (
    "module:name is an Algorithm of your own; where defaults differ it takes those of the built-in one that "
    f"trains the same rows: {', '.join(f'{rows} {kin}' for rows, kin in about.KIN.items())} (pairs that need "
    "values: reward)."
)

# Keys that are read together with others, or for their value alone.
_PARTS = {
    "gradient_accumulation_steps": "`batch_size`, times what a device takes and the ranks",
    "optim": "AdamW, whatever its implementation",
    "per_device_train_batch_size": "`batch_size`, times the accumulation and the ranks",
}


def usage(algorithm: str | None = None) -> str:
    """Return the help of the options that an algorithm reads and that are built; None: of all."""
    which = f"ALGORITHM is one of {options.names()} or module:name. {_OWN}"
    if algorithm is not None:
        which = f"Options of {algorithm}." if algorithm in about.ALGORITHMS else f"{algorithm}: {_OWN}"
    parser = argparse.ArgumentParser(usage=_FORM, description=f"{which} {_WRITING}", add_help=False)
    groups: dict[str, Any] = {}
    for name in options.FIELDS:
        known = options.known(name)
        if algorithm is not None and not (options.reads(algorithm, name) and known.built):
            continue
        if known.group not in groups:
            groups[known.group] = parser.add_argument_group(known.group)
        groups[known.group].add_argument(f"--{name}", metavar="", help=_line(algorithm, name))
    return parser.format_help()


def as_markdown() -> str:
    """Return the page that lists every option."""
    lines = [
        "# Options",
        "",
        f"`{_FORM}`",
        "",
        f"ALGORITHM is one of {options.names()} or `module:name`.",
        _OWN,
        _WRITING,
    ]
    group = ""
    for name in options.FIELDS:
        known = options.known(name)
        if known.group != group:
            group = known.group
            lines += ["", f"## {group.capitalize()}", "", "| option | takes | default | read by | what |"]
            lines += ["| --- | --- | --- | --- | --- |"]
        readers = "all" if known.only is None else " ".join(_reader(one) for one in known.only)
        later = "" if known.built else " Not built yet."
        cells = (f"`{name}`", _takes(name), _defaults(name), readers, f"{known.text}.{later}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *_others()]) + "\n"


def _others() -> list[str]:
    """List the keys of other people's files."""
    lines = [
        "",
        "## Keys of TRL and transformers",
        "",
        "Read as options:",
        "",
        "| key | option |",
        "| --- | --- |",
    ]
    lines += [f"| `{key}` | {_PARTS.get(key, f'`{run.name}`')} |" for key, run in keys.RUN.items()]
    lines += [
        "",
        "Ignored, with a line that says so:",
        "",
        "| key | why it changes nothing |",
        "| --- | --- |",
    ]
    lines += [f"| `{key}` | {why} |" for key, why in keys.HARMLESS.items()]
    lines += ["", "Refused, unless the value asks for what is done anyway:", ""]
    lines += ["| key | instead | taken |", "| --- | --- | --- |"]
    for key, refused in keys.REFUSED.items():
        taken = ", ".join(f"`{json.dumps(value)}`" for value in refused.fine)
        lines.append(f"| `{key}` | {refused.instead} | {taken} |")
    return lines


def _line(algorithm: str | None, name: str) -> str:
    """Describe an option: what it is, what it takes, what it is when nobody sets it."""
    known = options.known(name)
    takes = _takes(name) if algorithm is None else checks.wanted(algorithm, name)
    by_rows = algorithm is None or (algorithm not in about.ALGORITHMS and known.differs)
    usual = _defaults(name) if by_rows else _shown(options.default(str(algorithm), name))
    later = "" if known.built else "; not built yet"
    return f"{known.text} [{takes}; default: {usual.replace('`', '')}{later}]".replace("%", "%%")


def _reader(name: str) -> str:
    """Name an algorithm."""
    return "module:name" if name == about.OWN else name


def _takes(name: str) -> str:
    """Say what an option takes, whatever the algorithm."""
    listed = options.known(name).choices
    if listed is None:
        return checks.wanted(about.OWN, name)
    return "; ".join(f"{algorithm}: {', '.join(taken)}" for algorithm, taken in listed.items())


def _defaults(name: str) -> str:
    """Say what an option is when nobody sets it, under each algorithm."""
    known = options.known(name)
    taken = (known.only or known.differs).items()
    by = {one: value for one, value in taken if about.ALGORITHMS.get(one, True)}
    under = [f"loss_type {one} {_shown(value)}" for one, value in known.under.items()]
    if known.only is not None and len(set(map(str, by.values()))) == 1:
        return ", ".join([_shown(next(iter(by.values()))), *under])
    usual = [] if known.only is not None else [_shown(options.FIELDS[name].default)]
    return ", ".join([*usual, *(f"{_reader(one)} {_shown(value)}" for one, value in by.items()), *under])


def _shown(value: Any) -> str:
    """Write a default as YAML does."""
    if value is None or value == ():
        return "not set"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(as_markdown(), end="")
