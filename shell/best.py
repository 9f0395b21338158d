"""The best checkpoint of a run: which it is, what is told of it, its weights where `model/` gets those."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from core import ports
from shell import checkpoint, loop, mistake, splitting, states


def ranked(job: loop.Job, run: loop.Run, saved: checkpoint.Saved, note: Callable[[str], None]) -> loop.Run:
    """Leave out the scores of another metric than decides on the best now: they do not compare.

    Args:
        job: what is run.
        run: where the checkpoint stands.
        saved: the checkpoint that the run goes on from.
        note: told what is left out.
    """
    name = job.chosen.metric_for_best_model
    now = None if name is None else loop.full(name)
    before = saved.values.get("scores_of", now)
    if not run.scores or before == now:
        return run
    note(f"the best so far was by {before}, and metric_for_best_model is {name}: its scores are left out")
    return attrs.evolve(run, scores={})


def params(job: loop.Job, run: loop.Run) -> ports.Params:
    """Return the parameters that `model/` gets: the best ones where that was asked for, else the last.

    They are read as a run that goes on reads its own, so every process must call this.

    Args:
        job: what is run.
        run: where it stands at its end.

    Raises:
        mistake.Mistake: the checkpoint of the best is not there any more.
    """
    last, step = run.state, _written(job, run)
    if step == last.step:
        return last.params
    folder = job.folder / f"checkpoint-{step}"
    problem = checkpoint.fault(folder)
    if problem:
        raise mistake.Mistake(
            f"{folder}, the best checkpoint, cannot be loaded: {problem}; the same command with "
            "--load_best_model_at_end false writes the last weights"
        )
    saved = checkpoint.load(folder, check=False)
    with states.reading(folder):
        # The optimizer's numbers are of no use any more, and as large as the weights on a device.
        template = attrs.evolve(last, optimizer={})
        tensors = splitting.cut(job.model, saved.tensors, states.split(template)[0])
        return states.join(template, tensors, saved.values).params


def facts(job: loop.Job, run: loop.Run) -> dict[str, Any]:
    """Return what run.json tells of the best checkpoint, and of which step the weights in `model/` are.

    Args:
        job: what is run.
        run: where it stands at its end; after a signal no model is written.
    """
    step = loop.best(job, run)
    return {
        "best_step": step,
        "best_metric": None if step is None else run.scores[step],
        "model_step": None if run.stop else _written(job, run),
    }


def told(job: loop.Job, run: loop.Run) -> str:
    """Say which checkpoint is the best and whether `model/` is that one, nothing where nobody asked.

    Args:
        job: what is run.
        run: where it stands at its end.
    """
    if job.chosen.metric_for_best_model is None:
        return ""
    name, step = loop.full(job.chosen.metric_for_best_model), loop.best(job, run)
    if step is None:
        return f", the last weights: no evaluation gave {name}, so none is the best"
    value = f"{name} {run.scores[step]:.4g} at step {step}"
    if _written(job, run) == step:
        return f", of the best {value}"
    return (
        f", of step {run.state.step}; the best is {value}, and the same command with "
        "--load_best_model_at_end makes it the model"
    )


def is_other(facts: Mapping[str, Any], *, wanted: bool) -> bool:
    """Say whether a finished run's `model/` has not the weights that are wanted now, the best or the last.

    Args:
        facts: of run.json.
        wanted: `load_best_model_at_end`.
    """
    best, written = facts.get("best_step"), facts.get("model_step")
    return None not in (best, written) and written != (best if wanted else facts.get("step"))


def _written(job: loop.Job, run: loop.Run) -> int:
    """Return the step whose weights are written."""
    step = loop.best(job, run) if job.chosen.load_best_model_at_end else None
    return run.state.step if step is None else step
