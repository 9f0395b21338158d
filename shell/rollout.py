"""Feeds of samples that a generator wrote: prompts are completed, scored, and become the samples of steps.

A round is one visit to the generator: the prompts of `steps_per_generation` steps, used `num_iterations`
times over. A draw is named by the run's key and the prompt's place in the run, so that stopping and resuming
change none; what a round wrote for steps still to come is part of a checkpoint.
"""

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from adapters import compiling
from core import advantages, algorithms, keys, kl, metrics, ports, steps
from core.plan import sample
from shell import answers, buffer, carried, feed, measure, own, prompts, refill, rewards, rounds, scored


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
        plan: rounds.Plan,
        asking: answers.Asking,
        *,
        model: ports.Model,
        algorithm: algorithms.Algorithm,
        packing: Mapping[str, Any],
        mask_truncated: bool,
        num_steps: int,
        keep_masked: bool = False,
        tries: int = 0,
    ) -> None:
        """Draw nothing yet.

        Args:
            plan: the prompts and their order.
            asking: how they are completed and scored.
            model: scores what was written, at the temperature of the sampling.
            algorithm: makes columns of rewards.
            packing: how packs are made, the arguments of `feed.packs`.
            mask_truncated: leave completions that were cut off out of the loss, and of the others' baseline.
            num_steps: of the whole run, for reward functions.
            keep_masked: leave what is left out of the loss in the others' baseline.
            tries: how often a round draws further prompts in the place of those that teach nothing.
        """
        self._plan, self._asking, self._model, self._algorithm = plan, asking, model, algorithm
        self._packing, self._num_steps = dict(packing), num_steps
        self._reference: ports.Params | None = None
        self._mask, self._keep_masked, self._tries = mask_truncated, keep_masked, tries
        self._held: list[list[sample.Sample]] = []

    @property
    def graphs(self) -> compiling.Counts | None:
        """Return what was compiled to draw with; None where nothing is."""
        static = getattr(self._asking.engine, "static", None)
        return None if static is None or static.compiled is None else static.counts

    def draw(self, state: steps.TrainState, reference: ports.Params | None = None) -> Drawn:
        """Return the samples of the step that begins where the state stands.

        Args:
            state: the policy that draws, and the place.
            reference: what it is compared with, where it stands now; None: with nothing.
        """
        self._reference = reference
        place = state.place
        assert isinstance(place, tuple)
        now, made = self._plan.round(place), place[1]
        means, table = {}, []
        if made == 0:
            means, table, used = self._visit(state, now)
            place = place if used == len(now.rows) else (*place, used)
        samples, place = self._held[made % now.num_slices], self._plan.after(place)
        if not any(one.trained.any() for one in samples):
            means = {**means, "empty_steps": metrics.Sum(total=1.0)}
        return Drawn(samples=samples, place=place, means=means, table=table)

    def split(self, place: feed.Place) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what a round wrote for steps still to come, for a checkpoint.

        Args:
            place: of the next step. A round is held until the next one is drawn, since a step that was drawn
                for and then failed is still to come.
        """
        assert isinstance(place, tuple)
        return buffer.split(self._held if place[1] else [])

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

        Rewards say it, or a teacher's loss. One completion a prompt, always with the same draws: two
        evaluations differ by the policy alone.

        Args:
            state: the policy.
            held_out: the prompts.
            most: prompts to look at, the first ones; None: all.
        """
        num = len(held_out) if most is None else min(most, len(held_out))
        found, written = dict[str, metrics.Metric](), list[sample.Sample]()
        for start in range(0, num, self._plan.batch_size):
            numbers = range(start, min(start + self._plan.batch_size, num))
            answered = answers.ask(
                self._asking, state.params, [held_out.row(row) for row in numbers], numbers,
                num_samples=1, key=keys.fold_in(state.key, "evaluation"), state=self._where(state),
            )  # fmt: skip
            found = metrics.merge(found, metrics.host(answers.measured(answered, self._asking.functions)))
            written += [attrs.evolve(_written(answered, i, True), unit=n) for i, n in enumerate(numbers)]
        seen = measure.read(found, every=most is not None)
        alone = ("reward_std", "frac_reward_zero_std")  # a group of one has none
        read = {f"eval_{name}": n for name, n in seen.items() if name not in alone}
        if self._asking.functions:
            return read
        return read | measure.measure(
            self._model, self._algorithm, state.params, measure.Listed(listed=written), carry=state.carry,
            packing=self._packing, batch_size=self._plan.batch_size, ranks=self._asking.ranks, most=most,
        )  # fmt: skip

    def _where(self, state: steps.TrainState) -> rewards.State:
        """Say where the run stands."""
        epoch = self._plan.epoch(state.place)
        return rewards.State(global_step=state.step, max_steps=self._num_steps, epoch=epoch)

    def _ask(self, state: steps.TrainState, numbers: Sequence[int]) -> answers.Answered:
        """Have the prompts of some places in the run answered and scored."""
        return answers.ask(
            self._asking, state.params, [self._plan.prompts.row(self._plan.row(n)) for n in numbers],
            numbers, num_samples=self._plan.num_generations, key=keys.fold_in(state.key, "rollout"),
            state=self._where(state),
        )  # fmt: skip

    def _visit(
        self, state: steps.TrainState, now: rounds.Round
    ) -> tuple[metrics.Metrics, list[dict[str, Any]], int]:
        """Visit the generator: make the samples of a round; return how many prompts it used up, too."""
        asked = [i for i in range(len(now.rows)) if self._plan.writes(state.key, now.start + i)]
        if not asked:
            self._held = self._mixed(now, [], asked)
            return {"on_policy_frac": metrics.Mean(total=0.0, weight=len(now.rows))}, [], len(now.rows)
        filled = refill.fill(
            self._ask(state, [now.start + i for i in asked]),
            lambda used, count: self._ask(state, range(now.start + used, now.start + used + count)),
            tries=self._tries, teaches=self._teaches,
        )  # fmt: skip
        answered, used = filled.chosen, len(now.rows) + filled.more
        kept = self._whole(answered) & filled.teaches
        names, size = own.columns(self._algorithm), len(kept)
        written = [_written(answered, i, bool(kept[i]), names) for i in range(size)]
        parts = [
            rounds.portion(written, i, now.size * self._plan.num_generations) for i in range(now.num_slices)
        ]
        divergences = None
        if self._reference is not None:
            parts = self._scored(parts, self._reference, "reference_logprobs")
        penalized = "divergences" in _parameters(self._algorithm) and self._reference is not None
        if now.num_steps > 1 or penalized:
            parts = self._scored(parts, state.params, "old_logprobs")
        if penalized:
            divergences = torch.stack([_divergence(one) for part in parts for one in part])
        compared = filled.teaches if self._keep_masked else kept
        columns = self._columns(answered, compared, divergences)
        numbers = iter([{n: float(v[i]) for n, v in columns.items()} for i in range(size)])
        self._held = [scored.trained([_with(one, next(numbers)) for one in part]) for part in parts]
        means = {**answers.measured(filled.drawn, self._asking.functions), **filled.means}
        if self._plan.lmbda < 1.0:
            self._held = self._mixed(now, written, asked)
            means["on_policy_frac"] = metrics.Mean(total=float(len(asked)), weight=len(now.rows))
        if self._mask:
            means["completions/masked"] = metrics.Sum(total=float((~self._whole(filled.drawn)).sum()))
        if divergences is not None:
            means["kl"] = metrics.mean(divergences)
        return means, answers.table(filled.drawn, self._asking.functions), used

    def _whole(self, answered: answers.Answered) -> Tensor:
        """Say which completions the loss may see: those that ended, where others are masked."""
        return torch.tensor([not self._mask or c.ended for c in answered.completions])

    def _teaches(self, answered: answers.Answered) -> Tensor:
        """Say whose group has unlike rewards, so that it moves the policy."""
        compared = torch.ones_like(answered.groups, dtype=torch.bool)
        compared = compared if self._keep_masked else self._whole(answered)
        each = answered.parts if "parts" in _parameters(self._algorithm) else answered.rewards[:, None]
        return ~torch.stack(
            [
                advantages.without_variance(advantages.leave_out(one, compared), answered.groups)
                for one in each.unbind(1)
            ]
        ).all(0)

    def _mixed(
        self, now: rounds.Round, written: Sequence[sample.Sample], asked: Sequence[int]
    ) -> list[list[sample.Sample]]:
        """Return what was written and the rows' own answers to the other prompts, step by step."""
        each = self._plan.num_generations
        made = {i: rounds.portion(written, number, each) for number, i in enumerate(asked)}
        numbered = itertools.count()
        rows = [
            [attrs.evolve(one, columns={}, unit=next(numbered)) for one in made[i]]
            if i in made
            else [self._plan.prompts.answer(row, group=now.start + i, unit=next(numbered))]
            for i, row in enumerate(now.rows)
        ]
        return [
            [one for row in rounds.portion(rows, number, now.size) for one in row]
            for number in range(now.num_slices)
        ]

    def _columns(
        self, answered: answers.Answered, compared: Tensor, divergences: Tensor | None
    ) -> Mapping[str, Tensor]:
        """Make the columns that the algorithm wants of the rewards that are compared."""
        if self._algorithm.columns is None:
            return {}
        takes, more = _parameters(self._algorithm), dict[str, Any]()
        if "parts" in takes:
            more["parts"] = answered.parts.where(compared[:, None], torch.nan)
        if divergences is not None:
            more["divergences"] = divergences
        seen = advantages.leave_out(answered.rewards, compared)
        return self._algorithm.columns(seen, answered.groups, **more)

    def _scored(
        self, slices: Sequence[Sequence[sample.Sample]], params: ports.Params, name: str
    ) -> list[list[sample.Sample]]:
        """Score every trained token, step by step, on the packs that the step will train on."""
        score = functools.partial(
            scored.logprobs, self._model, self._algorithm, packing=self._packing, ranks=self._asking.ranks
        )
        return [
            [_with(one, {name: values}) for one, values in zip(part, score(params, part), strict=True)]
            for part in slices
        ]


def _written(answered: answers.Answered, i: int, kept: bool, names: Sequence[str] = ()) -> sample.Sample:
    """Make a sample of one completion, with numbers of its prompt's row."""
    prompt, drawn = answered.prompts[i].tokens, answered.completions[i]
    own_columns = carried.numbers(answered.prompts[i].columns, names, where=f"prompt {answered.groups[i]}")
    trained = np.zeros(len(prompt) + len(drawn.tokens), np.bool_)
    trained[len(prompt) :] = kept
    return sample.Sample(
        tokens=np.concatenate([prompt, drawn.tokens]),
        trained=trained,
        columns={
            "sampled_logprobs": np.concatenate([np.zeros(len(prompt), np.float32), drawn.logprobs]),
            **own_columns,
        },
        group=int(answered.groups[i]),
        unit=i,
    )


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
