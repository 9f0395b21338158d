"""From options to what rollouts are made of: reward functions, prompts and their order, the generator."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from adapters import compiling, sampling, static_cache, transformers_lm
from core import ports
from shell import answers, data, encode, mistake, options, prompts, rewards, rounds, tasks
from shell import chat as chats

MOST_ROWS = 256
"""Of a cache of fixed shape, but for a larger group."""


def functions(
    chosen: options.Options,
    own: Sequence[str | Callable[..., Any]],
    opened: Sequence[data.Opened],
    held: Sequence[data.Opened] = (),
) -> tuple[rewards.Reward, ...]:
    """Return what scores completions: the caller's own functions, those that are named, or the tasks' own.

    Args:
        chosen: the options.
        own: functions of a caller in Python.
        opened: the datasets.
        held: those to evaluate on.

    Raises:
        mistake.Mistake: there is none, or one takes what no column is.
    """
    known = tasks.scores([one.source.name for one in opened])
    named = (chosen.reward_funcs,) if isinstance(chosen.reward_funcs, str) else chosen.reward_funcs
    found = rewards.find(
        list(own or named or known),
        weights=chosen.reward_weights,
        limit=_longest(chosen),
        known=known,
    )
    for rows, what in ((opened, "dataset"), (held, "eval_dataset")):
        columns = [row.keys() for one in rows if (row := next(one.source.read(0))[1])]
        if columns:
            rewards.check(found, [*dict.fromkeys(n for row in columns for n in row)], what)
    return found


def rules(
    opened: Sequence[data.Opened],
    chosen: options.Options,
    tokenizer: Any,
    limit: int | None,
    answers: encode.Rules | None = None,
) -> prompts.Rules:
    """Bind the options of prompts to the tokenizer.

    Args:
        opened: the datasets.
        chosen: the options.
        tokenizer: the model's.
        limit: most tokens of a prompt with its completion.
        answers: how the rows' own completions are encoded, where some are trained.

    Raises:
        mistake.Mistake: no prompt leaves room for its completion.
    """
    room = None if limit is None else limit - _longest(chosen)
    if room is not None and room < 1:
        raise mistake.Mistake(
            f"max_completion_length {chosen.max_completion_length} came; prompt and completion together have "
            f"room for {limit} tokens: lower it"
        )
    return prompts.rules(
        opened,
        tokenizer=tokenizer,
        limit=room,
        chat_template=chosen.chat_template,
        chat_template_kwargs=chosen.chat_template_kwargs,
        answers=answers,
    )


def plan(rows: prompts.Prompts, chosen: options.Options, seed: int | None) -> rounds.Plan:
    """Return the prompts in their order.

    Args:
        rows: the prompts.
        chosen: the options.
        seed: of the order; None: as they come.
    """
    return rounds.Plan(
        prompts=rows,
        batch_size=chosen.batch_size,
        num_generations=chosen.num_generations or 1,
        steps_per_generation=chosen.steps_per_generation or 1,
        num_iterations=chosen.num_iterations or 1,
        max_tokens=_longest(chosen),
        seed=seed,
        lmbda=1.0 if chosen.lmbda is None else chosen.lmbda,
    )


def tempered(
    model: transformers_lm.TransformersLM, chosen: options.Options
) -> transformers_lm.TransformersLM:
    """Return the model as it is scored: at the temperature of the sampling.

    Args:
        model: as it was loaded.
        chosen: the options.
    """
    temperature = options.number(chosen, "temperature")
    return attrs.evolve(model, shape=attrs.evolve(model.shape, temperature=temperature))


def asking(
    model: transformers_lm.TransformersLM,
    tokenizer: Any,
    scored: Sequence[rewards.Reward],
    chosen: options.Options,
    ranks: ports.Ranks,
    static: static_cache.Shapes | None = None,
) -> answers.Asking:
    """Return how prompts are completed and scored.

    Args:
        model: what draws.
        tokenizer: the model's, with the template that prompts are printed with.
        scored: what scores.
        chosen: the options.
        ranks: who shares the work.
        static: shapes of drawing that never change; None: they follow what is drawn.
    """
    return answers.Asking(
        engine=sampling.Sampler(model, static=static),
        sampling=ports.Sampling(
            temperature=options.number(chosen, "temperature"),
            top_k=options.number(chosen, "top_k"),
            top_p=options.number(chosen, "top_p"),
            min_p=chosen.min_p or 0.0,
            max_tokens=_longest(chosen),
            stop_ids=_stops(model, tokenizer),
        ),
        tokenizer=tokenizer,
        functions=scored,
        ranks=ranks,
    )


def static(
    chosen: options.Options,
    device: ports.Device,
    ranks: ports.Ranks,
    drawn: rounds.Plan,
    held_out: Any,
) -> static_cache.Shapes | None:
    """Return the shapes that serve every prompt of a run; None: shapes follow what is drawn.

    Args:
        chosen: the options.
        device: says what it needs when nobody asked.
        ranks: who shares the work.
        drawn: the prompts and how many are drawn at once.
        held_out: the prompts to evaluate on, or anything else.
    """
    known = [rows for rows in (drawn.prompts, held_out) if isinstance(rows, prompts.Prompts) and len(rows)]
    longest = max(int(np.diff(rows.starts).max()) for rows in known)
    at_once = -(-drawn.num_prompts * drawn.steps_per_generation // ranks.num)
    return fixed(chosen, device, longest=longest, at_once=at_once, size=drawn.num_generations)


def fixed(
    chosen: options.Options, device: ports.Device, *, longest: int, at_once: int, size: int
) -> static_cache.Shapes | None:
    """Return the shapes that serve prompts up to a length; None: shapes follow what is drawn.

    Args:
        chosen: the options.
        device: says what it needs when nobody asked.
        longest: tokens of the longest prompt.
        at_once: prompts that are drawn from in one call.
        size: completions of a prompt.
    """
    needs, asked = device.generation, chosen.cache_implementation
    if not (needs["static"] if asked is None else asked == "static"):
        return None
    counts = compiling.Counts()
    return static_cache.Shapes(
        rows=size * min(at_once, max(1, MOST_ROWS // size)),
        length=longest + _longest(chosen),
        chunk=needs.get("chunk", 128),
        on_host=needs.get("on_host", False),
        compiled=static_cache.one_graph(counts, **device.compile) if chosen.compile else None,
        counts=counts,
    )


def _longest(chosen: options.Options) -> int:
    """Return the most tokens of a completion."""
    return options.number(chosen, "max_completion_length")


def _stops(model: transformers_lm.TransformersLM, tokenizer: Any) -> tuple[int, ...]:
    """Return what ends a completion: for the tokenizer, its template, or the model's own generation."""
    config = getattr(model.module, "generation_config", None)
    own = getattr(config, "eos_token_id", None)
    own = () if own is None else (own,) if isinstance(own, int) else tuple(own)
    return tuple(sorted({*chats.stop_ids(tokenizer), *own}))
