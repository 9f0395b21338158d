"""Rewards of completions: functions found by name, called with what they take, their answers checked.

A function is called once for many completions, with lists of one entry each: `prompts`, `completions`,
`completion_ids` and every column of the dataset by its name; and with `trainer_state`,
`log_extra(name, values)` and `log_metric(name, value)`. It takes any of them, or all by `**kwargs`; what it
changes of them, it changes for itself. It returns a number for each completion, or None where it abstains.
It may be async; those run together.

Completions of prompts that are messages come as messages, `[{"role": "assistant", "content": ...}]`; of
text, as text.
"""

import asyncio
import concurrent.futures
import copy
import inspect
import math
import numbers
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import attrs
import numpy as np

from core import metrics
from shell import mistake, named_rewards, own, translate

THEIRS = {
    "accuracy_reward": "reasoning_accuracy",
    "get_repetition_penalty_reward": "repetition",
    "get_soft_overlong_punishment": "overlong",
    "reasoning_accuracy_reward": "reasoning_accuracy",
    "think_format_reward": "think_format",
}
"""What other people call functions that have a name here."""
LARGEST = 1e30
"""Most of a reward, either way: its square is still a number, and it is one in float32."""
OF_RUNS = frozenset(
    (
        *("step", "epoch", "loss", "grad_norm", "learning_rate", "num_tokens", "step_time", "peak_memory_gb"),
        *("reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "empty_steps", "on_policy_frac"),
        *("cispo_clip_ratio", "entropy_coef"),
        *("prompt", "completion", "ended"),
    )
)
"""Names in metrics.jsonl and completions.jsonl that no function may give to what it logs."""
OF_RUNS_BELOW = (
    *("eval_", "rewards/", "completions/", "sampling/", "clip_ratio/", "perf/", "batch/", "compile/"),
    metrics.NONFINITE,
)
"""What such names begin with."""
OFFERED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


@attrs.frozen(kw_only=True, eq=False)
class Reward:
    """A reward function.

    Attributes:
        name: how it is called in logs.
        function: as described above.
        weight: of its number in the sum.
    """

    name: str
    function: Callable[..., Any]
    weight: float = 1.0


@attrs.frozen(kw_only=True)
class State:
    """Where the run stands, under the names that people's functions read.

    Attributes:
        global_step: updates done.
        max_steps: of the whole run.
        epoch: passes over the prompts.
    """

    global_step: int
    max_steps: int
    epoch: float = 0.0


@attrs.frozen(kw_only=True, eq=False)
class Answers:
    """Completions to be scored, the groups whole and one after another.

    Attributes:
        prompts: messages or text, one a completion.
        completions: messages or text.
        completion_ids: token ids.
        columns: the other columns of the rows, one entry a completion.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True, eq=False)
class Scored:
    """What the functions said.

    Attributes:
        parts: of each function, before weights, float64 `[samples, functions]`; NaN where it abstains.
        extras: columns for the table of completions.
        means: what functions logged.
    """

    parts: np.ndarray
    extras: Mapping[str, Sequence[Any]]
    means: metrics.Metrics


def find(
    names: Sequence[str | Callable[..., Any]],
    *,
    weights: Sequence[float] | None = None,
    limit: int = 512,
    known: Mapping[str, Callable[..., Any]] | None = None,
) -> tuple[Reward, ...]:
    """Find reward functions.

    Args:
        names: of `named_rewards`, `module:function`, or functions themselves.
        weights: one for each; None: 1 each.
        limit: most tokens of a completion.
        known: further functions by name: a task's own score.

    Raises:
        Mistake: one does not exist, cannot be imported, or the weights are another number.
    """
    if not names:
        raise mistake.Mistake(
            "reward_funcs: nothing came; at least one reward function was wanted, as in "
            "--reward_funcs exact_answer."
        )
    if weights is not None and len(weights) != len(names):
        raise mistake.Mistake(
            f"reward_weights: {len(weights)} came for {len(names)} reward_funcs; one for each was wanted."
        )
    makers = {**named_rewards.makers(limit), **{n: lambda f=f: f for n, f in (known or {}).items()}}
    found, taken = [], set[str]()
    for name, weight in zip(names, weights or [1.0] * len(names), strict=True):
        function = name if callable(name) else makers[name]() if name in makers else _imported(name, makers)
        called = _unlike(_called(name), taken)
        found.append(Reward(name=called, function=function, weight=float(weight)))
    return tuple(found)


def check(rewards: Sequence[Reward], columns: Sequence[str], what: str = "dataset") -> None:
    """Refuse a function that takes what nobody gives it, before there is anything to score.

    Args:
        rewards: from `find`.
        columns: of the dataset.
        what: how that is called.

    Raises:
        Mistake: names the function, and what it takes.
    """
    for each in rewards:
        _check(each, _named(each.function)[0], [*columns, *OFFERED], what)


def score(rewards: Sequence[Reward], answers: Answers, state: State) -> Scored:
    """Call every function on all completions.

    Args:
        rewards: from `find`.
        answers: what is scored.
        state: where the run stands.

    Raises:
        Mistake: a function failed, or returned something else than a number or None for each completion.
    """
    extras: dict[str, Sequence[Any]] = {}
    logged: dict[str, list[float]] = {}
    offered = {
        **answers.columns,
        "prompts": list(answers.prompts),
        "completions": list(answers.completions),
        "completion_ids": [list(ids) for ids in answers.completion_ids],
        "trainer_state": state,
        "log_extra": lambda name, values: extras.update({_free(name): list(values)}),
        "log_metric": lambda name, value: logged.setdefault(_free(name), []).append(float(value)),
    }
    returned = _all([_called_with(each, offered) for each in rewards], rewards)
    count = len(answers.completions)
    parts = [_checked(values, each.name, count) for values, each in zip(returned, rewards, strict=True)]
    for name, values in extras.items():
        if len(values) != count:
            raise mistake.Mistake(
                f"log_extra {name}: {len(values)} values came for {count} completions; one for each was "
                "wanted."
            )
    return Scored(
        parts=np.stack(parts, axis=1),
        extras=extras,
        means={name: metrics.Mean(total=sum(all_), weight=len(all_)) for name, all_ in logged.items()},
    )


def _called_with(reward: Reward, offered: Mapping[str, Any]) -> Any:
    """Call one function with what it takes; of an async one the coroutine is returned."""
    named, anything = _named(reward.function)
    _check(reward, named, list(offered))
    taken = dict(offered) if anything else {p.name: offered[p.name] for p in named if p.name in offered}
    # A list that one function empties is another's, too, and a message in it is one of the dataset.
    taken = {name: copy.deepcopy(value) if _is_data(value) else value for name, value in taken.items()}
    return own.guarded(f"reward {reward.name}", reward.function)(**taken)


def _is_data(value: Any) -> bool:
    """Say whether what is offered could be changed by who takes it."""
    return isinstance(value, list | tuple)


def _free(name: Any) -> str:
    """Return the name of what a function logs, unless the run logs something of that name itself."""
    if str(name) in OF_RUNS or str(name).startswith(OF_RUNS_BELOW):
        raise ValueError(f"{name} is a name of the run's own numbers; log it under another one")
    return str(name)


def _named(function: Callable[..., Any]) -> tuple[list[inspect.Parameter], bool]:
    """Return the parameters that a function can be given by name, and whether it takes all others too."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return [], True
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _check(
    reward: Reward, named: Sequence[inspect.Parameter], offered: Sequence[str], what: str = "dataset"
) -> None:
    """Refuse a function that takes what is not offered."""
    lacking = [p.name for p in named if p.default is p.empty and p.name not in offered]
    if not lacking:
        return
    columns = [name for name in offered if name not in (*OFFERED, "prompt", "completion")]
    raise mistake.Mistake(
        f"reward {reward.name} takes {lacking[0]!r}, which is no column of the {what} "
        f"({', '.join(columns) or 'there are none beside prompt'})." + translate.hint(lacking[0], offered)
    )


def _all(returned: Sequence[Any], rewards: Sequence[Reward]) -> list[Any]:
    """Wait for the coroutines among what was returned, all at once."""
    waiting = {i: value for i, value in enumerate(returned) if inspect.isawaitable(value)}
    if not waiting:
        return list(returned)

    async def gathered() -> list[Any]:
        return await asyncio.gather(*map(_caught, waiting.values()), return_exceptions=True)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        done = asyncio.run(gathered())
    else:  # a notebook has a loop of its own in this thread
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            done = pool.submit(lambda: asyncio.run(gathered())).result()
    values = list(returned)
    for i, value in zip(waiting, done, strict=True):
        if isinstance(value, BaseException):
            raise own.failed(f"reward {rewards[i].name}", value) from value
        values[i] = value
    return values


async def _caught(waiting: Any) -> Any:
    """Wait, and return what was raised: an exit would end the loop, and the program with it."""
    try:
        return await waiting
    except own.FAILURES as problem:
        return problem


def _checked(values: Any, name: str, count: int) -> np.ndarray:
    """Return a function's numbers, NaN for None."""
    try:
        if isinstance(values, Mapping | Set | str | bytes):
            raise TypeError("its order or its letters would be taken for rewards")
        listed = list(values.tolist() if hasattr(values, "tolist") else values)
    except (TypeError, ValueError, RuntimeError):
        raise mistake.Mistake(
            f"reward {name} returned {_short(values)}; a list of {count} numbers was wanted, one a "
            "completion."
        ) from None
    if len(listed) != count:
        raise mistake.Mistake(
            f"reward {name} returned {len(listed)} values for {count} completions; one for each was wanted."
        )
    return np.array([_number(value, name, i) for i, value in enumerate(listed)], np.float64)


def _number(value: Any, name: str, place: int) -> float:
    """Read one number."""
    if value is None:
        return math.nan
    try:
        value = value.item() if hasattr(value, "item") else value
        read = float(value) if isinstance(value, numbers.Real) else math.inf
    except (TypeError, ValueError, RuntimeError, OverflowError):  # several numbers, or one that is too large
        read = math.inf
    if abs(read) > LARGEST:
        raise mistake.Mistake(
            f"reward {name} returned {_short(value)} for completion {place}; a finite number of at most "
            f"{LARGEST:g} was wanted, or None to abstain."
        )
    return read


def _short(value: Any) -> str:
    """Write what came in a few words."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _imported(name: str, makers: Mapping[str, Any]) -> Callable[..., Any]:
    """Import the caller's own function."""
    file, _, function = name.partition(":")
    if file.endswith(".py"):
        folder, called = pathlib.Path(file).parent, f"{pathlib.Path(file).stem}:{function or 'FUNCTION'}"
        where = "" if str(folder) == "." else f" and start in {folder}, or have it in PYTHONPATH"
        raise mistake.Mistake(
            f"reward_funcs: {name!r} came; module:function was wanted: write {called}{where}."
        )
    if ":" not in name:
        raise mistake.Mistake(
            f"reward_funcs: {name!r} came; one of {', '.join(sorted(makers))} or module:function was wanted."
            + _hint(name, makers)
        )
    found = own.imported(name, "reward_funcs:")
    if not callable(found):
        raise mistake.Mistake(f"reward_funcs: {name} is a {type(found).__name__}; a function was wanted.")
    return found


def _hint(name: str, makers: Mapping[str, Any]) -> str:
    """Return what was meant by a name that is none: a folder, a dotted path, one of other people's names."""
    if pathlib.Path(name).is_dir():
        return f" {name} is a folder: a model scores by a function that loads it."
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name):
        module, _, function = name.rpartition(".")
        return f" Write {module}:{function}."
    return f" Did you mean {THEIRS[name]}?" if name in THEIRS else translate.hint(name, makers)


def _called(name: str | Callable[..., Any]) -> str:
    """Return how a function is called in logs."""
    if callable(name):
        return str(getattr(name, "__name__", type(name).__name__))
    return name.rpartition(":")[2]


def _unlike(name: str, taken: set[str]) -> str:
    """Return a name that no other function has."""
    found, number = name, 2
    while found in taken:
        found, number = f"{name}_{number}", number + 1
    taken.add(found)
    return found
