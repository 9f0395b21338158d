"""The one loop: take rows, plan packs, make a step, log, evaluate, save; until the last step or a signal."""

import contextlib
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import attrs
import torch

from adapters import ranks as processes
from adapters import transformers_lm
from core import algorithms, metrics, optimizers, ports, steps
from shell import (
    checkpoint,
    config,
    counts,
    data,
    feed,
    graphs,
    log,
    measure,
    meter,
    mistake,
    options,
    own,
    prompts,
    references,
    rollout,
    splitting,
    states,
    translate,
)


@attrs.frozen(kw_only=True, eq=False)
class Job:
    """All that a run is made of.

    Attributes:
        command: what was asked for.
        algorithm, optimizer, model: what is trained and how.
        rows: what it is trained on; `held_out`: what it is evaluated on, if anything.
        arrange: what is made of the samples of a step.
        base: names the frozen weights below an adapter to the bit; empty without one.
        reference: what the algorithm compares with at first; None where it needs none.
        rollouts: writes the samples of the rows, which are prompts; None where rows are samples.
        num_steps: optimizer steps of the whole run.
        packing: how packs are made, the arguments of `feed.packs`.
        ranks: who shares the steps.
        max_length: most tokens of a sequence, as the model holds it.
    """

    command: config.Command
    algorithm: algorithms.Algorithm
    optimizer: optimizers.Optimizer
    model: transformers_lm.TransformersLM
    rows: feed.Feed
    held_out: data.Prepared | prompts.Prompts | None
    num_steps: int
    packing: Mapping[str, Any]
    ranks: ports.Ranks
    arrange: feed.Arrange = feed.as_they_come
    base: str = ""
    reference: references.Reference | None = None
    rollouts: rollout.Rollouts | None = None
    max_length: int | None = None

    @property
    def frozen(self) -> ports.Params | None:
        """Return the parameters that the reference begins with, if there is one."""
        return None if self.reference is None else self.reference.params

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
        reference: the parameters that the policy is compared with, if any; they are frozen, or follow it.
        num_tokens: tokens of all rows trained so far.
        counted: what became of the rows until then; a step that was read for and failed is not among them.
        scores: the metric that decides on the best checkpoint, by step.
        first_nonfinite: the first step whose loss or gradient was not finite; None: all were.
        stop: the signal that ended it on any rank, 0 while none came.
    """

    state: steps.TrainState
    reference: ports.Params | None = None
    num_tokens: int = 0
    counted: counts.Counts = attrs.field(factory=counts.Counts)
    scores: Mapping[int, float] = attrs.field(factory=dict)
    first_nonfinite: int | None = None
    stop: int = 0

    @property
    def compared(self) -> ports.Params | None:
        """Return the reference as the model reads it."""
        return references.rounded(self.reference, self.state.params)


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
    _check_metric(job, run, gauge)
    if job.chosen.eval_on_start and not run.state.step:
        journal.log(0, measured(job, run, gauge))
    while run.state.step < job.num_steps:
        done = run.state.step + 1
        due = {what: _due(job, what, done) for what in ("logging", "eval", "save")}
        with _kept(job, run, saved, journal, gauge):
            drawn = _drawn(job, run, gauge)
        samples = drawn.samples
        with _kept(job, run, saved, journal, gauge, alone=True), gauge.step() as timed:
            wanted = job.algorithm.reads if due["logging"] else job.algorithm.needs
            packs = feed.packs(samples, job.algorithm, needs=wanted, ranks=job.ranks, **job.packing)
            packs = steps.with_reference(job.model, job.algorithm, run.compared, packs)
            timed.planned(samples, packs, job.packing["shape"], job.packing["budget"])
            rate = job.optimizer.rate(run.state.step)
            state, means = steps.train_step(
                job.model, job.algorithm, job.optimizer, run.state, packs, donate=True, ranks=job.ranks
            )
            timed.made({**means, **drawn.means})
        run = attrs.evolve(
            run,
            state=attrs.evolve(state, place=drawn.place),
            reference=references.moved(run.reference, state.params, done, job.chosen),
            num_tokens=run.num_tokens + sum(len(s.tokens) for s in samples),
            counted=job.rows.counts,
            first_nonfinite=run.first_nonfinite or _nonfinite(job, done, gauge, journal),
        )
        journal.completions(done, drawn.table, shown=due["logging"])
        if due["logging"]:
            now = {"learning_rate": rate, "epoch": job.rows.epoch(run.state.place)}
            journal.log(done, {**gauge.read(), **now, "num_tokens": run.num_tokens})
        else:
            journal.display.step(done)
        if due["eval"]:
            with _kept(job, run, saved, journal, gauge):
                found = measured(job, run, gauge)
            before, run = run, _evaluated(job, run, journal, found)
            due["save"] = due["save"] or best(job, run) != best(job, before)
        run = attrs.evolve(run, stop=_any_rank(job, stopped()))
        if due["save"] or run.stop:
            save(job, run, journal, gauge)
            saved = done
        if run.stop:
            return run
    if saved < run.state.step:
        save(job, run, journal, gauge)
    return run


def save(job: Job, run: Run, journal: log.Journal, gauge: meter.Meter) -> None:
    """Write a checkpoint and remove those that are not kept any more."""
    chosen, measured = job.chosen, gauge.split()
    with gauge.part("saving"):
        tensors, values = states.split(run.state)
        tensors = splitting.whole(job.model, tensors | references.split(run.reference, chosen))
        if job.ranks.index == 0:
            journal.sync()
            held, told = job.rollouts.split(run.state.place) if job.rollouts else ({}, None)
            values |= {
                "algorithm": job.command.algorithm,
                "options": config.to_yaml(chosen),
                "max_length": job.max_length,
                "num_tokens": run.num_tokens,
                "scores": {str(step): score for step, score in run.scores.items()},
                "scores_of": chosen.metric_for_best_model and full(chosen.metric_for_best_model),
                "first_nonfinite_step": run.first_nonfinite,
                "ranks": job.ranks.num,
                "token_budget": job.packing["budget"],
                "rows": {"digest": job.rows.digest, "counts": attrs.asdict(run.counted)},
                "rollouts": told,
                "measured": measured,
                "base": job.base,
                "reference": None if job.reference is None else job.reference.fingerprint,
                "teacher": None if job.model.teacher is None else job.model.teacher.fingerprint,
            }
            tensors |= held
            checkpoint.save(job.folder, run.state.step, tensors, values, note=journal.display.note)
            kept = (best(job, run), _before(job, run.first_nonfinite))
            checkpoint.prune(job.folder, chosen.save_total_limit, newest=run.state.step, kept=kept)
        processes.wait(job.ranks)


def restore(job: Job, template: steps.TrainState, saved: checkpoint.Saved, gauge: meter.Meter) -> Run:
    """Return where a checkpoint stands, and set what counts and measures to where it stood.

    Args:
        job: what is run.
        template: a state of the same structure.
        saved: the checkpoint.
        gauge: set to what was measured until then.
    """
    values = saved.values
    with states.reading(job.folder / f"checkpoint-{saved.step}"):
        gauge.join(values["measured"])
        counted = counts.Counts(**values["rows"]["counts"])
        if isinstance(job.rows, feed.Streamed):
            job.rows.counts = counted
        if job.rollouts is not None:
            job.rollouts.join(saved.tensors, values["rollouts"])
        like = states.split(template)[0] | references.split(job.frozen, job.chosen)
        tensors = splitting.cut(job.model, saved.tensors, like)
        return Run(
            state=states.join(template, tensors, values),
            reference=references.join(job.frozen, tensors, job.chosen),
            num_tokens=values["num_tokens"],
            counted=counted,
            scores={int(step): score for step, score in values["scores"].items()},
            first_nonfinite=values.get("first_nonfinite_step"),
        )


@contextlib.contextmanager
def _kept(
    job: Job, run: Run, saved: int, journal: log.Journal, gauge: meter.Meter, *, alone: bool = False
) -> Iterator[None]:
    """Save the steps since the last checkpoint before a mistake that is met late ends a run, on all ranks.

    `alone`: others may wait for this rank in a sum, where they cannot be told; the newest checkpoint is what
    is kept then.
    """
    problem = None
    try:
        with own.blamed(job.command.algorithm), graphs.told(job.chosen):
            yield
    except mistake.Mistake as told:
        problem = told
    if alone and job.ranks.num > 1:
        if problem is None:
            return
        kept = f"checkpoint-{saved} is the newest" if saved else "there is no checkpoint yet"
        raise mistake.Mistake(f"{problem}; other processes may wait, so nothing was saved: {kept}")
    if not _any_rank(job, int(problem is not None)):
        return
    if run.state.step > saved:
        save(job, run, journal, gauge)
        journal.display.note(f"checkpoint-{run.state.step} holds the steps until here")
    raise problem or mistake.Mistake("another process of this run met a mistake; it says which")


def _nonfinite(job: Job, step: int, gauge: meter.Meter, journal: log.Journal) -> int | None:
    """Return a step and tell of it if its loss or gradient is not finite."""
    if not gauge.nonfinite:
        return None
    good = _before(job, step)
    kept = "no checkpoint is" if good is None else f"checkpoint-{good} is the newest"
    odd = " and ".join(gauge.nonfinite)
    journal.display.note(f"step {step} is the first whose {odd} is not finite; {kept} from before it")
    return step


def _before(job: Job, step: int | None) -> int | None:
    """Return the newest checkpoint from before a step, None without one."""
    return None if step is None else checkpoint.before(job.folder, step)


def _drawn(job: Job, run: Run, gauge: meter.Meter) -> rollout.Drawn:
    """Take the samples of the next step, or have them written."""
    if job.rollouts is not None:
        with gauge.part("rollouts"):
            return job.rollouts.draw(run.state, run.compared)
    with gauge.part("steps"):
        samples, place = job.rows.take(run.state.place)
    return rollout.Drawn(samples=samples, place=place)


def _evaluated(job: Job, run: Run, journal: log.Journal, found: Mapping[str, float]) -> Run:
    """Log what was measured on the held-out rows, and remember the metric that decides on the best."""
    journal.log(run.state.step, found)
    name = job.chosen.metric_for_best_model
    if name is None:
        return run
    # A metric of which nothing was seen this time is left out; it is not the best.
    score = found.get(full(name), math.nan)
    return attrs.evolve(run, scores={**run.scores, run.state.step: score})


def measured(job: Job, run: Run, gauge: meter.Meter, most: int | None = None) -> dict[str, float]:
    """Measure on the held-out rows, the same way in training and on its own.

    Args:
        job: what is run.
        run: where it stands.
        gauge: measures the time.
        most: rows to look at, the first ones, to know the names of what is measured; None: all.

    Returns:
        Numbers by their names in the log, `eval_...`.
    """
    with gauge.part("evaluating"):
        if job.rollouts is not None and isinstance(job.held_out, prompts.Prompts):
            return job.rollouts.evaluate(run.state, job.held_out, most)
        assert isinstance(job.held_out, data.Prepared)
        return measure.measure(
            job.model, job.algorithm, run.state.params, job.held_out, carry=run.state.carry,
            packing=job.packing, batch_size=job.rows.batch_size, ranks=job.ranks, most=most,
            reference=run.compared, arrange=job.arrange,
        )  # fmt: skip


def _check_metric(job: Job, run: Run, gauge: meter.Meter) -> None:
    """Refuse a metric that the evaluation does not give, before there is work to lose."""
    name = job.chosen.metric_for_best_model
    if name is None:
        return
    found = measured(job, run, gauge, most=1)
    if full(name) not in found:
        raise mistake.Mistake(
            f"metric_for_best_model {name} is not measured; one of {', '.join(found)} was wanted."
            + translate.hint(full(name), found)
        )


def full(name: str) -> str:
    """Return a metric's name in the log of an evaluation."""
    return name if name.startswith("eval_") else f"eval_{name}"


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


def best(job: Job, run: Run) -> int | None:
    """Return the step of the best evaluation, None without one; its checkpoint is written and kept."""
    name, greater = job.chosen.metric_for_best_model, job.chosen.greater_is_better
    if name is None:
        return None
    if greater is None:
        greater = not name.endswith("loss")
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
    before, mode = torch.are_deterministic_algorithms_enabled(), cast("Any", torch.utils.deterministic)
    filled = mode.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    mode.fill_uninitialized_memory = False  # nothing reads memory before it is written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        mode.fill_uninitialized_memory = filled
