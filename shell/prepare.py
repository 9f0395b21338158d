"""From options to what is known before the model is loaded: every check in its order, the rows, the packing.

Datasets are checked before the model's folder, that before tokenizer, template and masks, and all before the
model is loaded; the first failure is told.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import transformers
from huggingface_hub import utils as hub

from adapters import pick, self_test
from adapters import ranks as processes
from core import algorithms, ports, precision
from core.plan import cost, memory
from shell import (
    carried,
    checkpoint,
    choose,
    config,
    counts,
    data,
    encode,
    exchanges,
    feed,
    footprint,
    generate,
    low_rank,
    mistake,
    own,
    progress,
    prompts,
    references,
    resume,
    rewards,
    rounds,
    sources,
    teachers,
    written,
)


@attrs.frozen(kw_only=True, eq=False)
class Ready:
    """What is known before the model is loaded.

    Attributes:
        command: what was asked for.
        algorithm, tokenizer, rows, held_out, arrange: as in `loop.Job`.
        preview: a feed of the same samples to plan with, so that no row is counted twice.
        shape: of the model.
        packing: how packs are made.
        device, ranks: where.
        num_steps: optimizer steps of the whole run.
        levers: what memory depends on.
        functions: what scores completions, where rows are prompts.
        max_length: most tokens of a sequence, as the model holds it.
    """

    command: config.Command
    algorithm: algorithms.Algorithm
    tokenizer: transformers.PreTrainedTokenizerBase
    rows: feed.Feed
    preview: feed.Feed
    held_out: data.Prepared | prompts.Prompts | None
    arrange: feed.Arrange
    shape: cost.ModelShape
    packing: Mapping[str, Any]
    device: ports.Device
    ranks: ports.Ranks
    num_steps: int
    levers: memory.Levers
    functions: tuple[rewards.Reward, ...] = ()
    max_length: int | None = None


def ready(
    command: config.Command,
    folder: pathlib.Path,
    device: ports.Device,
    ranks: ports.Ranks,
    display: progress.Display,
    algorithm: algorithms.Algorithm,
    *,
    training: bool = True,
    saved: checkpoint.Saved | None = None,
    functions: Sequence[str | Callable[..., Any]] = (),
) -> Ready:
    """Check everything that can be checked before the model is loaded, and tokenize the rows.

    Args:
        command: what was asked for.
        folder: where prepared rows are kept.
        device, ranks: where the run takes place.
        display: told of what was dropped or cut.
        algorithm: what is minimized.
        training: False: only what evaluation needs, on the rows themselves.
        saved: the checkpoint of its own that the run goes on from, with its weights; None: it begins.
        functions: the caller's own rewards; none: those that the options name.
    """
    chosen, scalar = command.options, "values" in algorithm.needs
    quiet()
    evaluated = algorithm.evolve(rows="text") if _is_mixed(chosen) else algorithm
    algorithm, held = (algorithm, chosen.eval_dataset) if training else (evaluated, None)
    opened = _opened(chosen.dataset, chosen, chosen.dataset_split, algorithm)
    opened_eval = _opened(held, chosen, chosen.eval_split or "train", evaluated)
    scored = _scored(chosen, functions, (opened, opened_eval), algorithm)
    dtype, described = choose.dtype(chosen, device), choose.config(chosen)
    shape = choose.shape(chosen, described, dtype, scalar=scalar)
    if training:
        choose.check_dropout(chosen, described)
    trained = low_rank.trained(chosen, described, scalar=scalar)
    taught = _looked(chosen, device, algorithm, fresh=saved is None)
    runs = attrs.evolve(shape, vocab=1) if scalar else shape
    tokenizer = choose.tokenizer(chosen)
    limit = choose.max_length(command, described, display.note)
    limit = teachers.check(command, tokenizer, (shape, taught), limit, display.note)
    levers = footprint.levers(chosen, device, _beside(shape, chosen, algorithm, taught), trained)
    budget = footprint.budget(runs, chosen, device, levers, ranks)
    needed = own.columns(algorithm)
    bound = _rules(opened, chosen, tokenizer, limit, needed)
    bound_eval = _rules(opened_eval, chosen, tokenizer, limit, needed) if opened_eval else None
    arrange = _arrangement(algorithm, limit)
    feeding, preview = _feeds(opened, bound, chosen, folder, ranks, display, shape.vocab, arrange)
    held_out = bound_eval and _prepared(opened_eval, bound_eval, folder, ranks, display, shape.vocab)
    if bound.chat is not None:
        tokenizer.chat_template = bound.chat.template
    packing = _packing(chosen, resume.budget(budget, saved, chosen, display.note), runs, dtype, device)
    num_steps = _num_steps(chosen, feeding)
    if training:
        _note(chosen, num_steps, device, display)
    return Ready(
        command=command, algorithm=algorithm, tokenizer=tokenizer, rows=feeding, preview=preview,
        held_out=held_out if training else _rows(feeding), arrange=arrange, shape=shape, packing=packing,
        device=device, ranks=ranks, num_steps=num_steps, functions=scored, levers=levers, max_length=limit,
    )  # fmt: skip


def _num_steps(chosen: config.Options, feeding: feed.Feed) -> int:
    """Return the optimizer steps of the whole run; a part of an epoch that is none is refused."""
    found = chosen.max_steps or config.whole(chosen.num_train_epochs * (feeding.steps_per_epoch or 0))
    if not found:
        raise mistake.Mistake(
            f"num_train_epochs {chosen.num_train_epochs:g} of {feeding.steps_per_epoch} steps an epoch is no "
            "step; raise it, or set max_steps"
        )
    return found


def _looked(
    chosen: config.Options, device: ports.Device, algorithm: algorithms.Algorithm, *, fresh: bool
) -> cost.ModelShape | None:
    """Refuse weights that cannot be read, of the model and of those beside it; return a teacher's sizes."""
    choose.check_weights(chosen)
    references.look(chosen)
    referred = "reference_logprobs" in algorithm.needs
    if fresh or (referred and not chosen.sync_ref_model):  # a moving one is in the checkpoint
        resume.check_source(chosen)
    return teachers.look(chosen, device)


def _note(chosen: config.Options, num_steps: int, device: ports.Device, display: progress.Display) -> None:
    """Tell that a run ends before its warm-up does, and that there is nowhere to move activations to."""
    if chosen.activation_offloading and device.type == "cpu":
        display.note("activation_offloading does nothing on a CPU, whose memory is the host's")
    rises = choose.num_warmup(chosen, num_steps)
    if rises >= num_steps:
        display.note(
            f"the learning rate rises for {rises} steps and the run has {num_steps}: it never reaches "
            f"{chosen.learning_rate:g}"
        )


def device(chosen: config.Options, display: progress.Display) -> ports.Device:
    """Return the device, its refusal as the caller's mistake; what is passed over is told.

    Attention is tried in the dtype of the run's products. A kernel that was asked for and fails is taken off
    the device.

    Args:
        chosen: the options.
        display: told.
    """
    kernel = chosen.attn_implementation
    try:
        started = pick.device(chosen.device)
        dtype = choose.products(chosen, started)
        found, notes = self_test.tested(started, dtype)
    except ValueError as problem:
        raise mistake.Mistake(str(problem)) from problem
    passed_over = pick.passed_over(found) if chosen.device == "auto" else None
    if passed_over is not None:
        display.note(f"device is {found.name}: {passed_over}")
    for note in notes:
        display.note(f"{note}: {found.attention[0]} is taken")
    meant = [kind for kind in found.attention if kind in choose.ATTENTION[kernel]]
    untried = meant[:1] not in ([], [found.attention[0]])
    fault = self_test.fault(meant[0], found, dtype) if untried else None
    if fault is not None:
        left = tuple(kind for kind in found.attention if kind != meant[0])
        found = attrs.evolve(found, attention=left)
    if fault is not None or (choose.ATTENTION[kernel] and not meant):
        why = f"it fails its self-test ({fault})" if fault else f"{found.name} has no such kernel"
        display.note(f"attn_implementation {kernel}: {why}; {found.attention[0]} is taken, as exact")
    if chosen.gradient_checkpointing == "selective" and choose.checkpointing(chosen, found) is True:
        kind = choose.attention(chosen, found)
        display.note(f"gradient_checkpointing selective: of attention {kind} nothing is kept; true is taken")
    return found


def quiet() -> None:
    """Keep the bars and remarks of transformers off the terminal; downloads still show theirs.

    Weights that are missing, the one thing it would only remark on, are refused when the model is loaded.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    hub.enable_progress_bars()


def _packing(
    chosen: config.Options, budget: int, shape: cost.ModelShape, dtype: torch.dtype, device: ports.Device
) -> dict[str, Any]:
    """Return how packs are made: the arguments of `feed.packs`."""
    return {
        "budget": budget,
        "share": chosen.packing == "tree",
        "shape": shape,
        "dtype": precision.wide(dtype),
        "device": device.type,
    }


def _arrangement(algorithm: algorithms.Algorithm, limit: int | None) -> feed.Arrange:
    """Return what is made of the samples of a step before they are packed."""
    if "mismatched" in algorithm.needs:
        return functools.partial(feed.with_mismatched, max_length=limit)
    return feed.as_they_come


def _opened(
    rows: Any, chosen: config.Options, split: str, algorithm: algorithms.Algorithm
) -> tuple[data.Opened, ...]:
    """Open what `dataset` or `eval_dataset` names and look at its columns."""
    if rows is None:
        return ()
    found = sources.find(
        rows,
        config=chosen.dataset_config,
        split=split,
        streaming=chosen.streaming,
        task_options=chosen.task_options,
    )
    found = found if chosen.lmbda is None else tuple(map(exchanges.apart, found))
    opened = prompts.look(found) if algorithm.rows == "prompts" else data.look(found, algorithm.rows)
    for one, columns in zip(opened, (next(source.read(0))[1] for source in found), strict=True):
        carried.check(own.columns(algorithm), columns, algorithm.rows, where=one.source.name)
    return opened


def _rules(
    opened: tuple[data.Opened, ...],
    chosen: config.Options,
    tokenizer: Any,
    limit: int | None,
    columns: tuple[str, ...],
) -> encode.Rules | prompts.Rules:
    """Bind the options of the rows to the tokenizer."""
    if opened[0].rows == "prompts":
        answers = None
        if _is_mixed(chosen):
            own_answers = exchanges.answered(opened, chosen.lmbda or 0.0)
            answers = _rules(own_answers, chosen, tokenizer, limit, columns)
            assert isinstance(answers, encode.Rules)
        return generate.rules(opened, chosen, tokenizer, limit, answers)
    return data.rules(
        opened,
        tokenizer=tokenizer,
        max_length=limit,
        truncation=chosen.truncation,
        completion_only_loss=chosen.completion_only_loss,
        assistant_only_loss=bool(chosen.assistant_only_loss),
        chat_template=chosen.chat_template,
        chat_template_kwargs=chosen.chat_template_kwargs,
        columns=columns,
    )


def _feeds(
    opened: tuple[data.Opened, ...],
    bound: encode.Rules | prompts.Rules,
    chosen: config.Options,
    folder: pathlib.Path,
    ranks: ports.Ranks,
    display: progress.Display,
    vocab: int,
    arrange: feed.Arrange,
) -> tuple[feed.Feed, feed.Feed]:
    """Return the feed that is trained on, and one of the same samples to plan with."""
    batch_size, seed = chosen.batch_size, choose.data_seed(chosen)
    if not chosen.streaming or isinstance(bound, prompts.Rules):
        rows = _prepared(opened, bound, folder, ranks, display, vocab)
        if isinstance(rows, prompts.Prompts):
            feeding = generate.plan(rows, chosen, seed)
            return feeding, feeding
        feeding = feed.Prepared(rows=rows, batch_size=batch_size, seed=seed, arrange=arrange)
        return feeding, feeding
    for name in ("save_strategy", "eval_strategy"):
        if getattr(chosen, name) == "epoch":
            display.note(
                f"{name} is epoch, and a stream does not tell when one ends: only after the last step"
            )
    first, second = (
        feed.Streamed(opened, bound, batch_size=batch_size, seed=seed, vocab=vocab, arrange=arrange)
        for _ in range(2)
    )
    return first, second


def _rows(feeding: feed.Feed) -> data.Prepared | prompts.Prompts | None:
    """Return all rows of a feed; of a stream there are none at once."""
    if isinstance(feeding, rounds.Plan):
        return feeding.prompts
    return feeding.rows if isinstance(feeding, feed.Prepared) else None


def _prepared(
    opened: tuple[data.Opened, ...],
    bound: encode.Rules | prompts.Rules,
    folder: pathlib.Path,
    ranks: ports.Ranks,
    display: progress.Display,
    vocab: int,
) -> data.Prepared | prompts.Prompts:
    """Tokenize the rows, the first rank before the others, and tell what was dropped or cut.

    What fails on the first rank fails on the others too when they try, so all end with the same line.
    """
    if ranks.index:
        processes.wait(ranks)
    try:
        kept = {"folder": folder / written.PREPARED, "progress": display.rows, "note": display.note}
        if isinstance(bound, prompts.Rules):
            made = prompts.prepare(opened, bound, **kept)
        else:
            made = data.prepare(opened, bound, **kept)
    finally:
        if not ranks.index:
            processes.wait(ranks)
    feed.check_vocabulary(made.tokens, vocab)
    for line in counts.notes(made.counts):
        display.note(line)
    return made


def _is_mixed(chosen: config.Options) -> bool:
    """Say whether part of the answers is the student's, and the rows bring the others."""
    return chosen.lmbda is not None and 0.0 < chosen.lmbda < 1.0


def _scored(
    chosen: config.Options,
    functions: Sequence[str | Callable[..., Any]],
    opened: tuple[tuple[data.Opened, ...], tuple[data.Opened, ...]],
    algorithm: algorithms.Algorithm,
) -> tuple[rewards.Reward, ...]:
    """Return what scores completions; where nothing is made of rewards a teacher judges every token."""
    judged = algorithm.rows != "prompts" or (algorithm.columns is None and chosen.teacher_model is not None)
    return () if judged else generate.functions(chosen, functions, *opened)


def _beside(
    shape: cost.ModelShape,
    chosen: config.Options,
    algorithm: algorithms.Algorithm,
    taught: cost.ModelShape | None,
) -> tuple[cost.ModelShape | None, ...]:
    """Return the models that are held beside the one that trains, a reference and a teacher.

    Neither is where it is the model itself, its adapter off.
    """
    alone = chosen.use_peft and chosen.ref_model is None
    compared = "reference_logprobs" in algorithm.needs and not alone and not chosen.precompute_ref_log_probs
    size = max(shape.element_bytes, 4) if chosen.sync_ref_model else shape.element_bytes
    reference = attrs.evolve(shape, element_bytes=size) if compared else None
    return (reference, None if teachers.is_base(chosen) else taught)
