"""Prompts to completions to rewards: what both training and evaluation ask a generator for."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
import transformers
from torch import Tensor

from adapters import compiling
from core import advantages, metrics, ports
from shell import mistake, prompts, rewards

TAKEN = ("prompt", "completion")
"""Columns that reward functions get as prompts and completions, or not at all."""


@attrs.frozen(kw_only=True, eq=False)
class Asking:
    """How prompts are completed and scored.

    Attributes:
        engine: completes prompts.
        sampling: how it draws.
        tokenizer: completions to text.
        functions: what scores them.
        ranks: each generates for its share of the prompts; the first scores them all.
    """

    engine: ports.Engine
    sampling: ports.Sampling
    tokenizer: transformers.PreTrainedTokenizerBase
    functions: Sequence[rewards.Reward]
    ranks: ports.Ranks = ports.ALONE


@attrs.frozen(kw_only=True, eq=False)
class Answered:
    """Completions with their rewards, the groups one after another.

    Attributes:
        prompts: one a completion.
        completions: tokens with what was noted of them.
        texts: what they say.
        parts: of each reward function, before weights, float64 `[samples, functions]`; NaN for none.
        rewards: weighted sums, float64 `[samples]`; NaN where no function gave a reward.
        groups: which prompt each answers, int64 `[samples]`.
        extras: columns that functions added for the table.
        means: what functions logged.
    """

    prompts: Sequence[prompts.Prompt]
    completions: Sequence[ports.Completion]
    texts: Sequence[str]
    parts: Tensor
    rewards: Tensor
    groups: Tensor
    extras: Mapping[str, Sequence[Any]]
    means: metrics.Metrics


def ask(
    asking: Asking,
    params: ports.Params,
    rows: Sequence[prompts.Prompt],
    numbers: Sequence[int],
    *,
    num_samples: int,
    key: int,
    state: rewards.State,
) -> Answered:
    """Draw completions and score them; the same on every rank.

    Args:
        asking: how.
        params: the parameters to draw with.
        rows: the prompts.
        numbers: of the prompts; with the key they name the draws.
        num_samples: completions of each.
        key: names the draws.
        state: where the run stands, for reward functions.

    Raises:
        Mistake: a reward function failed, or no completions could be drawn, here or on another rank.
    """
    index, num = asking.ranks.index, asking.ranks.num
    groups: Sequence[Sequence[ports.Completion]] = ()
    failed: mistake.Mistake | None = None
    try:
        groups = drawn(
            asking, params, rows[index::num], list(numbers[index::num]), num_samples=num_samples, key=key
        )
    except mistake.Mistake as told:
        failed = told
    completions = _gathered(groups, len(rows), num_samples, asking, failed)
    repeated = [row for row in rows for _ in range(num_samples)]
    texts = [str(asking.tokenizer.decode(c.tokens.tolist(), skip_special_tokens=True)) for c in completions]
    scored, parts = _scored(asking, repeated, completions, texts, state)
    return Answered(
        prompts=repeated,
        completions=completions,
        texts=texts,
        parts=parts,
        rewards=advantages.weighted_sum(parts, weights=[each.weight for each in asking.functions]),
        groups=torch.tensor([n for n in numbers for _ in range(num_samples)], dtype=torch.int64),
        extras=scored.extras,
        means=scored.means,
    )


def drawn(
    asking: Asking,
    params: ports.Params,
    rows: Sequence[prompts.Prompt],
    numbers: Sequence[int],
    *,
    num_samples: int,
    key: int,
) -> Sequence[Sequence[ports.Completion]]:
    """Draw completions of this rank's prompts.

    Args:
        asking: how.
        params: the parameters to draw with.
        rows: the prompts.
        numbers: of the prompts; with the key they name the draws.
        num_samples: completions of each.
        key: names the draws.

    Raises:
        Mistake: the model gives no finite numbers to draw by, or completions do not fit the memory.
    """
    try:
        return asking.engine.generate(
            params,
            [row.tokens for row in rows],
            numbers,
            num_samples=num_samples,
            sampling=asking.sampling,
            key=key,
        )
    except compiling.Unplanned:  # who planned the graphs tells of it
        raise
    except ValueError as problem:
        raise mistake.Mistake(mistake.line(problem)) from problem
    except (MemoryError, RuntimeError) as problem:
        full = isinstance(problem, (MemoryError, torch.OutOfMemoryError))
        if not full and not any(told in str(problem) for told in ("out of memory", "can't allocate memory")):
            raise
        raise mistake.Mistake(
            f"{len(rows) * num_samples} completions drawn at once do not fit the memory "
            f"({mistake.line(problem)[:80]}); lower num_generations, batch_size or max_completion_length"
        ) from problem


def joined(several: Sequence[Answered]) -> Answered:
    """Put the answers of several questions to the generator one after another.

    Args:
        several: from `ask`, of unlike prompts.
    """
    names = dict.fromkeys(name for one in several for name in one.extras)
    return Answered(
        prompts=[prompt for one in several for prompt in one.prompts],
        completions=[completion for one in several for completion in one.completions],
        texts=[text for one in several for text in one.texts],
        parts=torch.cat([one.parts for one in several]),
        rewards=torch.cat([one.rewards for one in several]),
        groups=torch.cat([one.groups for one in several]),
        extras={
            name: [value for one in several for value in one.extras.get(name, [None] * len(one.texts))]
            for name in names
        },
        means=metrics.merge(*(one.means for one in several)),
    )


def taken(answered: Answered, places: Sequence[int]) -> Answered:
    """Take some of the completions, in an order.

    Args:
        answered: from `ask`.
        places: of the completions.
    """
    index = torch.tensor(places, dtype=torch.int64)
    return attrs.evolve(
        answered,
        prompts=[answered.prompts[i] for i in places],
        completions=[answered.completions[i] for i in places],
        texts=[answered.texts[i] for i in places],
        parts=answered.parts.index_select(0, index),
        rewards=answered.rewards.index_select(0, index),
        groups=answered.groups.index_select(0, index),
        extras={name: [values[i] for i in places] for name, values in answered.extras.items()},
    )


def measured(answered: Answered, functions: Sequence[rewards.Reward]) -> metrics.Metrics:
    """Return what is logged about completions and their rewards, in forms that add up.

    Args:
        answered: from `ask`.
        functions: what scored them.
    """
    total, groups = answered.rewards, answered.groups
    first = torch.from_numpy(np.unique(groups.numpy(), return_index=True)[1])
    deviations = torch.stack([_deviation(total[groups == group]) for group in groups[first]])
    lengths = torch.tensor([len(c.tokens) for c in answered.completions], dtype=torch.float64)
    ended = torch.tensor([c.ended for c in answered.completions])
    kept = torch.cat([torch.from_numpy(c.kept) for c in answered.completions])
    found: dict[str, Any] = {
        "completions/mean_length": lengths,
        "completions/min_length": metrics.minimum(lengths),
        "completions/max_length": metrics.maximum(lengths),
        "completions/clipped_ratio": (~ended).double(),
        "completions/mean_terminated_length": metrics.mean(lengths, ended),
        "completions/min_terminated_length": metrics.minimum(lengths, ended),
        "completions/max_terminated_length": metrics.maximum(lengths, ended),
        "sampling/kept_mass/mean": kept,
        "sampling/kept_mass/min": metrics.minimum(kept),
    }
    if functions:
        found["reward"], found["reward_std"] = metrics.mean(total), metrics.mean(deviations)
        if total.isnan().any():  # every function abstained; of numbers that are none they are refused
            found["rewards/abstained"] = metrics.Sum(total=float(total.isnan().sum()))
        found["frac_reward_zero_std"] = advantages.without_variance(total, groups)[first].double()
    for each, values in zip(functions, answered.parts.unbind(1), strict=True):
        found[f"rewards/{each.name}/mean"] = metrics.mean(values)
        found[f"rewards/{each.name}/std"] = metrics.mean(_deviation(values)[None])
    return {**metrics.collect(found), **answered.means}


def table(answered: Answered, functions: Sequence[rewards.Reward]) -> list[dict[str, Any]]:
    """Return one row a completion, of plain values, for the file and the terminal.

    Args:
        answered: from `ask`.
        functions: what scored them.
    """
    names = [f"rewards/{each.name}" for each in functions]
    return [
        {
            "prompt": answered.prompts[i].columns["prompt"],
            "completion": answered.texts[i],
            "ended": answered.completions[i].ended,
            **({"reward": _plain(answered.rewards[i])} if functions else {}),
            **{name: _plain(value) for name, value in zip(names, answered.parts[i], strict=True)},
            **{name: values[i] for name, values in answered.extras.items()},
        }
        for i in range(len(answered.texts))
    ]


def _scored(
    asking: Asking,
    rows: Sequence[prompts.Prompt],
    completions: Sequence[ports.Completion],
    texts: Sequence[str],
    state: rewards.State,
) -> tuple[rewards.Scored, Tensor]:
    """Score on the first rank, which alone may talk to the world, and tell the others the numbers."""
    found = rewards.Scored(parts=np.zeros((len(rows), len(asking.functions))), extras={}, means={})
    failed: Exception | None = None
    if asking.ranks.index == 0 and asking.functions:
        names = dict.fromkeys(name for row in rows for name in row.columns if name not in TAKEN)
        talks = [not isinstance(row.columns["prompt"], str) for row in rows]
        answers = rewards.Answers(
            prompts=[row.columns["prompt"] for row in rows],
            completions=[
                [{"role": "assistant", "content": text}] if talk else text
                for talk, text in zip(talks, texts, strict=True)
            ],
            completion_ids=[c.tokens.tolist() for c in completions],
            columns={name: [row.columns.get(name) for row in rows] for name in names},
        )
        try:
            found = rewards.score(asking.functions, answers, state)
        except mistake.Mistake as told:
            failed = told
    parts, failures = asking.ranks.sum(
        (torch.from_numpy(found.parts), torch.tensor([float(failed is not None)], dtype=torch.float64))
    )
    if float(failures[0]):
        raise failed or mistake.Mistake("a reward function failed; the first process says which and how.")
    return found, parts


def _gathered(
    groups: Sequence[Sequence[ports.Completion]],
    num: int,
    num_samples: int,
    asking: Asking,
    failed: mistake.Mistake | None,
) -> list[ports.Completion]:
    """Return the completions of all ranks in the order of the prompts; what failed on one fails on all."""
    ranks, flat = asking.ranks, [completion for group in groups for completion in group]
    if ranks.num == 1 and failed is None:
        return flat
    place = [i * num_samples + j for i in range(ranks.index, num, ranks.num) for j in range(num_samples)]
    lengths = torch.tensor([0.0, *(float(len(c.tokens)) for c in flat)])
    failures = torch.tensor([float(failed is not None)])
    found = metrics.values(
        ranks.merge({"length": metrics.maximum(lengths), "failed": metrics.maximum(failures)})
    )
    if found["failed"]:
        raise failed or mistake.Mistake("another process could not draw its completions, and says why.")
    size = (num * num_samples, int(found["length"]))
    tokens, ends = torch.zeros(size, dtype=torch.int64), torch.zeros(size[0], 2, dtype=torch.int64)
    logprobs, kept = torch.zeros(size), torch.zeros(size)
    for i, each in zip(place, flat, strict=True):
        length = len(each.tokens)
        tokens[i, :length] = torch.from_numpy(each.tokens)
        logprobs[i, :length] = torch.from_numpy(each.logprobs)
        kept[i, :length] = torch.from_numpy(each.kept)
        ends[i] = torch.tensor([length, int(each.ended)])
    tokens, logprobs, kept, ends = ranks.sum((tokens, logprobs, kept, ends))
    return [
        ports.Completion(
            tokens=tokens[i, :length].numpy(),
            logprobs=logprobs[i, :length].numpy(),
            kept=kept[i, :length].numpy(),
            ended=bool(ended),
        )
        for i, (length, ended) in enumerate(ends.tolist())
    ]


def _deviation(values: Tensor) -> Tensor:
    """Return the standard deviation of the rewards that there are, with Bessel's correction; 0 of one."""
    there = values[~values.isnan()]
    if len(there) > 1:
        return there.std()
    return there.sum() * 0 if len(there) else there.new_tensor(torch.nan)


def _plain(value: Tensor) -> float | None:
    """Return a number, None for none."""
    return None if value.isnan() else float(value)
