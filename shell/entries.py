"""What the caller wrote, key by key, and where: words of a command line and lines of a YAML file."""

import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import yaml

from shell import mistake

RANKS = _FILE, _CALL = 0, 1
"""Of what a file says, and of what a command line or a call does."""


@attrs.frozen(kw_only=True)
class Entry:
    """One key with its value.

    Attributes:
        key: as it was written.
        value: what YAML made of it; the text itself for a word of a command line.
        where: the place, for messages.
        rank: the greater wins: a command line over a file.
        text: the value is a word, still to be read.
        bare: the key came without a value.
    """

    key: str
    value: Any
    where: str
    rank: int = _CALL
    text: bool = False
    bare: bool = False

    def read(self) -> Any:
        """Return the value as YAML reads it."""
        return read(self.value) if self.text else self.value

    def came(self) -> str:
        """Describe the value in a few words."""
        if self.bare:
            return "nothing came"
        text = repr(self.value)
        return f"{text if len(text) <= 60 else text[:57] + '...'} came"


Given = Mapping[str, Entry]
"""What was set, by the option's name."""


def read(text: str) -> Any:
    """Return a word as YAML reads it, as it is where that cannot be."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, mistake.Mistake, ValueError):
        return text


def from_file(path: str) -> tuple[Entry, ...]:
    """Read a YAML file of flat keys.

    Raises:
        Mistake: the file is missing, is no YAML, is no mapping, or has a key twice.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise mistake.Mistake(
            f"--config {_one_line(path)}: it cannot be read ({why}); a YAML file was wanted."
        ) from None
    path = _one_line(path)
    try:
        return tuple(_lines(_Loader(text), path))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise mistake.Mistake(f"{path}, line {line}: {error.problem}; YAML was wanted.") from None
    except yaml.YAMLError as error:
        raise mistake.Mistake(f"{path}: {' '.join(str(error).split())}; YAML was wanted.") from None
    except mistake.Mistake as told:
        raise mistake.Mistake(f"{path}, {told}") from None


def from_words(words: Sequence[str]) -> tuple[Entry, ...]:
    """Read `--key value`, `--key=value`, `--key`, `--no_key` and `--key first second`.

    Raises:
        Mistake: a value stands without a key, or a key stands twice.
    """
    found: dict[str, Entry] = {}
    for key, values in _grouped(words):
        where = f"--{_one_line(key)}"
        if key in found:
            several = "" if key == "config" else f", several values as {where} first second"
            raise mistake.Mistake(f"{where}: it stands twice; once was wanted{several}.")
        found[key] = _worded(key, values, where)
    return tuple(found.values())


def from_values(values: Mapping[str, Any]) -> tuple[Entry, ...]:
    """Take what a Python caller gives by keyword."""
    return tuple(
        Entry(key=key, value=os.fspath(value) if isinstance(value, os.PathLike) else value, where=f"{key}=")
        for key, value in values.items()
    )


def dump(values: Mapping[str, Any]) -> str:
    """Write a mapping so that `from_file` reads it back."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def shown(value: Any) -> str:
    """Write a value as YAML has it, in a word."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


def _worded(key: str, values: list[str], where: str) -> Entry:
    """Make the entry of one key of a command line."""
    if not values:
        return Entry(key=key, value=True, where=where, bare=True)
    if len(values) > 1:
        return Entry(key=key, value=values, where=where)
    return Entry(key=key, value=values[0], where=where, text=True)


def _grouped(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Give each key with the words up to the next."""
    key, values = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if key:
                yield key, values
            key, equals, rest = word[2:].partition("=")
            if not key.strip():
                raise mistake.Mistake(f"{word!r}: it names no option; --key value was wanted.")
            values = [rest] if equals else []
        elif not key:
            raise mistake.Mistake(f"{word!r}: it belongs to no option; --key value was wanted.")
        else:
            values.append(word)
    if key:
        yield key, values


class _Loader(yaml.SafeLoader):
    """YAML without keys that stand twice, in which 1e-5 is a number, 010 is ten and 1:30 no number at all."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        _refuse_twice(node)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 010 as eight and 1:30 as ninety; nobody writes options so.
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in forms if pair[0] not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

# YAML 1.1 wants a dot and a signed exponent in a number, and reads 1e-5 as text.
_NUMBER = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_WHOLE = re.compile(r"^[-+]?\d[\d_]*$")
_DECIMAL = re.compile(
    r"^([-+]?(\d[\d_]*\.\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+|[-+]?\.inf|\.nan)$", re.I
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _WHOLE, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _DECIMAL, list("-+.0123456789"))


def _whole(loader: yaml.SafeLoader, node: Any) -> int:
    """Read a whole number in decimal."""
    return int(str(loader.construct_scalar(node)))


_Loader.add_constructor("tag:yaml.org,2002:int", _whole)


class _Dumper(yaml.SafeDumper):
    """The other way: text that would be read as a number is quoted."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def _lines(loader: _Loader, path: str) -> Iterator[Entry]:
    """Give the entries of a document."""
    node = loader.get_single_node()
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise mistake.Mistake(
            f"line {node.start_mark.line + 1}: {_kind(node)} came; `key: value` lines were wanted."
        )
    _refuse_twice(node)
    loader.flatten_mapping(node)
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise mistake.Mistake(f"line {line}: {_kind(key)} came as a key; a name was wanted.")
        yield Entry(
            key=key.value,
            value=loader.construct_object(value, deep=True),
            where=f"{path}, line {line}, {_one_line(key.value)}",
            rank=_FILE,
        )


def _one_line(key: str) -> str:
    """Keep a key from breaking the line of a message."""
    return " ".join(key.split())


def _kind(node: yaml.Node) -> str:
    """Name what a node is."""
    kinds = {yaml.MappingNode: "a mapping", yaml.SequenceNode: "a list"}
    return kinds.get(type(node), "a text")


def _refuse_twice(node: yaml.MappingNode) -> None:
    """Refuse a mapping with a key that stands twice: YAML would keep the last without a word."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode) and key.value in lines:
            raise mistake.Mistake(
                f"line {line}, {key.value}: it also stands in line {lines[key.value]}; keep one."
            )
        if isinstance(key, yaml.ScalarNode):
            lines[key.value] = line
