"""Draw completions of prompts and show them: the work of `shell.sample`."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import transformers

from core import keys, ports
from shell import (
    answers,
    choose,
    counts,
    data,
    feed,
    generate,
    graphs,
    loop,
    options,
    prepare,
    progress,
    prompts,
    resume,
    sources,
    written,
)
from shell import asked as asked_

AT_ONCE = 64
"""Completions that are drawn before they are shown."""


def complete(asked: asked_.Asked, folder: str) -> int:
    """Complete what is asked for, print it, write it, and return the exit status.

    Args:
        asked: from `asked.read`.
        folder: for rows while they are prepared.
    """
    chosen, display = asked.command.options, progress.Display()
    for note in asked.command.notes:
        display.note(note)
    device = prepare.device(chosen, display)
    rows, tokenizer = _rows(asked, pathlib.Path(folder), display)
    shape = choose.shape(chosen, choose.config(chosen), choose.dtype(chosen, device))
    feed.check_vocabulary(rows.tokens, shape.vocab)
    model, params = choose.model(chosen, device, training=False)
    if chosen.init_from is not None:
        params = resume.weights(chosen, model, params)
    size, longest = options.number(chosen, "num_generations"), int(np.diff(rows.starts).max())
    at_once = min(len(rows), max(1, AT_ONCE // size))
    static = generate.fixed(chosen, device, longest=longest, at_once=at_once, size=size)
    asking = generate.asking(model, tokenizer, (), chosen, ports.ALONE, static)
    if asked.greedy:
        asking = attrs.evolve(asking, sampling=attrs.evolve(asking.sampling, temperature=0.0))
    with contextlib.ExitStack() as stack:
        stack.enter_context(loop.deterministic())
        stack.enter_context(graphs.told(chosen))
        file = None if asked.output is None else stack.enter_context(asked.output.open("x", encoding="utf-8"))
        for number, told in _drawn(asking, params, rows, chosen):
            print(_shown(told, number, alone=len(rows) == 1), flush=True)
            if file is not None:
                file.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in told)
    return 0


def _drawn(
    asking: answers.Asking, params: ports.Params, rows: prompts.Prompts, chosen: options.Options
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Give each prompt's number and what is told of its completions, a few prompts at a time."""
    size, key = options.number(chosen, "num_generations"), keys.fold_in(keys.key(chosen.seed), "sample")
    step = max(1, AT_ONCE // size)
    for start in range(0, len(rows), step):
        numbers = range(start, min(start + step, len(rows)))
        now = [rows.row(number) for number in numbers]
        groups = answers.drawn(asking, params, now, numbers, num_samples=size, key=key)
        for number, prompt, group in zip(numbers, now, groups, strict=True):
            yield number, [_told(prompt, one, asking.tokenizer) for one in group]


def _rows(
    asked: asked_.Asked, folder: pathlib.Path, display: progress.Display
) -> tuple[prompts.Prompts, transformers.PreTrainedTokenizerBase]:
    """Prepare the prompts, in the order of checks that training has."""
    chosen = asked.command.options
    opened = None if asked.texts is not None else _opened(chosen)
    described = choose.config(chosen)
    choose.check_weights(chosen)
    resume.check_source(chosen)
    tokenizer = choose.tokenizer(chosen)
    if opened is None:
        _write(asked, tokenizer)
        opened = _opened(chosen)
    limit = choose.max_length(asked.command, described, display.note)
    rows = prompts.prepare(
        opened, generate.rules(opened, chosen, tokenizer, limit), folder=folder / written.PREPARED
    )
    for line in counts.notes(rows.counts):
        display.note(line)
    return rows, tokenizer


def _opened(chosen: options.Options) -> tuple[data.Opened, ...]:
    """Open the rows."""
    return prompts.look(
        sources.find(
            chosen.dataset or (),
            config=chosen.dataset_config,
            split=chosen.dataset_split,
            task_options=chosen.task_options,
        )
    )


def _write(asked: asked_.Asked, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Write texts as rows: as the user's messages where there is a template to print them with."""
    talks = not asked.raw and bool(asked.command.options.chat_template or tokenizer.chat_template)
    path = pathlib.Path(str(asked.command.options.dataset))
    rows = ([{"role": "user", "content": text}] if talks else text for text in asked.texts or ())
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows), encoding="utf-8")


def _told(
    prompt: prompts.Prompt, drawn: ports.Completion, tokenizer: transformers.PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return what is told of one completion."""
    return {
        "prompt": prompt.columns["prompt"],
        "completion": str(tokenizer.decode(drawn.tokens.tolist(), skip_special_tokens=True)),
        "logprob": float(drawn.logprobs.astype("float64").sum()),
        "tokens": len(drawn.tokens),
        "ended": drawn.ended,
    }


def _shown(told: Sequence[Mapping[str, Any]], number: int, *, alone: bool) -> str:
    """Write the completions of one prompt: the text itself where it is the only one."""
    if alone and len(told) == 1:
        return str(told[0]["completion"])
    prompt = told[0]["prompt"]
    head = f"--- prompt {number + 1}: {prompt if isinstance(prompt, str) else prompt[-1]['content']}"
    parts = [] if alone else [head]
    for place, one in enumerate(told, 1):
        cut = "" if one["ended"] else ", cut off"
        if len(told) > 1:
            parts.append(f"--- {place} of {len(told)}, log-probability {one['logprob']:.2f}{cut}")
        parts.append(one["completion"])
    return "\n".join(parts)
