"""Prompts, prepared once: tokens and the other columns of their rows on disk, as other prepared rows are."""

import contextlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import transformers

from core.plan import sample
from shell import aside, counts, data, encode, formats, mistake, sources, truncate
from shell import chat as chats


@attrs.frozen(kw_only=True, eq=False)
class Rules:
    """How rows become prompts.

    Attributes:
        tokenizer: encodes; never changed.
        chat: the template for messages; None where prompts are text.
        limit: most tokens of a prompt, so that its completion still fits; None: no limit. Longer ones are
            left out and counted: a prompt that is cut asks something else.
        answers: how the rows' own completions become samples; None: they are left alone.
    """

    tokenizer: transformers.PreTrainedTokenizerBase
    chat: chats.Chat | None = None
    limit: int | None = None
    answers: encode.Rules | None = None


@attrs.frozen(kw_only=True, eq=False)
class Prompt:
    """One prompt.

    Attributes:
        tokens: ids, int64 `[length]`, ready to be continued.
        columns: the row, `prompt` included.
    """

    tokens: np.ndarray
    columns: Mapping[str, Any]


@attrs.frozen(kw_only=True, eq=False)
class Prompts:
    """Prompts on disk.

    Attributes:
        tokens: one after another, int32 `[tokens]`.
        starts: where each begins in them, int64 `[prompts + 1]`.
        text: the rows as JSON, one after another, bytes.
        lines: where each begins in it, int64 `[prompts + 1]`.
        parts: which prompts came from which source.
        counts: what became of the rows that were read.
        fingerprint: names rows, tokenizer, template and options together.
        answers: the rows' own completions, each with its prompt: ids, targets, and where each begins; None:
            they were left alone.
    """

    tokens: np.ndarray
    starts: np.ndarray
    text: np.ndarray
    lines: np.ndarray
    parts: tuple[data.Part, ...]
    counts: counts.Counts
    fingerprint: str
    answers: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.starts) - 1

    def row(self, number: int) -> Prompt:
        """Return one prompt."""
        first, stop = self.starts[number : number + 2].tolist()
        begin, end = self.lines[number : number + 2].tolist()
        return Prompt(
            tokens=self.tokens[first:stop].astype(np.int64),
            columns=json.loads(self.text[begin:end].tobytes()),
        )

    def answer(self, number: int, *, group: int, unit: int) -> sample.Sample:
        """Return one row's own completion with its prompt, as a sample of a group and a unit."""
        assert self.answers is not None, "the rows' own completions were left alone"
        tokens, trained, starts = self.answers
        first, stop = starts[number : number + 2].tolist()
        return sample.Sample(
            tokens=tokens[first:stop].astype(np.int64),
            trained=np.array(trained[first:stop]),
            group=group,
            unit=unit,
        )


def look(found: Sequence[sources.Source]) -> tuple[data.Opened, ...]:
    """Read the first row of each source: the check that needs no tokenizer.

    Raises:
        Mistake: a source is empty or has no column `prompt`.
    """
    opened = []
    for source in found:
        first = next(source.read(0), None)
        if first is None:
            raise mistake.Mistake(f"dataset: {source.name} has no rows.")
        where, row = first
        if "prompt" not in row:
            raise mistake.Mistake(
                f"{source.name}: the columns are {', '.join(row) or 'none'}; wanted is prompt, as text or as "
                "messages, beside the columns that reward functions read. Rename yours."
            )
        talks = isinstance(row["prompt"], list | Mapping)
        opened.append(
            data.Opened(
                source=source, kind="prompt", conversation=talks, tools="tools" in row, rows="prompts"
            )
        )
        _read(row, talks, where)
    return tuple(opened)


def rules(
    opened: Sequence[data.Opened],
    *,
    tokenizer: transformers.PreTrainedTokenizerBase,
    limit: int | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    answers: encode.Rules | None = None,
) -> Rules:
    """Bind the options to a tokenizer.

    Args:
        opened: from `look`.
        tokenizer: the model's.
        limit: most tokens of a prompt.
        chat_template, chat_template_kwargs: as in `chat.bind`.
        answers: from `data.rules`, where the rows' own completions are wanted.

    Raises:
        Mistake: prompts are messages and there is no template.
    """
    chat = None
    if any(one.conversation for one in opened):
        chat = chats.bind(
            tokenizer,
            chat_template=chat_template,
            settings=chat_template_kwargs,
            tools=any(one.tools for one in opened),
        )
    return Rules(tokenizer=tokenizer, chat=chat, limit=limit, answers=answers)


def prepare(
    opened: Sequence[data.Opened],
    bound: Rules,
    *,
    folder: pathlib.Path,
    progress: Callable[[int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Prompts:
    """Tokenize every prompt to disk, or find that done.

    Args:
        opened: from `look`.
        bound: from `rules`.
        folder: where prepared data lie.
        progress: told the number of rows read so far.
        note: told when what had been prepared is damaged and is made again.

    Raises:
        Mistake: naming the first row that is no prompt, or when none is left.
    """
    key = data.fingerprint(opened, bound)
    return _open(*aside.kept(folder, key, lambda place: _write(opened, bound, place, progress), note))


def encoded(rows: Sequence[sources.Located], bound: Rules, talks: bool) -> list[np.ndarray]:
    """Encode prompts so that a model goes on from there.

    Messages are printed with the beginning of the assistant's turn and encoded as printed; text is encoded
    with what the tokenizer puts in front of every text, and without what it puts behind.

    Args:
        rows: where each stands, and the row.
        bound: how.
        talks: whether prompts are messages.
    """
    parsed = [
        (where, _read(row, talks, where, bound.chat.template if bound.chat else "")) for where, row in rows
    ]
    if not talks:
        return [
            encode.prompt_ids(bound.tokenizer, encode.encodable(text, where)) for where, (text, _) in parsed
        ]
    assert bound.chat is not None, "messages are encoded with a chat template"
    printed = []
    for where, (messages, tools) in parsed:
        try:
            text = chats.render(bound.chat, messages, tools, generation_prompt=True)
        except mistake.Mistake as told:
            raise mistake.Mistake(f"{where}: {told}") from told
        printed.append(encode.encodable(text, where))
    ids: Any = bound.tokenizer(printed, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [
        encode.once(np.asarray(each, np.int64), bound.tokenizer.bos_token_id) for each in ids["input_ids"]
    ]


def _read(row: Mapping[str, Any], talks: bool, where: str, template: str = "") -> tuple[Any, Any]:
    """Return a row's prompt, text or messages, and its tools."""
    formats.text_or_messages(row, "prompt", where)
    if not talks:
        return formats.text_of(row, "prompt", where), None
    if isinstance(row.get("prompt"), str):
        raise mistake.Mistake(
            f"{where}, column prompt: text came; the first row has messages, so they are wanted."
        )
    messages = formats.messages_of(row, "prompt", where, template)
    if messages[-1]["role"] == "assistant":
        raise mistake.Mistake(
            f"{where}, column prompt: the last message is the assistant's; end in what it is to answer."
        )
    return messages, formats.tools_of(row, where)


def _write(
    opened: Sequence[data.Opened], bound: Rules, folder: pathlib.Path, progress: Callable[[int], None] | None
) -> dict[str, Any]:
    """Write the prompts of all sources; return what they are."""
    total, parts = counts.Counts(), []
    lengths, sizes, ends = [0], [0], [0]
    with contextlib.ExitStack() as stack:
        tokens, text, answers, targets = (
            stack.enter_context((folder / name).open("wb"))
            for name in ("tokens.bin", "rows.bin", "answers.bin", "targets.bin")
        )
        for one in opened:
            begin = len(lengths) - 1
            for prompt, row, own, counted in _rows(one, bound):
                total = counts.merge(total, counted)
                if progress is not None:
                    progress(total.read)
                if counted.used:
                    line = json.dumps(row).encode()
                    tokens.write(prompt.astype(np.int32).tobytes())
                    text.write(line)
                    lengths.append(len(prompt))
                    sizes.append(len(line))
                    if own is not None:
                        answers.write(own.tokens.astype(np.int32).tobytes())
                        targets.write(own.trained.tobytes())
                        ends.append(len(own.tokens))
            stop = len(lengths) - 1
            parts.append(data.Part(name=one.source.name, start=begin, stop=stop, weight=one.source.weight))
            if begin == stop:
                reasons = "; ".join(f"{number} rows: {reason}" for reason, number in total.dropped.items())
                raise mistake.Mistake(f"dataset: {one.source.name} leaves no prompt ({reasons}).")
    np.save(folder / "starts.npy", np.cumsum(np.array(lengths, np.int64)))
    np.save(folder / "lines.npy", np.cumsum(np.array(sizes, np.int64)))
    np.save(folder / "ends.npy", np.cumsum(np.array(ends, np.int64)))
    return {"counts": attrs.asdict(total), "parts": [attrs.asdict(part) for part in parts]}


def _rows(
    one: data.Opened, bound: Rules
) -> Iterator[tuple[np.ndarray, Mapping[str, Any], truncate.Piece | None, counts.Counts]]:
    """Yield each row's tokens, the row, its own answer if that is wanted, and what became of it."""
    rows = one.source.read(0)
    while chunk := list(itertools.islice(rows, data.BATCH)):
        prompts = encoded(chunk, bound, one.conversation)
        answers, cut = _answers(chunk, one, bound)
        for prompt, own, (where, row) in zip(prompts, answers, chunk, strict=True):
            reason = None
            if not len(prompt):
                reason = "the prompt is empty"
            elif bound.limit is not None and len(prompt) > bound.limit:
                reason = f"the prompt has more than {bound.limit} tokens, so its completion may not fit"
            elif bound.answers is not None and own is None:
                reason = "its completion is too long, or leaves nothing to train"
            yield prompt, _json(row, where), own, counts.merge(cut, _counted(prompt, own, reason))
            cut = counts.Counts()


def _answers(
    chunk: list[sources.Located], one: data.Opened, bound: Rules
) -> tuple[Sequence[truncate.Piece | None], counts.Counts]:
    """Encode the rows' own completions where they are wanted, None for what leaves nothing; count the cut."""
    if bound.answers is None:
        return [None] * len(chunk), counts.Counts()
    rows = attrs.evolve(one, rows="text", kind="prompt and completion")
    pieces, all_ = next(data.batches(iter(chunk), rows, bound.answers))
    cut = counts.Counts(cut_rows=all_.cut_rows, cut_tokens=all_.cut_tokens)
    return [part[0] if part else None for part in pieces], cut


def _json(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a row that JSON can hold."""
    try:
        json.dumps(row)
    except (TypeError, ValueError) as problem:
        raise mistake.Mistake(
            f"{where}: a column cannot be kept for reward functions ({problem}); text, numbers, lists and "
            "mappings were wanted. Remove the column or write it as text."
        ) from problem
    return row


def _counted(prompt: np.ndarray, own: truncate.Piece | None, reason: str | None) -> counts.Counts:
    """Count one row, by its own answer where that may be trained."""
    if reason is not None:
        return counts.Counts(read=1, dropped={reason: 1})
    tokens, trained = (len(prompt), 0) if own is None else (len(own.tokens), int(own.trained.sum()))
    return counts.Counts(read=1, used=1, samples=1, tokens=tokens, trained=trained)


def _open(place: pathlib.Path, about: Mapping[str, Any]) -> Prompts:
    """Map prepared files into memory."""
    ends = np.load(place / "ends.npy", mmap_mode="r", allow_pickle=False)
    answers = None
    if len(ends) > 1:
        tokens, targets = (place / name for name in ("answers.bin", "targets.bin"))
        answers = (np.memmap(tokens, np.int32, "r"), np.memmap(targets, np.bool_, "r"), ends)
    return Prompts(
        tokens=np.memmap(place / "tokens.bin", np.int32, "r"),
        starts=np.load(place / "starts.npy", mmap_mode="r", allow_pickle=False),
        text=np.memmap(place / "rows.bin", np.uint8, "r"),
        lines=np.load(place / "lines.npy", mmap_mode="r", allow_pickle=False),
        parts=tuple(data.Part(**part) for part in about["parts"]),
        counts=counts.Counts(**about["counts"]),
        fingerprint=place.name,
        answers=answers,
    )
