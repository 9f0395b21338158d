"""Feeds of samples that a generator wrote: prompts are completed, scored, and become the samples of steps.

A round is one visit to the generator: the prompts of `steps_per_generation` steps, used `num_iterations`
times over. A draw is named by the run's key and the prompt's place in the run, so that stopping and resuming
change none; what a round wrote for steps still to come is part of a checkpoint.
"""

import functools
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from core import advantages, algorithms, keys, kl, metrics, ports, steps
from core.plan import batching, sample
from shell import answers, buffer, counts, data, feed, prompts, rewards


@attrs.frozen(kw_only=True)
class Round:
    """What is drawn at once.

    Attributes:
        start: prompts used up before it; the numbers of its prompts go on from there.
        rows: its prompts.
        size: prompts of a step; the last of an epoch may have fewer.
        num_slices: steps whose prompts it has.
        num_steps: steps that it is used in.
    """

    start: int
    rows: tuple[int, ...]
    size: int
    num_slices: int
    num_steps: int


@attrs.frozen(kw_only=True, eq=False)
class Plan:
    """Prompts in an order that any place can be found in again, before there is a generator.

    A place is (prompts used up before the round, steps made of the round).

    Attributes:
        prompts: what is completed.
        batch_size: completions in an optimizer step, over all ranks.
        num_generations: completions of a prompt.
        steps_per_generation: steps whose prompts are drawn at once.
        num_iterations: how often a round is gone through.
        max_tokens: most tokens of a completion.
        seed: of the order; None: as they come.
    """

    prompts: prompts.Prompts
    batch_size: int
    num_generations: int
    steps_per_generation: int
    num_iterations: int
    max_tokens: int
    seed: int | None
    start: feed.Place = (0, 0)

    @property
    def num_prompts(self) -> int:
        """Return the prompts of a step."""
        return self.batch_size // self.num_generations

    @property
    def steps_per_epoch(self) -> int:
        """Return the optimizer steps of one pass over the prompts."""
        return -(-len(self.prompts) // self.num_prompts) * self.num_iterations

    @property
    def counts(self) -> counts.Counts:
        """Return what became of the rows."""
        return self.prompts.counts

    @property
    def digest(self) -> str:
        """Return a hash of all prompts and their columns."""
        return _digest(self.prompts)

    def round(self, place: feed.Place) -> Round:
        """Return the round that a place is in."""
        assert isinstance(place, tuple)
        epoch, first = divmod(place[0], len(self.prompts))
        stop = min(first + self.num_prompts * self.steps_per_generation, len(self.prompts))
        slices = -(-(stop - first) // self.num_prompts)
        return Round(
            start=place[0],
            rows=tuple(_order(self.prompts, self.seed, epoch)[first:stop].tolist()),
            size=self.num_prompts,
            num_slices=slices,
            num_steps=slices * self.num_iterations,
        )

    def after(self, place: feed.Place) -> tuple[int, int]:
        """Return the place after the step that begins at a place."""
        assert isinstance(place, tuple)
        now = self.round(place)
        start, made = place[0], place[1] + 1
        return (start, made) if made < now.num_steps else (start + len(now.rows), 0)

    def epoch(self, place: feed.Place) -> float:
        """Return the passes made at a place."""
        assert isinstance(place, tuple)
        now = self.round(place)
        return (place[0] + len(now.rows) * place[1] / now.num_steps) / len(self.prompts)

    def take(self, place: feed.Place) -> tuple[list[sample.Sample], feed.Place]:
        """Return samples of the size of the step that begins at a place: the longest completions, all unlike.

        They are for planning: what a generator will write, nobody knows.
        """
        assert isinstance(place, tuple)
        now = self.round(place)
        rows = _slice(now.rows, place[1] % now.num_slices, now.size)
        made = [
            _unwritten(self.prompts.row(row).tokens, self.max_tokens, row, i * self.num_generations + j)
            for i, row in enumerate(rows)
            for j in range(self.num_generations)
        ]
        return made, self.after(place)


@attrs.frozen(kw_only=True, eq=False)
class Drawn:
    """What a step trains on.

    Attributes:
        samples: of the whole step, the same on every rank.
        place: after the step.
        means: what was measured of completions that were drawn for it.
        table: a row for each of these completions.
    """

    samples: list[sample.Sample]
    place: feed.Place
    means: metrics.Metrics = attrs.field(factory=dict)
    table: Sequence[Mapping[str, Any]] = ()


class Rollouts:
    """Samples that the policy itself wrote, step by step."""

    def __init__(
        self,
        plan: Plan,
        asking: answers.Asking,
        *,
        model: ports.Model,
        algorithm: algorithms.Algorithm,
        packing: Mapping[str, Any],
        reference: ports.Params | None,
        mask_truncated: bool,
        num_steps: int,
    ) -> None:
        """Draw nothing yet.

        Args:
            plan: the prompts and their order.
            asking: how they are completed and scored.
            model: scores what was written, at the temperature of the sampling.
            algorithm: makes columns of rewards.
            packing: how packs are made, the arguments of `feed.packs`.
            reference: the frozen parameters, if the algorithm needs any.
            mask_truncated: leave completions that were cut off out of the loss, and of the others' baseline.
            num_steps: of the whole run, for reward functions.
        """
        self._plan, self._asking, self._model, self._algorithm = plan, asking, model, algorithm
        self._packing, self._reference, self._num_steps = dict(packing), reference, num_steps
        self._mask = mask_truncated
        self._held: list[list[sample.Sample]] = []

    def draw(self, state: steps.TrainState) -> Drawn:
        """Return the samples of the step that begins where the state stands.

        Args:
            state: the policy that draws, and the place.
        """
        assert isinstance(state.place, tuple)
        now, made = self._plan.round(state.place), state.place[1]
        means, table = {}, []
        if made == 0:
            means, table = self._visit(state, now)
        samples, place = self._held[made % now.num_slices], self._plan.after(state.place)
        if place[1] == 0:
            self._held = []
        return Drawn(samples=samples, place=place, means=means, table=table)

    def split(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what a round wrote for steps still to come, for a checkpoint."""
        return buffer.split(self._held)

    def join(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take it back.

        Args:
            tensors, values: of `split`.
        """
        self._held = buffer.join(tensors, values)

    def evaluate(
        self, state: steps.TrainState, held_out: prompts.Prompts, most: int | None
    ) -> dict[str, float]:
        """Return what completions of held-out prompts are worth, under `eval_...`.

        One completion a prompt, always with the same draws: two evaluations differ by the policy alone.

        Args:
            state: the policy.
            held_out: the prompts.
            most: prompts to look at, the first ones; None: all.
        """
        num = len(held_out) if most is None else min(most, len(held_out))
        found: metrics.Metrics = {}
        for start in range(0, num, self._plan.batch_size):
            numbers = range(start, min(start + self._plan.batch_size, num))
            answered = answers.ask(
                self._asking, state.params, [held_out.row(row) for row in numbers], numbers,
                num_samples=1, key=keys.fold_in(state.key, "evaluation"), state=self._where(state),
            )  # fmt: skip
            found = metrics.merge(found, metrics.host(answers.measured(answered, self._asking.functions)))
        read = metrics.values(found)
        alone = ("reward_std", "frac_reward_zero_std")  # a group of one has none
        return {f"eval_{name}": number for name, number in read.items() if name not in alone}

    def _where(self, state: steps.TrainState) -> rewards.State:
        """Say where the run stands."""
        epoch = self._plan.epoch(state.place)
        return rewards.State(global_step=state.step, max_steps=self._num_steps, epoch=epoch)

    def _visit(self, state: steps.TrainState, now: Round) -> tuple[metrics.Metrics, list[dict[str, Any]]]:
        """Visit the generator: make the samples of a round."""
        answered = answers.ask(
            self._asking, state.params, [self._plan.prompts.row(row) for row in now.rows],
            range(now.start, now.start + len(now.rows)), num_samples=self._plan.num_generations,
            key=keys.fold_in(state.key, "rollout"), state=self._where(state),
        )  # fmt: skip
        kept = torch.tensor([not self._mask or c.ended for c in answered.completions])
        written, size = [_written(answered, i, bool(kept[i])) for i in range(len(kept))], len(kept)
        parts = [_slice(written, i, now.size * self._plan.num_generations) for i in range(now.num_slices)]
        divergences = None
        if self._reference is not None:
            parts = self._scored(parts, self._reference, "reference_logprobs")
        penalized = "divergences" in _parameters(self._algorithm) and self._reference is not None
        if now.num_steps > 1 or penalized:
            parts = self._scored(parts, state.params, "old_logprobs")
        if penalized:
            divergences = torch.stack([_divergence(one) for part in parts for one in part])
        columns = self._columns(answered, kept, divergences)
        numbers = iter([{n: float(v[i]) for n, v in columns.items()} for i in range(size)])
        self._held = [_trained([_with(one, next(numbers)) for one in part]) for part in parts]
        means = dict(answers.measured(answered, self._asking.functions))
        if self._mask:
            means["completions/masked"] = metrics.Sum(total=float((~kept).sum()))
        if divergences is not None:
            means["kl"] = metrics.mean(divergences)
        return means, answers.table(answered, self._asking.functions)

    def _columns(
        self, answered: answers.Answered, kept: Tensor, divergences: Tensor | None
    ) -> Mapping[str, Tensor]:
        """Make the columns that the algorithm wants of rewards."""
        if self._algorithm.columns is None:
            return {}
        takes, more = _parameters(self._algorithm), dict[str, Any]()
        if "parts" in takes:
            more["parts"] = answered.parts.where(kept[:, None], torch.nan)
        if divergences is not None:
            more["divergences"] = divergences
        return self._algorithm.columns(advantages.leave_out(answered.rewards, kept), answered.groups, **more)

    def _scored(
        self, slices: Sequence[Sequence[sample.Sample]], params: ports.Params, name: str
    ) -> list[list[sample.Sample]]:
        """Score every trained token, step by step, on the packs that the step will train on."""
        return [
            [
                _with(one, {name: values})
                for one, values in zip(part, self._logprobs(part, params), strict=True)
            ]
            for part in slices
        ]

    def _logprobs(self, part: Sequence[sample.Sample], params: ports.Params) -> list[np.ndarray]:
        """Return each sample's log-probabilities at its tokens, 0 where none is trained; on every rank."""
        ranks, packing = self._asking.ranks, self._packing
        trained = _trained(part)
        packs = feed.packs(trained, self._algorithm, needs=(), ranks=ranks, **packing)
        plan = batching.assign(
            trained, budget=packing["budget"], couples=self._algorithm.couples, num_ranks=ranks.num,
            share=packing["share"], shape=packing["shape"],
        )  # fmt: skip
        starts = np.cumsum([0, *(len(one.tokens) for one in trained)])
        found = torch.zeros(int(starts[-1]), dtype=packing["dtype"])
        for members, each in zip(plan[ranks.index], packs, strict=True):
            rows = [starts[i] + np.flatnonzero(trained[i].trained) for i in members]
            places = torch.from_numpy(np.concatenate(rows) if rows else np.zeros(0, np.int64))
            logprobs = self._model.predict(params, each, None).logprobs
            found[places] = logprobs.to(device="cpu", dtype=found.dtype)
        summed = ranks.sum(found).numpy()
        values = {id(one): summed[starts[i] : starts[i + 1]] for i, one in enumerate(trained)}
        none = {id(one): np.zeros(len(one.tokens), summed.dtype) for one in part if id(one) not in values}
        return [{**values, **none}[id(one)] for one in part]


def _written(answered: answers.Answered, i: int, kept: bool) -> sample.Sample:
    """Make a sample of one completion."""
    prompt, drawn = answered.prompts[i].tokens, answered.completions[i]
    trained = np.zeros(len(prompt) + len(drawn.tokens), np.bool_)
    trained[len(prompt) :] = kept
    return sample.Sample(
        tokens=np.concatenate([prompt, drawn.tokens]),
        trained=trained,
        columns={"sampled_logprobs": np.concatenate([np.zeros(len(prompt), np.float32), drawn.logprobs])},
        group=int(answered.groups[i]),
        unit=i,
    )


def _unwritten(prompt: np.ndarray, length: int, group: int, number: int) -> sample.Sample:
    """Make a sample of the longest completion, unlike every other."""
    tokens = np.concatenate([prompt, np.full(length, number, np.int64)])
    return sample.Sample(
        tokens=tokens, trained=np.arange(len(tokens)) >= len(prompt), group=group, unit=number
    )


def _trained(samples: Sequence[sample.Sample]) -> list[sample.Sample]:
    """Leave out samples without a trained token, unless there are no others: they would only be forwarded."""
    kept = [one for one in samples if one.trained.any()]
    return kept or list(samples)


def _with(one: sample.Sample, columns: Mapping[str, Any]) -> sample.Sample:
    """Add columns to a sample."""
    return attrs.evolve(one, columns={**one.columns, **columns})


def _divergence(one: sample.Sample) -> Tensor:
    """Return the sum of a sample's log-ratios to the reference."""
    old, reference = (
        torch.from_numpy(np.asarray(one.columns[name], np.float64)[one.trained])
        for name in ("old_logprobs", "reference_logprobs")
    )
    return kl.k1(old, reference).sum()


def _parameters(algorithm: algorithms.Algorithm) -> frozenset[str]:
    """Name what the function that makes columns takes."""
    return frozenset(() if algorithm.columns is None else inspect.signature(algorithm.columns).parameters)


def _slice(values: Sequence[Any], number: int, size: int) -> list[Any]:
    """Return one of the runs of a size that values are cut into."""
    return list(values[number * size : (number + 1) * size])


@functools.lru_cache(maxsize=1)
def _digest(rows: prompts.Prompts) -> str:
    made = hashlib.blake2b(digest_size=16)
    for values in (rows.tokens, rows.starts, rows.text, rows.lines):
        made.update(np.ascontiguousarray(values).data)
    return made.hexdigest()


@functools.lru_cache(maxsize=2)
def _order(rows: prompts.Prompts, seed: int | None, epoch: int) -> np.ndarray:
    return data.epoch_order(rows, seed=seed, epoch=epoch)
