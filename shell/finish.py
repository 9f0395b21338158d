"""What a run leaves when it ends: `model/`, the facts of run.json, a last line."""

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import attrs
import safetensors

from adapters import compiling, transformers_lm
from shell import chat, choose, env, files, graphs, log, loop, low_rank, mistake, plan, prepare, progress


def write_model(job: loop.Job, tokenizer: Any, params: Mapping[str, Any]) -> None:
    """Write `model/` aside and put it in place whole.

    Args:
        job: what was run.
        tokenizer: saved beside the weights, with the chat template that was trained.
        params: the trained parameters.

    Raises:
        mistake.Mistake: it cannot be written; what was there before is still there.
    """
    aside, place = job.folder / ".model.partial", job.folder / "model"
    shutil.rmtree(aside, ignore_errors=True)
    os.umask(mask := os.umask(0))
    try:
        if job.model.scalar:
            # Its own class finds the last token of a row by skipping this one, so no row may end in it.
            tokenizer.pad_token_id = job.model.module.config.pad_token_id = chat.spare_id(tokenizer)
        low_rank.write(job.model, params, aside, job.command.options, tokenizer)
        for path in aside.iterdir():
            path.chmod(0o666 & ~mask)  # safetensors keeps others out, such as a server of another user
            files.sync(path)
        shutil.rmtree(place, ignore_errors=True)
        aside.rename(place)
        files.sync_folder(job.folder)
    except (OSError, safetensors.SafetensorError) as problem:
        raise mistake.Mistake(
            f"model cannot be written to {place} ({getattr(problem, 'strerror', None) or problem}); "
            "checkpoints are untouched: make room and run the same command again"
        ) from problem
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_finished(folder: pathlib.Path, step: int) -> bool:
    """Say whether a run ended at a step with its model written whole."""
    try:
        facts = json.loads((folder / log.RUN).read_text())
    except (OSError, ValueError):
        return False
    return bool(facts.get("finished")) and facts.get("step") == step and (folder / "model").is_dir()


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
        "environment": env.report(),
        "device": ready.device.name,
        "ranks": ready.ranks.num,
        "attention": choose.attention(ready.command.options, ready.device),
        "rows": {name: attrs.asdict(counted) for name, counted in rows.items() if counted},
        "promised": attrs.asdict(promised),
        **graphs.facts(model, ready, drawing),
    }


def tell(folder: pathlib.Path, run: loop.Run, display: progress.Display, stop: int) -> None:
    """Say at the end where things are.

    Args:
        folder: the output folder.
        run: where the run stands.
        display: told.
        stop: the signal that ended it, 0 when it is done.
    """
    if stop:
        display.note(f"stopped after step {run.state.step}; the same command goes on from there")
    else:
        display.note(f"done: {run.state.step} steps; the model is in {folder / 'model'}")
