"""From options to what rollouts are made of: reward functions, prompts and their order, the generator."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from adapters import sampling, transformers_lm
from core import ports
from shell import answers, data, mistake, options, prompts, rewards, rollout, tasks
from shell import chat as chats


def functions(
    chosen: options.Options, own: Sequence[str | Callable[..., Any]], opened: Sequence[data.Opened]
) -> tuple[rewards.Reward, ...]:
    """Return what scores completions: the caller's own functions, those that are named, or the tasks' own.

    Args:
        chosen: the options.
        own: functions of a caller in Python.
        opened: the datasets.

    Raises:
        mistake.Mistake: there is none, or one takes what no column is.
    """
    known = tasks.scores([one.source.name for one in opened])
    named = (chosen.reward_funcs,) if isinstance(chosen.reward_funcs, str) else chosen.reward_funcs
    found = rewards.find(
        list(own or named or known),
        weights=chosen.reward_weights,
        limit=chosen.max_completion_length or 1,
        known=known,
    )
    columns = [row.keys() for one in opened if (row := next(one.source.read(0))[1])]
    rewards.check(found, [name for name in dict.fromkeys(n for row in columns for n in row)])
    return found


def rules(
    opened: Sequence[data.Opened], chosen: options.Options, tokenizer: Any, limit: int | None
) -> prompts.Rules:
    """Bind the options of prompts to the tokenizer.

    Args:
        opened: the datasets.
        chosen: the options.
        tokenizer: the model's.
        limit: most tokens of a prompt with its completion.

    Raises:
        mistake.Mistake: no prompt leaves room for its completion.
    """
    room = None if limit is None else limit - (chosen.max_completion_length or 1)
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
    )


def plan(rows: prompts.Prompts, chosen: options.Options, seed: int | None) -> rollout.Plan:
    """Return the prompts in their order.

    Args:
        rows: the prompts.
        chosen: the options.
        seed: of the order; None: as they come.
    """
    return rollout.Plan(
        prompts=rows,
        batch_size=chosen.batch_size,
        num_generations=chosen.num_generations or 1,
        steps_per_generation=chosen.steps_per_generation or 1,
        num_iterations=chosen.num_iterations or 1,
        max_tokens=chosen.max_completion_length or 1,
        seed=seed,
    )


def tempered(
    model: transformers_lm.TransformersLM, chosen: options.Options
) -> transformers_lm.TransformersLM:
    """Return the model as it is scored: at the temperature of the sampling.

    Args:
        model: as it was loaded.
        chosen: the options.
    """
    return attrs.evolve(model, shape=attrs.evolve(model.shape, temperature=chosen.temperature or 1.0))


def asking(
    model: transformers_lm.TransformersLM,
    tokenizer: Any,
    scored: Sequence[rewards.Reward],
    chosen: options.Options,
    ranks: ports.Ranks,
) -> answers.Asking:
    """Return how prompts are completed and scored.

    Args:
        model: what draws.
        tokenizer: the model's, with the template that prompts are printed with.
        scored: what scores.
        chosen: the options.
        ranks: who shares the work.
    """
    return answers.Asking(
        engine=sampling.Sampler(model),
        sampling=ports.Sampling(
            temperature=chosen.temperature or 1.0,
            top_k=chosen.top_k or 0,
            top_p=1.0 if chosen.top_p is None else chosen.top_p,
            min_p=chosen.min_p or 0.0,
            max_tokens=chosen.max_completion_length or 1,
            stop_ids=_stops(model, tokenizer),
        ),
        tokenizer=tokenizer,
        functions=scored,
        ranks=ranks,
    )


def _stops(model: transformers_lm.TransformersLM, tokenizer: Any) -> tuple[int, ...]:
    """Return what ends a completion: for the tokenizer, its template, or the model's own generation."""
    config = getattr(model.module, "generation_config", None)
    own = getattr(config, "eos_token_id", None)
    own = () if own is None else (own,) if isinstance(own, int) else tuple(own)
    return tuple(sorted({*chats.stop_ids(tokenizer), *own}))
