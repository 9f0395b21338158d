"""Whole jobs: prepare, load, train or evaluate, and leave what there is to leave."""

import contextlib
import json
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from adapters import ranks as processes
from adapters import transformers_lm
from core import algorithms, keys, steps
from shell import (
    checkpoint,
    checks,
    choose,
    config,
    counts,
    feed,
    files,
    finish,
    generate,
    lock,
    log,
    loop,
    measure,
    meter,
    plan,
    prepare,
    progress,
    references,
    resume,
    rollout,
    signals,
    trackers,
)


def train(
    command: config.Command,
    algorithm: algorithms.Algorithm | None = None,
    functions: Sequence[str | Callable[..., Any]] = (),
) -> int:
    """Run what a command asks for and return the exit status.

    Args:
        command: what was asked for.
        algorithm: the caller's own; None: the one that the command names.
        functions: rewards of the caller's own, names among them; none: those that the command names.
    """
    chosen = command.options
    checks.placed(chosen)
    with contextlib.ExitStack() as stack:
        display = progress.Display(shown=processes.is_first())
        for note in command.notes:
            display.note(note)
        device = prepare.device(chosen.device, display)
        ranks = processes.join(device)
        folder = _folder(chosen, stack)
        if ranks.index == 0 and not chosen.dry_run:
            stack.enter_context(lock.hold(folder))
            checkpoint.sweep(folder)
        processes.wait(ranks)  # nobody looks for checkpoints before the folder is swept
        place = None if chosen.output_dir is None else pathlib.Path(chosen.output_dir)
        saved = None if place is None else resume.find(command, place, display.note)
        gauge = meter.Meter(ranks)
        with gauge.part("preparing"):
            ready = prepare.ready(
                command, folder, device, ranks, display, algorithm, fresh=saved is None, functions=functions
            )
            promised = plan.promise(
                ready.preview, ready.num_steps, ready.packing, ready.algorithm.couples, ranks,
                checkpointing=chosen.gradient_checkpointing,
            )  # fmt: skip
        if saved is not None and _is_over(ready, saved, display):
            return 0
        if saved is not None:
            resume.compare(saved, ready.rows, chosen, ranks.num, display.note)
            display.note(f"going on from {place}/checkpoint-{saved.step}")
        if chosen.dry_run:
            if ranks.index == 0:
                print(plan.table(promised, chosen, device, ranks))
            return 0
        stack.enter_context(loop.deterministic())
        return _run(ready, saved, promised, display, gauge)


def evaluate(command: config.Command) -> int:
    """Evaluate a model on a command's dataset, print one JSON object and return the exit status."""
    chosen = command.options
    with contextlib.ExitStack() as stack:
        display = progress.Display(shown=processes.is_first())
        for note in command.notes:
            display.note(note)
        device = prepare.device(chosen.device, display)
        ranks = processes.join(device)
        stack.enter_context(loop.deterministic())
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ready = prepare.ready(command, folder, device, ranks, display, training=False)
        model, params = choose.model(chosen, device, training=False)
        if chosen.init_from is not None:
            params = resume.weights(chosen, params)
        assert isinstance(ready.rows, feed.Prepared)
        found = measure.measure(
            model, ready.algorithm, params, ready.rows.rows, packing=ready.packing,
            batch_size=chosen.batch_size, ranks=ranks,
        )  # fmt: skip
        if ranks.index == 0:
            print(json.dumps(found, indent=2))
        return 0


def _run(
    ready: prepare.Ready,
    saved: checkpoint.Saved | None,
    promised: plan.Promise,
    display: progress.Display,
    gauge: meter.Meter,
) -> int:
    """Load the model, train, and write what the run leaves."""
    chosen, ranks = ready.command.options, ready.ranks
    folder = pathlib.Path(str(chosen.output_dir))
    with gauge.part("loading"):
        job, state = _loaded(ready, fresh=saved is None)
    if saved is None:
        run = loop.Run(state=state)
    else:
        references.check(job.reference, saved, chosen)
        run = loop.restore(job, state, saved, gauge)
    journal = _journal(job, None if saved is None else saved.step, display)
    try:
        with signals.caught() as stopped:
            run = loop.train(job, run, journal, gauge, stopped)
        stop = run.stop
        if not stop and ranks.index == 0:
            with gauge.part("saving"):
                finish.write_model(job, ready.tokenizer, run.state.params)
        if chosen.streaming:
            for line in counts.notes(ready.rows.counts):
                display.note(line)
        ended = {
            "step": run.state.step,
            "finished": not stop,
            "first_nonfinite_step": run.first_nonfinite,
            "notes": display.notes,
        }
        journal.run({**finish.facts(ready, promised), **gauge.facts(chosen.price_per_hour), **ended})
        finish.tell(folder, run, display, stop)
    finally:
        journal.close()
    return 128 + stop if stop else 0


def _is_over(ready: prepare.Ready, saved: checkpoint.Saved, display: progress.Display) -> bool:
    """Say whether a run has no steps left and its model written, and tell what would continue it."""
    folder = pathlib.Path(str(ready.command.options.output_dir))
    if saved.step < ready.num_steps or not finish.is_finished(folder, saved.step):
        return False
    display.note(
        f"the run in {folder} is finished ({saved.step} steps); only more than {saved.step} would continue it"
    )
    return True


def _loaded(ready: prepare.Ready, *, fresh: bool) -> tuple[loop.Job, steps.TrainState]:
    """Load the model and make the state before the first step."""
    chosen = ready.command.options
    model, params = choose.model(chosen, ready.device, scalar="values" in ready.algorithm.needs)
    prompted = ready.algorithm.rows == "prompts"
    model = generate.tempered(model, chosen) if prompted else model
    referred = "reference_logprobs" in ready.algorithm.needs
    if chosen.init_from is not None and (fresh or referred):
        params = resume.weights(chosen, params)
    optimizer = choose.optimizer(chosen, ready.num_steps)
    state = steps.init(params, optimizer, ready.algorithm, key=keys.key(chosen.seed), place=ready.rows.start)
    reference = references.frozen(params) if referred else None
    job = loop.Job(
        command=ready.command, algorithm=ready.algorithm, optimizer=optimizer, model=model, rows=ready.rows,
        held_out=ready.held_out, num_steps=ready.num_steps, packing=ready.packing, ranks=ready.ranks,
        arrange=ready.arrange, reference=reference,
        rollouts=_rollouts(ready, model, reference) if prompted else None,
    )  # fmt: skip
    return job, state


def _rollouts(
    ready: prepare.Ready, model: transformers_lm.TransformersLM, reference: references.Reference | None
) -> rollout.Rollouts:
    """Return what writes samples out of prompts."""
    chosen = ready.command.options
    assert isinstance(ready.rows, rollout.Plan)
    return rollout.Rollouts(
        ready.rows,
        generate.asking(model, ready.tokenizer, ready.functions, chosen, ready.ranks),
        model=model,
        algorithm=ready.algorithm,
        packing=ready.packing,
        reference=None if reference is None else reference.params,
        mask_truncated=bool(chosen.mask_truncated_completions),
        num_steps=ready.num_steps,
    )


def _journal(job: loop.Job, resumed: int | None, display: progress.Display) -> log.Journal:
    """Open the log and write config.yaml."""
    chosen, writes = job.command.options, job.ranks.index == 0
    started: tuple[trackers.Tracker, ...] = ()
    if writes:
        job.folder.mkdir(parents=True, exist_ok=True)
        files.replace(job.folder / "config.yaml", config.to_yaml(chosen))
        started = trackers.start(chosen.report_to, job.folder, config.plain(chosen), resumed=resumed)
    made = log.Journal(job.folder, display, resumed=resumed, report_to=started, writes=writes)
    display.start(job.num_steps, done=resumed or 0)
    return made


def _folder(chosen: config.Options, stack: contextlib.ExitStack) -> pathlib.Path:
    """Return the output folder; a dry run leaves nothing behind."""
    if chosen.dry_run:
        return pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return pathlib.Path(str(chosen.output_dir))
