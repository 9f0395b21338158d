"""Whole jobs: prepare, load, train or evaluate, and leave what there is to leave."""

import contextlib
import json
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from adapters import ranks as processes
from adapters import shards, signatures, static_cache, transformers_lm
from core import algorithms, keys, optimizers, steps
from shell import (
    best,
    cached,
    checkpoint,
    choose,
    config,
    counts,
    files,
    finish,
    footprint,
    forecast,
    generate,
    graphs,
    launched,
    lock,
    log,
    loop,
    low_rank,
    meter,
    mistake,
    own,
    places,
    plan,
    prepare,
    progress,
    references,
    resume,
    rollout,
    rounds,
    signals,
    splitting,
    start,
    states,
    teachers,
    trackers,
    unread,
    written,
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
    places.placed(command.options)
    with contextlib.ExitStack() as stack:
        display = progress.Display(shown=processes.is_first())
        command, algorithm = _settled(launched.applied(command), algorithm)
        chosen = command.options
        for note in command.notes:
            display.note(note)
        device = prepare.device(chosen, display)
        ranks = processes.join(device)
        splitting.check(chosen, device, ranks)
        folder = _folder(chosen, stack)
        if ranks.index == 0 and not chosen.dry_run:
            stack.enter_context(lock.hold(folder))
            checkpoint.sweep(folder)
        processes.wait(ranks)  # nobody looks for checkpoints before the folder is swept
        place = None if chosen.output_dir is None else pathlib.Path(chosen.output_dir)
        saved = None if place is None else resume.find(command, place, display.note)
        gauge = meter.Meter(ranks)
        with gauge.part("preparing"):
            ready = forecast.planned(
                prepare.ready(
                    command, folder, device, ranks, display, algorithm, saved=saved,
                    functions=functions,
                )
            )  # fmt: skip
            graphs.check(ready)
            promised = plan.promise(
                ready.preview, ready.num_steps, ready.packing, ready.algorithm.couples, ranks,
                levers=ready.levers, static=_static(ready),
            )  # fmt: skip
        if _is_over(ready, saved, display):
            return 0
        if saved is not None:
            resume.compare(saved, ready.rows, chosen, ranks.num, display.note)
            display.note(f"going on from {place}/checkpoint-{saved.step}")
        if chosen.dry_run:
            if ranks.index == 0:
                print(plan.table(promised, chosen, device, ranks))
                if chosen.memory_report:
                    print(footprint.table(promised.held, promised.host_memory_bytes))
            return 0
        display.lines(start.line(ready))
        stack.enter_context(loop.deterministic())
        with own.blamed(command.algorithm), graphs.told(chosen):
            return _run(ready, saved, promised, display, gauge)


def evaluate(command: config.Command) -> int:
    """Evaluate a model on a command's dataset, print one JSON object and return the exit status."""
    with contextlib.ExitStack() as stack:
        display = progress.Display(shown=processes.is_first())
        command, algorithm = _settled(command)
        # Evaluation holds models whole, the reference too.
        chosen = attrs.evolve(command.options, fsdp=False, precompute_ref_log_probs=None)
        command = attrs.evolve(command, options=chosen)
        for note in command.notes:
            display.note(note)
        compared = "reference_logprobs" in algorithm.needs and algorithm.rows != "prompts"
        origin = references.origin(command, display.note) if compared else None
        device = prepare.device(chosen, display)
        ranks = processes.join(device)
        stack.enter_context(loop.deterministic())
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ready = forecast.planned(
            prepare.ready(command, folder, device, ranks, display, algorithm, training=False), training=False
        )
        graphs.check(ready)
        job, state = _loaded(ready, fresh=True, training=False, origin=origin)
        with own.blamed(command.algorithm), graphs.told(chosen):
            found = loop.measured(job, loop.Run(state=state, reference=job.frozen), meter.Meter(ranks))
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
    chosen = ready.command.options
    with gauge.part("loading"):
        job, state = _loaded(ready, fresh=saved is None)
        if chosen.precompute_ref_log_probs:
            job = cached.asked(job, display.note)
    if saved is None:
        run = loop.Run(state=state, reference=job.frozen)
    else:
        low_rank.check(job.base, saved, chosen)
        _check_beside(job, saved)
        run = best.ranked(job, loop.restore(job, state, saved, gauge), saved, display.note)
    journal = _journal(job, None if saved is None else saved.step, display)
    gauge.graphs = None if job.model.compiled is None else job.model.compiled.counts
    gauge.drawing = None if job.rollouts is None else job.rollouts.graphs
    gauge.signatures = signatures.Signatures() if chosen.count_signatures else None
    gauge.watch = _watch(job, run, promised, ready, display) if chosen.memory_report else None
    try:
        with signals.caught() as stopped:
            run = loop.train(job, run, journal, gauge, stopped)
        stop = run.stop
        if not stop:
            with gauge.part("saving"):
                _write_model(job, ready.tokenizer, best.params(job, run), display)
        if chosen.streaming:
            for line in counts.notes(ready.rows.counts):
                display.note(line)
        if gauge.counted:
            display.note(f"counted over the run: {gauge.told()}")
        ended = {
            "step": run.state.step,
            "finished": not stop,
            "first_nonfinite_step": run.first_nonfinite,
            **best.facts(job, run),
            "notes": display.notes,
        }
        facts = finish.facts(ready, promised, job.model, gauge.drawing)
        if gauge.watch is not None:
            facts |= _memory(gauge.watch, promised, display)
        journal.run({**facts, **gauge.facts(chosen.price_per_hour), **ended})
        finish.tell(job, run, display, stop)
    finally:
        journal.close()
    return 128 + stop if stop else 0


def _watch(
    job: loop.Job, run: loop.Run, promised: plan.Promise, ready: prepare.Ready, display: progress.Display
) -> footprint.Watch:
    """Tell what memory is promised, and begin to measure what is reached."""
    display.lines(footprint.table(promised.held, promised.host_memory_bytes))
    watch = footprint.Watch(ready.device, compiled=job.model.compiled is not None)
    watch.hold(run.state.params, run.state.optimizer, run.reference, job.model)
    return watch


def _memory(watch: footprint.Watch, promised: plan.Promise, display: progress.Display) -> dict[str, Any]:
    """Tell what memory was reached beside what was promised; return it for run.json."""
    told = footprint.facts(promised.held, promised.host_memory_bytes, watch)
    display.lines(footprint.table(promised.held, promised.host_memory_bytes, told["reached"]))
    return {"memory": told}


def _check_beside(job: loop.Job, saved: checkpoint.Saved) -> None:
    """Refuse to go on beside another reference or teacher than the run began with."""
    chosen, taught, reference = job.chosen, job.model.teacher, job.reference
    if not chosen.sync_ref_model:  # one that moves is in the checkpoint
        source = str(chosen.ref_model or chosen.init_from or chosen.model)
        resume.unchanged(saved, chosen, "reference", reference and reference.fingerprint, source)
    named = f"teacher_model {chosen.teacher_model}"
    resume.unchanged(saved, chosen, "teacher", taught and taught.fingerprint, named)


def _is_over(ready: prepare.Ready, saved: checkpoint.Saved | None, display: progress.Display) -> bool:
    """Say whether a run has no steps left and its model written, and tell what would continue it."""
    chosen = ready.command.options
    if chosen.output_dir is None:
        return False
    folder = pathlib.Path(chosen.output_dir)
    step = places.ended(folder)
    if step is None or step != (step if saved is None else saved.step):
        return False
    if saved is not None and best.is_other(places.run_facts(folder), wanted=chosen.load_best_model_at_end):
        return False  # no step is left, and other weights are wanted of it
    if step >= ready.num_steps:
        more = f"; only more than {step} would continue it" if saved else ""
        if chosen.load_best_model_at_end and places.run_facts(folder).get("best_step") is None:
            more += "; no evaluation was scored, model/ has the last weights"
        display.note(f"the run in {folder} is finished ({step} steps){more}")
        return True
    if saved is not None:
        return False
    raise mistake.Mistake(
        f"output_dir {folder} holds a run of {step} steps without its checkpoints, so {ready.num_steps} "
        "cannot be reached; name another output_dir (init_from starts from its weights)"
    )


def _settled(
    command: config.Command, algorithm: algorithms.Algorithm | None = None
) -> tuple[config.Command, algorithms.Algorithm]:
    """Return the algorithm, and the command with the defaults of such an algorithm."""
    found = own.checked(algorithm) if algorithm else choose.algorithm(command.algorithm, command.options)
    unread.check(command, found)
    return config.settled(command, own.kin(found)), found


def _loaded(
    ready: prepare.Ready, *, fresh: bool, training: bool = True, origin: config.Options | None = None
) -> tuple[loop.Job, steps.TrainState]:
    """Load the model and make the state before the first step; of an evaluation, of no step at all."""
    chosen = ready.command.options
    scalar = "values" in ready.algorithm.needs
    # Parts alone go to the device where parameters are split; the model is the one that the device runs.
    device = attrs.evolve(ready.device, type="cpu") if chosen.fsdp else ready.device
    model, params = choose.model(chosen, device, scalar=scalar, training=training)
    prompted = ready.algorithm.rows == "prompts"
    model = graphs.compiled(model, ready)
    taught = teachers.load(chosen, ready.device, model, params)
    model = generate.tempered(model, chosen) if prompted or taught else model
    model = attrs.evolve(model, teacher=taught)
    referred = "reference_logprobs" in ready.algorithm.needs and (training or not prompted)
    if chosen.init_from is not None and (fresh or (referred and not chosen.sync_ref_model)):
        params = resume.weights(chosen, model, params)
    params = states.aligned(params)
    if origin is None and chosen.ref_model is not None:
        origin = references.named(chosen)
    base = references.digest(model.frozen) if model.adapter and training else ""
    reference = None
    if referred:
        reference = references.of(model, params, origin, device, chosen=chosen, base=base)
        reference = references.moving(reference) if chosen.sync_ref_model else reference
    ranks = ready.ranks
    if chosen.fsdp:
        model, params, reference, ranks = splitting.split(model, params, reference, ranks, ready.device)
    rule = choose.optimizer(chosen, ready.num_steps, splitting.norm(ranks))
    optimizer = rule if training else optimizers.sgd(rate=float)
    state = steps.init(params, optimizer, ready.algorithm, key=keys.key(chosen.seed), place=ready.rows.start)
    job = loop.Job(
        command=ready.command, algorithm=ready.algorithm, optimizer=optimizer, model=model, rows=ready.rows,
        held_out=ready.held_out, num_steps=ready.num_steps, packing=ready.packing, ranks=ranks,
        arrange=ready.arrange, reference=reference, base=base, max_length=ready.max_length,
        rollouts=_rollouts(ready, model) if prompted else None,
    )  # fmt: skip
    return job, state


def _write_model(job: loop.Job, tokenizer: Any, params: Mapping[str, Any], display: progress.Display) -> None:
    """Put the parameters together where they are split, and let the first process write the model folder."""
    model, whole = shards.joined(job.model, params, device="cpu")
    if job.ranks.index == 0:
        finish.write_model(attrs.evolve(job, model=model), tokenizer, whole, display.note)


def _rollouts(ready: prepare.Ready, model: transformers_lm.TransformersLM) -> rollout.Rollouts:
    """Return what writes samples out of prompts."""
    chosen = ready.command.options
    assert isinstance(ready.rows, rounds.Plan)
    asking = generate.asking(model, ready.tokenizer, ready.functions, chosen, ready.ranks, _static(ready))
    return rollout.Rollouts(
        ready.rows,
        asking,
        model=model,
        algorithm=ready.algorithm,
        packing=ready.packing,
        mask_truncated=bool(chosen.mask_truncated_completions),
        keep_masked=bool(chosen.keep_masked_in_baseline),
        tries=chosen.dynamic_sampling or 0,
        num_steps=ready.num_steps,
    )


def _static(ready: prepare.Ready) -> static_cache.Shapes | None:
    """Return the shapes that drawing keeps to; None where it keeps to none, or nothing is drawn."""
    if not isinstance(ready.rows, rounds.Plan):
        return None
    return generate.static(ready.command.options, ready.device, ready.ranks, ready.rows, ready.held_out)


def _journal(job: loop.Job, resumed: int | None, display: progress.Display) -> log.Journal:
    """Open the log and write config.yaml."""
    chosen, writes = job.command.options, job.ranks.index == 0
    started: tuple[trackers.Tracker, ...] = ()
    if writes:
        job.folder.mkdir(parents=True, exist_ok=True)
        places.keep_config(job.folder, display.note)
        files.replace(job.folder / written.CONFIG, config.to_file(job.command, job.max_length))
        started = trackers.start(chosen.report_to, job.folder, config.plain(chosen), resumed=resumed)
    made = log.Journal(job.folder, display, resumed=resumed, report_to=started, writes=writes)
    display.start(job.num_steps, done=resumed or 0)
    return made


def _folder(chosen: config.Options, stack: contextlib.ExitStack) -> pathlib.Path:
    """Return the output folder; a dry run leaves nothing behind."""
    if chosen.dry_run:
        return pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return pathlib.Path(str(chosen.output_dir))
