"""What a reference says of all rows, asked once: on disk beside the prepared rows, found by what made it.

Afterwards the reference is not needed: its numbers are a column of the rows. They are taken by the same
functions as the policy's and on the packs of the first epoch, so a policy that still equals its reference has
log-ratios of exactly 0; later epochs pack rows with others, which changes rounding alone.
"""

import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from adapters import ranks as processes
from core import metrics, ports
from shell import aside, data, feed, loop, scored, written

NAME = "reference_logprobs"
FILE = f"{NAME}.npy"


def asked(job: loop.Job, note: Callable[[str], None]) -> loop.Job:
    """Return a job whose rows know what the reference says of them, and that holds no reference.

    Args:
        job: whose reference has parameters.
        note: told when the reference is asked.
    """
    assert job.reference is not None, "there is no reference to ask"
    assert isinstance(job.rows, feed.Prepared), "rows are prepared"
    known = {
        id(rows): _with_column(job, rows, note)
        for rows in (job.rows.rows, job.held_out)
        if isinstance(rows, data.Prepared)
    }
    return attrs.evolve(
        job,
        rows=attrs.evolve(job.rows, rows=known[id(job.rows.rows)]),
        held_out=known.get(id(job.held_out), job.held_out),
        reference=attrs.evolve(job.reference, params=None),
    )


def _with_column(job: loop.Job, rows: data.Prepared, note: Callable[[str], None]) -> data.Prepared:
    """Return rows with the column, which is made now unless it is there; all ranks make it together."""
    folder, key = job.folder / written.PREPARED, _key(job, rows)
    here = aside.whole(folder / key) is not None
    processes.wait(job.ranks)  # nobody writes before all have looked
    if _on_all(here, job.ranks):
        return _open(rows, folder / key)
    note(f"the reference is asked once for {len(rows)} rows")
    values = _asked(job, rows)

    def write(place: pathlib.Path) -> Mapping[str, Any]:
        np.save(place / FILE, values)
        return {}

    if job.ranks.index == 0:
        aside.kept(folder, key, write)
    processes.wait(job.ranks)
    return _open(rows, folder / key)


def _asked(job: loop.Job, rows: data.Prepared) -> np.ndarray:
    """Return the log-probabilities of all tokens, 0 where none is trained."""
    assert job.frozen is not None
    found = np.zeros(len(rows.tokens), str(job.packing["dtype"]).removeprefix("torch."))
    for batch in _batches(job, rows):
        samples = [one for row in batch for one in rows.samples(row)]
        told = scored.logprobs(
            job.model, job.algorithm, job.frozen, samples, packing=job.packing, ranks=job.ranks
        )
        starts = [first for row in batch for first in range(rows.rows[row], rows.rows[row + 1])]
        for first, values in zip(rows.starts[starts].tolist(), told, strict=True):
            found[first : first + len(values)] = values
    return found


def _batches(job: loop.Job, rows: data.Prepared) -> Iterator[list[int]]:
    """Yield all rows in the batches that they are first seen in: a step's, or an evaluation's."""
    order = _order(job, rows)
    for start in range(0, len(order), job.rows.batch_size):
        yield order[start : start + job.rows.batch_size].tolist()


def _order(job: loop.Job, rows: data.Prepared) -> np.ndarray:
    """Return all rows in the order in which they are first seen."""
    order = np.arange(len(rows))
    if not isinstance(job.rows, feed.Prepared) or rows is not job.rows.rows:
        return order
    drawn = data.epoch_order(rows, seed=job.rows.seed, epoch=0)
    return np.concatenate([drawn, np.setdiff1d(order, drawn)])  # weights may leave some for later


def _open(rows: data.Prepared, place: pathlib.Path) -> data.Prepared:
    """Map the column into memory."""
    values = np.load(place / FILE, mmap_mode="r", allow_pickle=False)
    assert len(values) == len(rows.tokens), "one number a token"
    return attrs.evolve(rows, terms={NAME: values})


def _on_all(here: bool, ranks: ports.Ranks) -> bool:
    """Say whether no rank lacks the column."""
    lacks = ranks.merge({"lacks": metrics.Maximum(value=float(not here))})
    return not metrics.values(lacks)["lacks"]


def _key(job: loop.Job, rows: data.Prepared) -> str:
    """Name what makes the numbers: weights, rows, and whatever moves their rounding."""
    assert job.reference is not None
    packing = job.packing
    made_of = {
        "weights": job.reference.fingerprint,
        "rows": feed.digest(rows),
        "packs": [packing["budget"], packing["share"], str(packing["dtype"]), job.rows.batch_size],
        "couples": job.algorithm.couples,
        "order": hashlib.blake2b(_order(job, rows).tobytes()).hexdigest(),
        "model": [
            job.model.attention,
            attrs.astuple(job.model.shape),
            str(job.chosen.rope_scaling),
            job.chosen.bf16,
        ],
        "versions": [torch.__version__, packing["device"]],
    }
    return "reference-" + hashlib.blake2b(json.dumps(made_of).encode(), digest_size=16).hexdigest()
