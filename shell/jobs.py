"""From options to a run: every check in its order, then the loop, then what the run leaves.

Datasets are checked before the model's folder, that before tokenizer, template and masks, and all before the
model is loaded; the first failure is told.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import attrs
import torch
import transformers

from adapters import pick, shapes
from adapters import ranks as processes
from core import algorithms, keys, ports, steps
from core.plan import cost
from shell import (
    checkpoint,
    choose,
    config,
    counts,
    data,
    encode,
    env,
    feed,
    files,
    lock,
    log,
    loop,
    measure,
    meter,
    mistake,
    plan,
    progress,
    resume,
    signals,
    sources,
    trackers,
)

FALLBACK_BUDGET = 16384
RESERVE = 0.4  # of the device's memory: the estimate knows neither allocator nor neighbours


@attrs.frozen(kw_only=True, eq=False)
class Ready:
    """What is known before the model is loaded.

    Attributes:
        command: what was asked for.
        algorithm, tokenizer, rows, held_out: as in `loop.Job`.
        shape: of the model.
        packing: how packs are made.
        device, ranks: where.
        num_steps: optimizer steps of the whole run.
    """

    command: config.Command
    algorithm: algorithms.Algorithm
    tokenizer: transformers.PreTrainedTokenizerBase
    rows: feed.Feed
    held_out: data.Prepared | None
    shape: cost.ModelShape
    packing: Mapping[str, Any]
    device: ports.Device
    ranks: ports.Ranks
    num_steps: int


def train(command: config.Command, algorithm: algorithms.Algorithm | None = None) -> int:
    """Run what a command asks for and return the exit status.

    Args:
        command: what was asked for.
        algorithm: the caller's own; None: the one that the command names.
    """
    chosen = command.options
    with contextlib.ExitStack() as stack:
        device = _device(chosen.device)
        ranks = processes.join(device)
        stack.callback(processes.leave)
        display = progress.Display(shown=ranks.index == 0)
        for note in command.notes:
            display.note(note)
        folder = _folder(chosen, stack)
        if ranks.index == 0 and not chosen.dry_run:
            stack.enter_context(lock.hold(folder))
            checkpoint.sweep(folder)
        saved = None if chosen.dry_run else resume.find(command, folder, display.note)
        ready = prepare(command, folder, device, ranks, display, algorithm)
        promised = plan.promise(
            ready.rows, ready.num_steps, ready.packing, ready.algorithm.couples, ranks,
            checkpointing=chosen.gradient_checkpointing,
        )  # fmt: skip
        if chosen.dry_run:
            if ranks.index == 0:
                print(plan.table(promised, chosen, device, ranks))
            return 0
        stack.enter_context(loop.deterministic())
        return _run(ready, saved, promised, display)


def evaluate(command: config.Command) -> int:
    """Evaluate a model on the rows of a command's dataset, print one JSON object; the exit status is returned."""
    with contextlib.ExitStack() as stack:
        device = _device(command.options.device)
        ranks = processes.join(device)
        stack.callback(processes.leave)
        display = progress.Display(shown=ranks.index == 0)
        for note in command.notes:
            display.note(note)
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ready = prepare(command, folder, device, ranks, display)
        model, params = choose.model(command.options, device)
        assert isinstance(ready.rows, feed.Prepared)
        found = measure.measure(
            model, ready.algorithm, params, ready.rows.rows, key=keys.key(command.options.seed),
            packing=ready.packing, batch_size=command.options.batch_size, ranks=ranks,
        )  # fmt: skip
        if ranks.index == 0:
            print(json.dumps(found, indent=2))
        return 0


def prepare(
    command: config.Command,
    folder: pathlib.Path,
    device: ports.Device,
    ranks: ports.Ranks,
    display: progress.Display,
    algorithm: algorithms.Algorithm | None = None,
) -> Ready:
    """Check everything that can be checked before the model is loaded, and tokenise the rows.

    Args:
        command: what was asked for.
        folder: where prepared rows are kept.
        device, ranks: where the run takes place.
        display: told of what was dropped or cut.
        algorithm: the caller's own; None: the one that the command names.
    """
    chosen = command.options
    opened = _opened(chosen.dataset, chosen, chosen.dataset_split)
    opened_eval = _opened(chosen.eval_dataset, chosen, chosen.eval_split or "train")
    algorithm = algorithm or choose.algorithm(command.algorithm, chosen)
    described = choose.config(chosen)
    choose.check_dropout(chosen, described)
    shape = shapes.shape(described, choose.dtype(chosen, device), trust_remote_code=chosen.trust_remote_code)
    tokenizer = choose.tokenizer(chosen)
    limit = choose.max_length(command, described, display.note)
    bound = _rules(opened, chosen, tokenizer, limit)
    if chosen.streaming:
        feeding: feed.Feed = feed.Streamed(
            opened, bound, batch_size=chosen.batch_size, seed=choose.data_seed(chosen)
        )
    else:
        rows = _prepared(opened, bound, folder, ranks, display)
        feeding = feed.Prepared(rows=rows, batch_size=chosen.batch_size, seed=choose.data_seed(chosen))
    held_out = None
    if opened_eval:
        held_out = _prepared(
            opened_eval, _rules(opened_eval, chosen, tokenizer, limit), folder, ranks, display
        )
    if bound.chat is not None:
        tokenizer.chat_template = bound.chat.template
    packing = {
        "budget": chosen.token_budget or _budget(shape, chosen, device),
        "share": chosen.packing == "tree",
        "shape": shape,
        "dtype": max(choose.dtype(chosen, device), torch.float32, key=lambda d: d.itemsize),
        "device": device.type,
    }
    num_steps = chosen.max_steps or math.ceil(chosen.num_train_epochs * (feeding.steps_per_epoch or 0))
    return Ready(
        command=command, algorithm=algorithm, tokenizer=tokenizer, rows=feeding, held_out=held_out,
        shape=shape, packing=packing, device=device, ranks=ranks, num_steps=num_steps,
    )  # fmt: skip


def _run(
    ready: Ready, saved: checkpoint.Saved | None, promised: plan.Promise, display: progress.Display
) -> int:
    """Load the model, train, and write what the run leaves."""
    chosen, ranks = ready.command.options, ready.ranks
    folder = pathlib.Path(str(chosen.output_dir))
    if saved is not None and saved.step >= ready.num_steps and _is_finished(folder, saved.step):
        display.note(
            f"the run in {folder} is finished ({saved.step} steps); more max_steps would continue it"
        )
        return 0
    gauge = meter.Meter(ready.shape, ready.packing["budget"], ranks)
    with gauge.part("loading"):
        model, params = choose.model(chosen, ready.device)
        if chosen.init_from is not None and saved is None:
            params = resume.weights(chosen, params)
        optimizer = choose.optimizer(chosen, ready.num_steps)
        state = steps.init(
            params, optimizer, ready.algorithm, key=keys.key(chosen.seed), place=ready.rows.start
        )
    job = loop.Job(
        command=ready.command, algorithm=ready.algorithm, optimizer=optimizer, model=model, rows=ready.rows,
        held_out=ready.held_out, num_steps=ready.num_steps, packing=ready.packing, ranks=ranks,
    )  # fmt: skip
    run = loop.Run(state=state) if saved is None else loop.restore(state, saved)
    if saved is not None:
        display.note(f"going on from {folder}/checkpoint-{saved.step}")
    journal = _journal(job, None if saved is None else saved.step, display)
    try:
        with signals.caught() as stopped:
            run = loop.train(job, run, journal, gauge, stopped)
        measured = gauge.facts(chosen.price_per_hour)
        stop = stopped()
        if not stop and ranks.index == 0:
            with gauge.part("saving"):
                _write_model(job, ready.tokenizer, run.state.params)
        ended = {"step": run.state.step, "finished": not stop, "notes": display.notes}
        journal.run({**_facts(ready, promised), **measured, **ended})
        _tell(ready, run, display, stop)
    finally:
        journal.close()
    return 128 + stop if stop else 0


def _journal(job: loop.Job, resumed: int | None, display: progress.Display) -> log.Journal:
    """Open the log and write config.yaml."""
    chosen, writes = job.command.options, job.ranks.index == 0
    started: tuple[trackers.Tracker, ...] = ()
    if writes:
        job.folder.mkdir(parents=True, exist_ok=True)
        files.replace(job.folder / "config.yaml", config.to_yaml(chosen))
        started = trackers.start(chosen.report_to, job.folder, config.plain(chosen), resumed=resumed)
    display.start(job.num_steps, done=resumed or 0)
    return log.Journal(job.folder, display, resumed=resumed, report_to=started, writes=writes)


def _write_model(job: loop.Job, tokenizer: Any, params: Mapping[str, Any]) -> None:
    """Write `model/` aside and put it in place whole."""
    aside, place = job.folder / ".model.partial", job.folder / "model"
    shutil.rmtree(aside, ignore_errors=True)
    os.umask(mask := os.umask(0))
    try:
        job.model.save(params, str(aside))
        tokenizer.save_pretrained(aside)
        for path in aside.iterdir():
            path.chmod(0o666 & ~mask)  # safetensors keeps others out, such as a server of another user
        shutil.rmtree(place, ignore_errors=True)
        aside.rename(place)
    except OSError as problem:
        raise mistake.Mistake(
            f"model cannot be written to {place} ({problem.strerror or problem}); checkpoints are untouched: "
            "make room and run the same command again"
        ) from problem
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_finished(folder: pathlib.Path, step: int) -> bool:
    """Say whether the model of this last step was written whole."""
    try:
        facts = json.loads((folder / log.RUN).read_text())
    except (OSError, ValueError):
        return False
    return bool(facts.get("finished")) and facts.get("step") == step and (folder / "model").is_dir()


def _facts(ready: Ready, promised: plan.Promise) -> dict[str, Any]:
    """Return what run.json tells beside what was measured."""
    rows = {"train": ready.rows.counts, "eval": ready.held_out.counts if ready.held_out else None}
    return {
        "algorithm": ready.command.algorithm,
        "environment": env.report(),
        "device": ready.device.name,
        "ranks": ready.ranks.num,
        "attention": choose.attention(ready.command.options, ready.device),
        "rows": {name: attrs.asdict(counted) for name, counted in rows.items() if counted},
        "promised": attrs.asdict(promised),
    }


def _tell(ready: Ready, run: loop.Run, display: progress.Display, stop: int) -> None:
    """Say at the end where things are."""
    folder = ready.command.options.output_dir
    if stop:
        display.note(f"stopped after step {run.state.step}; the same command goes on from there")
    else:
        display.note(f"done: {run.state.step} steps; the model is in {folder}/model")


def _opened(rows: Any, chosen: config.Options, split: str) -> tuple[data.Opened, ...]:
    """Open what `dataset` or `eval_dataset` names and look at its columns."""
    if rows is None:
        return ()
    found = sources.find(rows, config=chosen.dataset_config, split=split, streaming=chosen.streaming)
    return data.look(found)


def _rules(
    opened: tuple[data.Opened, ...], chosen: config.Options, tokenizer: Any, limit: int | None
) -> encode.Rules:
    """Bind the options of the rows to the tokenizer."""
    return data.rules(
        opened,
        tokenizer=tokenizer,
        max_length=limit,
        truncation=chosen.truncation,
        completion_only_loss=chosen.completion_only_loss,
        assistant_only_loss=bool(chosen.assistant_only_loss),
        chat_template=chosen.chat_template,
        chat_template_kwargs=chosen.chat_template_kwargs,
    )


def _prepared(
    opened: tuple[data.Opened, ...],
    bound: encode.Rules,
    folder: pathlib.Path,
    ranks: ports.Ranks,
    display: progress.Display,
) -> data.Prepared:
    """Tokenise the rows, the first rank before the others, and tell what was dropped or cut."""
    if ranks.index:
        processes.wait(ranks)
    made = data.prepare(opened, bound, folder=folder / "prepared")
    if not ranks.index:
        processes.wait(ranks)
    for line in counts.notes(made.counts):
        display.note(line)
    return made


def _budget(shape: cost.ModelShape, chosen: config.Options, device: ports.Device) -> int:
    """Return the unique tokens of a forward that fit the device, by the estimate."""
    memory = device.memory()
    if memory is None:
        return FALLBACK_BUDGET
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    fits = cost.token_budget(
        shape, memory // local, checkpointing=chosen.gradient_checkpointing, reserve=RESERVE
    )
    if not fits:
        need = cost.peak_bytes(shape, 1, checkpointing=chosen.gradient_checkpointing) / 2**30
        raise mistake.Mistake(
            f"model {chosen.model} needs {need:.1f} GiB to train; {device.name} has {memory / 2**30:.1f} "
            "GiB. Take a smaller model, or say how many tokens to try with --token_budget"
        )
    return fits


def _device(name: str) -> ports.Device:
    """Return the device, its refusal as the caller's mistake."""
    try:
        return pick.device(name)
    except ValueError as problem:
        raise mistake.Mistake(str(problem)) from problem


def _folder(chosen: config.Options, stack: contextlib.ExitStack) -> pathlib.Path:
    """Return the output folder; a dry run leaves nothing behind."""
    if chosen.dry_run:
        return pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    if chosen.output_dir is None:
        raise mistake.Mistake("output_dir is not set; say where to write with --output_dir FOLDER")
    return pathlib.Path(chosen.output_dir)
