"""What can be asked of a run: one flat, typed, frozen field for every option, and what is known about it."""

import types
import typing
from collections.abc import Container
from functools import partial
from typing import Any, Literal

import attrs

from shell import about, loss_options

_MOST = 2**16
"""Of what one visit to the generator multiplies."""
_drawn = partial(about.option, "rollouts", None)
_rollout = partial(about.option, "rollouts", None, built=False)


@attrs.frozen(kw_only=True)
class Options(loss_options.LossOptions):
    """Everything that was asked for, resolved. None: not set, or not read by the algorithm.

    Each field's meaning, range and readers stand in its metadata; `docs/options.md` lists them.
    """

    num_generations: int | None = _drawn(
        "completions of a prompt", only={"grpo": 8, "rloo": 2, "distill": 1, about.OWN: 8}, low=1, high=_MOST
    )
    num_iterations: int | None = _drawn(
        "updates on the same completions", only=about.by((*about.POLICY, about.OWN), 1), low=1, high=_MOST
    )
    steps_per_generation: int | None = _drawn(
        "optimizer steps whose prompts are drawn at once",
        only=about.by((*about.POLICY, about.OWN), 1),
        low=1,
        high=_MOST,
    )
    dynamic_sampling: int | None = _drawn(
        "how often further prompts are drawn for groups whose rewards are all equal; 0: these stay",
        only=about.by((*about.POLICY, about.OWN), 0),
        low=0,
    )
    max_completion_length: int | None = _drawn(
        "most tokens of a completion", only=about.by(about.ROLLOUTS, 512), low=1
    )
    temperature: float | None = _drawn("of sampling", only=about.by(about.ROLLOUTS, 1.0), low=1e-4)
    top_p: float | None = _drawn(
        "keep the likeliest tokens up to this sum", only=about.by(about.ROLLOUTS, 1.0), above=0, high=1
    )
    top_k: int | None = _drawn("keep this many tokens; 0: all", only=about.by(about.ROLLOUTS, 0), low=0)
    min_p: float | None = _drawn(
        "least part of the likeliest", only=about.by(about.ROLLOUTS, None), low=0, high=1
    )
    cache_implementation: Literal["static", "dynamic"] | None = _drawn(
        "static: shapes that never change, which compile asks for; not set: as the device needs",
        only=about.by(about.ROLLOUTS, None),
    )
    reward_funcs: tuple[str, ...] | str | None = _drawn(
        "names or module:function; a task brings its own", only=about.by((*about.POLICY, about.OWN), None)
    )
    reward_weights: tuple[float, ...] | None = _drawn(
        "one for each reward",
        only=about.by((*about.POLICY, about.OWN), None),
        low=-1e6,
        high=1e6,
    )
    environment: str | None = _rollout("module:name of a class", only=about.by(about.ROLLOUTS, None))
    tools: tuple[str, ...] | None = _rollout("module:name of functions", only=about.by(about.ROLLOUTS, None))
    engine: Literal["built_in", "vllm"] | None = _rollout(
        "what generates", only=about.by(about.ROLLOUTS, "built_in")
    )
    engine_url: str | None = _rollout("address of a vLLM server", only=about.by(about.ROLLOUTS, None))
    max_staleness: int | None = _rollout(
        "updates a rollout may lag; 0: none", only=about.by((*about.POLICY, about.OWN), 0), low=0
    )


FIELDS: dict[str, "attrs.Attribute[Any]"] = {field.name: field for field in attrs.fields(Options)}


def names() -> str:
    """List the algorithms that run."""
    return ", ".join(name for name, built in about.ALGORITHMS.items() if built)


def known(name: str) -> about.About:
    """Return what is known of an option."""
    return FIELDS[name].metadata["about"]


def reader(algorithm: str) -> str:
    """Return the name under which an algorithm's options are known: its own, or `own` for a `module:name`."""
    return algorithm if algorithm in about.ALGORITHMS else about.OWN


def reads(algorithm: str, name: str) -> bool:
    """Say whether an algorithm reads an option."""
    only = known(name).only
    return only is None or reader(algorithm) in only


def default(algorithm: str, name: str) -> Any:
    """Return what an option is when nobody sets it; None where the algorithm does not read it."""
    found, who = known(name), reader(algorithm)
    if found.only is not None:
        return found.only.get(who)
    return found.differs.get(who, FIELDS[name].default)


def asked(algorithm: str, chosen: "Options", given: Container[str], name: str) -> bool:
    """Say whether an option was set to another value than it has anyway, as a run's own config.yaml does."""
    usual = known(name).under.get(str(chosen.loss_type), default(algorithm, name))
    return name in given and getattr(chosen, name) != usual


def number(chosen: "Options", name: str) -> Any:
    """Return a number that the algorithm reads, and that has a value therefore."""
    value = getattr(chosen, name)
    assert value is not None, name
    return value


def optional(name: str) -> bool:
    """Say whether null is a value of an option."""
    return types.NoneType in typing.get_args(FIELDS[name].type)


def choices(algorithm: str, name: str) -> tuple[str, ...]:
    """Return the values that an option takes, empty where they are not a list."""
    listed = known(name).choices
    if listed is not None:
        return listed.get(reader(algorithm), ())
    return _literals(FIELDS[name].type)


def _literals(kind: Any) -> tuple[str, ...]:
    """Return the values of the Literal inside an annotation."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    return tuple(value for part in typing.get_args(kind) for value in _literals(part))
