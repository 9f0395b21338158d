"""The one loop: take rows, plan packs, make a step, log, evaluate, save; until the last step or a signal."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch

from adapters import ranks as processes
from adapters import transformers_lm
from core import algorithms, keys, metrics, optimizers, ports, steps
from shell import checkpoint, config, data, feed, log, measure, meter, options, states


@attrs.frozen(kw_only=True, eq=False)
class Job:
    """All that a run is made of.

    Attributes:
        command: what was asked for.
        algorithm, optimizer, model: what is trained and how.
        rows: what it is trained on; `held_out`: what it is evaluated on, if anything.
        num_steps: optimizer steps of the whole run.
        packing: how packs are made, the arguments of `feed.packs`.
        ranks: who shares the steps.
    """

    command: config.Command
    algorithm: algorithms.Algorithm
    optimizer: optimizers.Optimizer
    model: transformers_lm.TransformersLM
    rows: feed.Feed
    held_out: data.Prepared | None
    num_steps: int
    packing: Mapping[str, Any]
    ranks: ports.Ranks

    @property
    def chosen(self) -> options.Options:
        """Return the options."""
        return self.command.options

    @property
    def folder(self) -> pathlib.Path:
        """Return the output folder."""
        return pathlib.Path(str(self.chosen.output_dir))


@attrs.frozen(kw_only=True, eq=False)
class Run:
    """Where a run stands.

    Attributes:
        state: what the steps carry.
        num_tokens: tokens of all rows trained so far.
        scores: the metric that decides on the best checkpoint, by step.
    """

    state: steps.TrainState
    num_tokens: int = 0
    scores: Mapping[int, float] = attrs.field(factory=dict)


def train(job: Job, run: Run, journal: log.Journal, gauge: meter.Meter, stopped: Callable[[], int]) -> Run:
    """Make steps until the last one or a signal; a checkpoint is written at the end of either.

    Args:
        job: what is run.
        run: where it stands.
        journal: told of every step.
        gauge: measures time, tokens and packs.
        stopped: the number of the signal that came, 0 while none did.

    Returns:
        Where the run stands now.
    """
    saved = run.state.step
    if job.chosen.eval_on_start and not run.state.step:
        run = _evaluate(job, run, journal)
    while run.state.step < job.num_steps:
        done = run.state.step + 1
        due = {what: _due(job, what, done) for what in ("logging", "eval", "save")}
        with gauge.step() as timed:
            samples, place = job.rows.take(run.state.place)
            watched = job.algorithm.watches if due["logging"] else ()
            packs = feed.packs(
                samples, job.algorithm, needs=(*job.algorithm.needs, *watched), ranks=job.ranks, **job.packing
            )
            timed.planned(samples, packs)
            rate = job.optimizer.rate(run.state.step)
            state, means = steps.train_step(
                job.model, job.algorithm, job.optimizer, run.state, packs, donate=True, ranks=job.ranks
            )
            timed.made({**means, "learning_rate": metrics.whole(rate)})
        run = attrs.evolve(
            run,
            state=attrs.evolve(state, place=place),
            num_tokens=run.num_tokens + sum(len(s.tokens) for s in samples),
        )
        if due["logging"]:
            epoch = job.rows.epoch(run.state.place)
            journal.log(done, {**gauge.read(), "epoch": epoch, "num_tokens": run.num_tokens})
        else:
            journal.display.step(done)
        if due["eval"]:
            before, run = run, _evaluate(job, run, journal)
            due["save"] = due["save"] or _best(job, run) != _best(job, before)
        stop = _any_rank(job, stopped())
        if due["save"] or stop:
            save(job, run, journal, gauge)
            saved = done
        if stop:
            return run
    if saved < run.state.step:
        save(job, run, journal, gauge)
    return run


def save(job: Job, run: Run, journal: log.Journal, gauge: meter.Meter) -> None:
    """Write a checkpoint and remove those that are not kept any more."""
    chosen = job.chosen
    with gauge.part("saving"):
        if job.ranks.index == 0:
            tensors, values = states.split(run.state)
            values |= {
                "algorithm": job.command.algorithm,
                "options": config.to_yaml(chosen),
                "num_tokens": run.num_tokens,
                "scores": {str(step): score for step, score in run.scores.items()},
            }
            checkpoint.save(job.folder, run.state.step, tensors, values, note=journal.display.note)
            checkpoint.prune(job.folder, chosen.save_total_limit, newest=run.state.step, best=_best(job, run))
        processes.wait(job.ranks)


def restore(template: steps.TrainState, saved: checkpoint.Saved) -> Run:
    """Return where a checkpoint stands."""
    values = saved.values
    return Run(
        state=states.join(template, saved.tensors, values),
        num_tokens=values["num_tokens"],
        scores={int(step): score for step, score in values["scores"].items()},
    )


def _evaluate(job: Job, run: Run, journal: log.Journal) -> Run:
    """Evaluate on the held-out rows and log it."""
    assert job.held_out is not None
    found = measure.measure(
        job.model, job.algorithm, run.state.params, job.held_out, key=keys.fold_in(run.state.key, "eval"),
        carry=run.state.carry, packing=job.packing, batch_size=job.rows.batch_size, ranks=job.ranks,
    )  # fmt: skip
    journal.log(run.state.step, found)
    name = job.chosen.metric_for_best_model
    if name is None:
        return run
    score = found[name if name.startswith("eval_") else f"eval_{name}"]
    return attrs.evolve(run, scores={**run.scores, run.state.step: score})


def _due(job: Job, what: str, step: int) -> bool:
    """Say whether logging, evaluation or a checkpoint is due after a step."""
    chosen, last = job.chosen, step == job.num_steps
    if what == "eval" and job.held_out is None:
        return False
    strategy = {"logging": "steps", "eval": chosen.eval_strategy, "save": chosen.save_strategy}[what]
    if strategy == "epoch":
        return last or (job.rows.steps_per_epoch is not None and step % job.rows.steps_per_epoch == 0)
    every = {"logging": chosen.logging_steps, "eval": chosen.eval_steps, "save": chosen.save_steps}[what]
    if strategy != "steps" or not every:
        return False
    return (
        step % config.every(every, job.num_steps) == 0
        or (last and what != "save")
        or (what == "logging" and step == 1)
    )


def _best(job: Job, run: Run) -> int | None:
    """Return the step of the best evaluation, None without one; its checkpoint is written at once and kept."""
    chosen = job.chosen
    greater = chosen.greater_is_better
    if greater is None:
        greater = not str(chosen.metric_for_best_model).endswith("loss")
    return checkpoint.best(run.scores, greater_is_better=greater)


def _any_rank(job: Job, signal: int) -> int:
    """Return the signal that came to any rank, so that all stop after the same step."""
    if job.ranks.num == 1:
        return signal
    heard = metrics.Maximum(value=float(signal))
    return int(metrics.values(job.ranks.merge({"signal": heard}))["signal"])


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Make operators deterministic while a run lasts."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
