"""What a run leaves when it ends: `model/`, the facts of run.json, a last line."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import safetensors
import torch

from adapters import compiling, transformers_lm
from shell import (
    best,
    chat,
    choose,
    env,
    files,
    graphs,
    loop,
    low_rank,
    mistake,
    places,
    plan,
    prepare,
    progress,
    written,
)


def write_model(
    job: loop.Job, tokenizer: Any, params: Mapping[str, Any], note: Callable[[str], None] = lambda text: None
) -> None:
    """Write `model/` aside and put it in place whole.

    Args:
        job: what was run.
        tokenizer: saved beside the weights, with the chat template that was trained.
        params: the trained parameters.
        note: told where a folder of other files is now, that stood in its place, and of weights that broke.

    Raises:
        mistake.Mistake: it cannot be written; what was there before is still there.
    """
    place = job.folder / written.MODEL
    odd = [name for name, param in params.items() if not bool(torch.isfinite(param).all())]
    if odd:
        note(
            f"{len(odd)} of {len(params)} parameters in {place} hold numbers that are not finite, "
            f"{odd[0]} first: the model is broken; lower learning_rate"
        )
    if job.model.scalar:
        # Its own class finds the last token of a row by skipping this one, so no row may end in it.
        tokenizer.pad_token_id = job.model.module.config.pad_token_id = chat.spare_id(tokenizer)
    try:
        with files.whole(place) as made:
            low_rank.write(job.model, params, made, job.command.options, tokenizer, note)
            places.make_way(place, made, note)
    except (OSError, safetensors.SafetensorError) as problem:
        raise mistake.Mistake(
            f"model cannot be written to {place} ({getattr(problem, 'strerror', None) or problem}); "
            "checkpoints are untouched: make room and run the same command again"
        ) from problem


def facts(
    ready: prepare.Ready,
    promised: plan.Promise,
    model: transformers_lm.TransformersLM,
    drawing: compiling.Counts | None = None,
) -> dict[str, Any]:
    """Return what run.json tells beside what was measured."""
    rows = {"train": ready.rows.counts, "eval": ready.held_out.counts if ready.held_out else None}
    return {
        "algorithm": ready.command.algorithm,
        "max_length_asked": ready.command.options.max_length,
        "environment": env.report(),
        "device": ready.device.name,
        "ranks": ready.ranks.num,
        "attention": choose.attention(ready.command.options, ready.device),
        "rows": {name: attrs.asdict(counted) for name, counted in rows.items() if counted},
        "promised": attrs.asdict(promised),
        **graphs.facts(model, ready, drawing),
    }


def tell(job: loop.Job, run: loop.Run, display: progress.Display, stop: int) -> None:
    """Say at the end where things are.

    Args:
        job: what was run.
        run: where it stands.
        display: told.
        stop: the signal that ended it, 0 when it is done.
    """
    if stop:
        display.note(f"stopped after step {run.state.step}; the same command goes on from there")
    else:
        told = best.told(job, run)
        display.note(f"done: {run.state.step} steps; the model is in {job.folder / 'model'}{told}")
