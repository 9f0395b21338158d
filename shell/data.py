"""Rows to samples, prepared once: tokenized to disk, mapped into memory, found again by what made them."""

import collections
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Protocol

import attrs
import numpy as np
import tokenizers
import transformers

from core.plan import batching, sample
from shell import (
    aside,
    carried,
    counts,
    encode,
    formats,
    mistake,
    preferences,
    shares,
    sides,
    sources,
    truncate,
)
from shell import chat as chats

# Raised whenever the same rows and options would give other samples or other files.
FORMAT = 3
BATCH = 1000


@attrs.frozen(kw_only=True)
class Part:
    """Rows `start` to `stop` of prepared data: those of one source, whose share of an epoch is `weight`."""

    name: str
    start: int
    stop: int
    weight: float | None = None


@attrs.frozen(kw_only=True)
class Opened:
    """A source, and what its rows are.

    Attributes:
        source: gives the rows.
        kind: their format.
        conversation: whether they are messages.
        tools: whether they bring tools.
        rows: what an algorithm trains on them: `text`, `pairs` or `unpaired`.
    """

    source: sources.Source
    kind: str
    conversation: bool
    tools: bool
    rows: str = "text"


@attrs.frozen(kw_only=True, eq=False)
class Prepared:
    """Samples on disk. A row here is what is trained together: one sample, or both sides of a pair.

    A piece of a split text is a row.

    Attributes:
        tokens, trained: the samples one after another, int32 and bool `[tokens]`.
        columns: numbers of the samples by name, float64 `[samples]` each.
        terms: numbers of the tokens by name, `[tokens]` each.
        starts: where each sample begins in them, int64 `[samples + 1]`.
        rows: where each row begins among the samples, int64 `[rows + 1]`.
        parts: which rows came from which source.
        counts: what became of the rows that were read.
        fingerprint: names rows, tokenizer, template and options together.
    """

    tokens: np.ndarray
    trained: np.ndarray
    columns: Mapping[str, np.ndarray]
    starts: np.ndarray
    rows: np.ndarray
    parts: tuple[Part, ...]
    counts: counts.Counts
    fingerprint: str
    terms: Mapping[str, np.ndarray] = attrs.field(factory=dict)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows) - 1

    def samples(self, row: int) -> list[sample.Sample]:
        """Return the samples of one row; its number is their group and unit."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of prepared data that has {len(self)}")
        first, last = int(self.rows[row]), int(self.rows[row + 1])
        bounds = self.starts[first : last + 1].tolist()
        return [
            sample.Sample(
                tokens=self.tokens[start:stop].astype(np.int64),
                trained=np.array(self.trained[start:stop]),
                columns={
                    **{name: float(column[number]) for name, column in self.columns.items()},
                    **{name: np.array(column[start:stop]) for name, column in self.terms.items()},
                },
                group=int(row),
                unit=int(row),
            )
            for number, (start, stop) in enumerate(itertools.pairwise(bounds), start=first)
        ]


def look(found: Sequence[sources.Source], rows: str = "text") -> tuple[Opened, ...]:
    """Read the first row of each source and tell its format: the check that needs no tokenizer.

    Args:
        found: from `sources.find`.
        rows: what an algorithm trains on: `text`, `pairs` or `unpaired`.

    Raises:
        Mistake: when a source is empty, or its columns fit no format.
    """
    opened = []
    for source in found:
        first = next(source.read(0), None)
        if first is None:
            raise mistake.Mistake(f"dataset: {source.name} has no rows.")
        where, row = first
        if rows == "text":
            kind = formats.supervised(row.keys(), where=source.name)
            talks = kind in ("messages", "conversations") or (
                kind == "prompt and completion"
                and any(isinstance(row[name], list | Mapping) for name in ("prompt", "completion"))
            )
        else:
            kind = preferences.kind(row.keys(), rows, where=source.name)
            talks = preferences.is_conversation(row, kind)
        one = Opened(source=source, kind=kind, conversation=talks, tools="tools" in row, rows=rows)
        if not talks:
            _parse(one, row, where)
        opened.append(one)
    return tuple(opened)


def rules(
    opened: Sequence[Opened],
    *,
    tokenizer: transformers.PreTrainedTokenizerBase,
    max_length: int | None = None,
    truncation: str = "keep_start",
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    columns: Sequence[str] = (),
) -> encode.Rules:
    """Bind the options to a tokenizer, and refuse those that mean nothing for the rows.

    Raises:
        Mistake: for such options, and when conversations come without a template.
    """
    talks = [one for one in opened if one.conversation]
    chat = None
    if talks:
        chat = chats.bind(
            tokenizer,
            chat_template=chat_template,
            settings=chat_template_kwargs,
            tools=any(one.tools for one in talks),
        )
    bound = encode.Rules(
        tokenizer=tokenizer,
        chat=chat,
        max_length=max_length,
        truncation=truncation,
        completion_only_loss=completion_only_loss,
        assistant_only_loss=bool(assistant_only_loss),
        columns=tuple(columns),
    )
    for one in opened:
        encode.check(one.kind, one.conversation, bound, where=one.source.name)
    return bound


def prepare(
    opened: Sequence[Opened],
    bound: encode.Rules,
    *,
    folder: pathlib.Path,
    progress: Callable[[int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Prepared:
    """Tokenize every row to disk, or find that done.

    Args:
        opened: from `look`.
        bound: from `rules`.
        folder: where prepared data lie, each in a folder named by its fingerprint.
        progress: told the number of rows read so far.
        note: told when what had been prepared is damaged and is made again.

    Raises:
        Mistake: naming the first row that cannot be trained, or when nothing is left to train.
    """
    key = fingerprint(opened, bound)
    return _open(*aside.kept(folder, key, lambda place: _write(opened, bound, place, progress), note))


class Parted(Protocol):
    """Rows of one source or of several."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return which rows came from which source."""
        ...


def epoch_order(prepared: Parted, *, seed: int | None, epoch: int) -> np.ndarray:
    """Return the rows of one epoch in the order in which they are trained, int64 `[rows]`.

    Without weights an epoch is every row once. With weights it is as many draws as there are rows, of which
    each source gets its share; a source goes on in the next epoch where it stopped, and begins again, in a
    new order, when it is through. Both depend on the arguments alone, so a resumed run finds its place
    without a walk.

    Args:
        prepared: the rows.
        seed: of the shuffling; None takes rows as they come (sources with weights in turn).
        epoch: from 0.
    """
    total = len(prepared)
    if all(part.weight is None for part in prepared.parts):
        return batching.order(total, seed=seed, epoch=epoch)
    numbers = shares.draws(prepared.parts, total)
    drawn = [
        part.start
        + shares.walk(
            part.stop - part.start, epoch * number, number, None if seed is None else seed + index + 1
        )
        for index, (part, number) in enumerate(zip(prepared.parts, numbers, strict=True))
    ]
    if seed is not None:
        return np.concatenate(drawn)[batching.order(total, seed=seed, epoch=epoch)]
    turns = np.concatenate([(np.arange(number) + 0.5) / max(number, 1) for number in numbers])
    return np.concatenate(drawn)[np.argsort(turns, kind="stable")]


def fingerprint(opened: Sequence[Opened], bound: Any) -> str:
    """Return a name for rows, tokenizer, template, options and the libraries that read them.

    Args:
        opened: from `look`.
        bound: an attrs record of rules, with `tokenizer` and `chat`.
    """
    tokenizer = bound.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    made_of = {
        "format": FORMAT,
        "versions": [tokenizers.__version__, transformers.__version__],
        "sources": [[one.source.fingerprint, one.source.weight, one.kind, one.rows] for one in opened],
        "tokenizer": backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": None if bound.chat is None else [bound.chat.template, bound.chat.settings],
        "rules": attrs.asdict(bound, filter=lambda field, _: field.name not in ("tokenizer", "chat")),
    }
    return hashlib.blake2b(
        json.dumps(made_of, sort_keys=True, default=str).encode(), digest_size=16
    ).hexdigest()


def batches(
    rows: Iterator[sources.Located], opened: Opened, bound: encode.Rules
) -> Iterator[tuple[list[list[truncate.Piece]], counts.Counts]]:
    """Yield the samples of each row, many rows at a time since tokenizers are quick on many."""
    template = bound.chat.template if bound.chat is not None else ""
    while chunk := list(itertools.islice(rows, BATCH)):
        parsed = [(where, _parse(opened, row, where, template)) for where, row in chunk]
        _same_kind(parsed, opened)
        if opened.rows == "text":
            drafts = encode.drafts(parsed, bound)
            made, counted = truncate.fit(drafts, max_length=bound.max_length, truncation=bound.truncation)
        else:
            made, counted = (sides.pairs if opened.rows == "pairs" else sides.labeled)(parsed, bound)
        yield carried.added(made, chunk, bound.columns), counted


def together(pieces: Sequence[truncate.Piece], opened: Opened) -> list[list[truncate.Piece]]:
    """Return what is trained together of the samples of one row: both sides of a pair, else one sample."""
    if opened.rows == "pairs":
        return [list(pieces)] if pieces else []
    return [[piece] for piece in pieces]


def _parse(opened: Opened, row: Mapping[str, Any], where: str, template: str = "") -> Any:
    """Read one row in the format of its source."""
    read = formats.parse if opened.rows == "text" else preferences.parse
    return read(row, opened.kind, where=where, template=template)


def _same_kind(parsed: Sequence[tuple[str, Any]], opened: Opened) -> None:
    """Refuse text among messages and messages among text: the first row said which."""
    for where, row in parsed:
        side = getattr(row, "chosen", getattr(row, "side", row))
        if isinstance(side, formats.Conversation) != opened.conversation:
            came, wanted = ("messages", "text") if not opened.conversation else ("text", "messages")
            column = "chosen" if opened.rows == "pairs" else "prompt"
            raise mistake.Mistake(
                f"{where}, column {column}: {came} came; the first row has {wanted}, so {wanted} is wanted."
            )


def _write(
    opened: Sequence[Opened],
    bound: encode.Rules,
    folder: pathlib.Path,
    progress: Callable[[int], None] | None,
) -> dict[str, Any]:
    """Write the samples of all sources; return what they are."""
    total, parts = counts.Counts(), []
    lengths: list[int] = []
    rows = [0]
    columns: dict[str, list[float]] = collections.defaultdict(list)
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "trained.bin").open("wb") as trained:
        for one in opened:
            begin = len(rows) - 1
            for pieces, counted in batches(one.source.read(0), one, bound):
                for row in itertools.chain.from_iterable(together(part, one) for part in pieces):
                    lengths += _append(row, tokens, trained, columns)
                    rows.append(len(lengths))
                total = counts.merge(total, counted)
                if progress is not None:
                    progress(total.read)
            stop = len(rows) - 1
            parts.append(Part(name=one.source.name, start=begin, stop=stop, weight=one.source.weight))
            if stop == begin:
                reasons = "; ".join(f"{number} rows: {reason}" for reason, number in total.dropped.items())
                raise mistake.Mistake(f"dataset: {one.source.name} leaves nothing to train ({reasons}).")
    np.save(folder / "starts.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    np.save(folder / "rows.npy", np.asarray(rows, np.int64))
    for name, column in columns.items():
        np.save(folder / f"column-{name}.npy", np.asarray(column, np.float64))
    return {
        "counts": attrs.asdict(total),
        "parts": [attrs.asdict(part) for part in parts],
        "columns": sorted(columns),
    }


def _append(
    pieces: Sequence[truncate.Piece], tokens: BinaryIO, trained: BinaryIO, columns: dict[str, list[float]]
) -> list[int]:
    """Append samples to the files and their numbers to the columns; return their lengths."""
    for piece in pieces:
        tokens.write(piece.tokens.astype(np.int32).tobytes())
        trained.write(piece.trained.tobytes())
        for name, value in piece.columns.items():
            columns[name].append(value)
    return [len(piece.tokens) for piece in pieces]


def _open(place: pathlib.Path, about: Mapping[str, Any]) -> Prepared:
    """Map prepared files into memory."""
    return Prepared(
        tokens=np.memmap(place / "tokens.bin", np.int32, "r"),
        trained=np.memmap(place / "trained.bin", np.bool_, "r"),
        starts=np.load(place / "starts.npy", mmap_mode="r", allow_pickle=False),
        rows=np.load(place / "rows.npy", mmap_mode="r", allow_pickle=False),
        columns={
            name: np.load(place / f"column-{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in about["columns"]
        },
        parts=tuple(Part(**part) for part in about["parts"]),
        counts=counts.Counts(**about["counts"]),
        fingerprint=place.name,
    )
