"""Small tokenizers and files for the tests of data preparation."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from core.plan import sample
from shell import data, sources, stream


def word_tokenizer(
    words: str, *, special: str = "<s> </s> E", bos: bool = False, eos: str = "</s>", pad: str | None = None
) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of one id a word: the special ones first, then `words`, in order."""
    names = [*special.split(), *words.split()]
    backend = tokenizers.Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, names[-1])
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(special.split())
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=eos, pad_token=pad or eos
    )


def spaced_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer that puts a space before every text, and other words after a special token."""
    letters = ["<unk>", "</s>", "<a>", "▁", *map(chr, range(97, 123)), "▁a", "▁b", "▁c", "▁y", "▁u"]
    merges = [("▁", letter) for letter in "abcyu"]
    model = models.BPE(
        vocab={name: number for number, name in enumerate(letters)}, merges=merges, unk_token="<unk>"
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>", "<a>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", extra_special_tokens=["<a>"]
    )


def write(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as a .jsonl file; return its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def prepare(
    path: pathlib.Path,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: transformers.PreTrainedTokenizerBase,
    kind: str = "text",
    **options: Any,
) -> data.Prepared:
    """Prepare rows through a file, as a run does; `kind`: what an algorithm trains on them."""
    opened = data.look(sources.find(write(path / "rows.jsonl", rows)), kind)
    return data.prepare(opened, data.rules(opened, tokenizer=tokenizer, **options), folder=path / "prepared")


def draw(
    path: pathlib.Path,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: transformers.PreTrainedTokenizerBase,
    *,
    seed: int | None = None,
    place: stream.Place | None = None,
    kind: str = "text",
    **options: Any,
) -> Any:
    """Stream rows from a file."""
    opened = data.look(sources.find(write(path / "rows.jsonl", rows), streaming=True), kind)
    return stream.draw(opened, data.rules(opened, tokenizer=tokenizer, **options), seed=seed, place=place)


def flat(prepared: data.Prepared) -> list[sample.Sample]:
    """Return all samples, row by row."""
    return [one for row in range(len(prepared)) for one in prepared.samples(row)]


def targets(one: sample.Sample) -> list[int]:
    """Return labels: the id where a token is trained, else -100."""
    return [int(token) if trained else -100 for token, trained in zip(one.tokens, one.trained, strict=True)]


def user(content: Any) -> dict[str, Any]:
    """Return what a user says."""
    return {"role": "user", "content": content}


def assistant(content: Any = None, **more: Any) -> dict[str, Any]:
    """Return what the assistant says."""
    return {"role": "assistant", "content": content, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """Return one tool call."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def spread(completions: Any, **_: Any) -> list[float]:
    """Reward what random text has more or less of."""
    return [float(len(str(text)) % 7) for text in completions]
