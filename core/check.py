"""Properties that any algorithm must have, for users' own too.

`check(mine)` runs them on a small model in float64 and raises on the first that fails, saying which and by
how much.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from core import algorithms, pack, record, reference, steps
from core.plan import sample

TOLERANCE = 1e-10
EXTREMES = (0.0, -1e-12, -50.0, -1e4)


def check(algorithm: algorithms.Algorithm, *, seeds: Iterable[int] = range(5)) -> None:
    """Check that a forest, a split and an order change nothing, that values are finite, and `couples` true.

    Args:
        algorithm: any Algorithm.
        seeds: a batch is drawn for each.

    Raises:
        ValueError: the property that failed, the seed of the batch, and by how much.
    """
    for seed in seeds:
        samples = draw(algorithm, seed)
        for name, holds in PROPERTIES.items():
            problem = holds(algorithm, samples)
            if problem:
                raise ValueError(f"{name} does not hold (batch of seed {seed}): {problem}")


def draw(algorithm: algorithms.Algorithm, seed: int) -> list[sample.Sample]:
    """Draw a batch of samples that share prefixes, with every column that a run has.

    Args:
        algorithm: its `rows` decide on units, its `columns` are called with rewards in [0, 1].
        seed: names the draw.
    """
    source = np.random.default_rng(seed)
    stems = [source.integers(0, reference.VOCAB, source.integers(2, 7)) for _ in range(2)]
    samples = []
    for i in range(6):
        tail = source.integers(0, reference.VOCAB, source.integers(1, 6))
        tokens = np.concatenate([stems[i // 3 if algorithm.rows != "pairs" else i // 2 % 2], tail]).astype(
            np.int64
        )
        trained = source.random(len(tokens)) < 0.8
        trained[0], trained[-1] = False, True
        nearby = -source.random((3, len(tokens))) * 3.0
        names = ("sampled_logprobs", "old_logprobs", "reference_logprobs")
        columns: dict[str, np.ndarray | float] = {n: nearby[j] for j, n in enumerate(names)}
        if algorithm.rows == "unpaired":
            columns["label"] = float(i % 2)
        if "mismatched" in algorithm.needs:
            columns["mismatched"] = float(i % 3 == 2)
        unit, group = (i // 2, i // 2) if algorithm.rows == "pairs" else (i, i // 3)
        samples.append(sample.Sample(tokens=tokens, trained=trained, columns=columns, group=group, unit=unit))
    if algorithm.columns is None:
        return samples
    rewards = torch.from_numpy(source.random(len(samples)).round(1))
    made = algorithm.columns(rewards, torch.tensor([s.group for s in samples]))
    return [
        attrs.evolve(s, columns={**s.columns, **{n: float(v[i]) for n, v in made.items()}})
        for i, s in enumerate(samples)
    ]


def _tree_is_alone(algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]) -> str:
    return _differ(_grads(algorithm, [samples], share=True), _grads(algorithm, [samples], share=False))


def _additive(algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]) -> str:
    return _differ(_grads(algorithm, units(algorithm, samples)), _grads(algorithm, [samples]))


def _order_free(algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]) -> str:
    turned = [s for unit in reversed(units(algorithm, samples)) for s in unit]
    return _differ(_grads(algorithm, [turned]), _grads(algorithm, [samples]))


def _finite(algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]) -> str:
    _, scores, loss = _table(algorithm, samples)
    for extreme in EXTREMES:
        leaves = _leaves(algorithm, scores) | {"logprobs": torch.full_like(scores.logprobs, extreme)}
        value, grad = _gradient(loss, scores, leaves)
        if not (value.isfinite() and grad.isfinite().all()):
            return f"log-probabilities of {extreme} give a loss of {value.item()} and a gradient not finite."
    return ""


def _pure(algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]) -> str:
    """Call the loss twice; neither what it was given nor what it returns may change."""
    batch, scores, loss = _table(algorithm, samples)
    given = record.tree.map(torch.clone, (batch, scores))
    first, second = loss(scores)[0], loss(scores)[0]
    leaves = zip(record.tree.leaves((batch, scores)), record.tree.leaves(given), strict=True)
    if not all(torch.equal(x, y) for x, y in leaves):
        return "the loss or its reduction writes to them."
    same = torch.equal(first, second) or bool(first.isnan() and second.isnan())
    return "" if same else f"the same ones gave a loss of {first.item()}, then one of {second.item()}."


def _couples(algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]) -> str:
    """Move the scores of one unit; the gradient by those of the others must stay as it is."""
    batch, scores, loss = _table(algorithm, samples)
    unit = _unit_of_rows(algorithm, samples, batch)
    if unit.unique().numel() < 2:
        return ""
    first = unit == unit[0]

    leaves = _leaves(algorithm, scores)
    moved = {n: torch.where(first, values - 0.3, values) for n, values in leaves.items()}
    before, after = (_gradient(loss, scores, given)[1] for given in (leaves, moved))
    gap = (after - before)[:, ~first].abs().max().item() / max(before.abs().max().item(), 1e-300)
    if gap <= TOLERANCE:
        return ""
    return (
        f"couples is {algorithm.couples!r}, but one of them moves the gradient of another by {gap:.1e} "
        "of the largest; name a larger one."
    )


def _linear(algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]) -> str:
    """Where `linear` is declared, the gradient at other scores must be the same to the bit."""
    if not algorithm.linear:
        return ""
    _, scores, loss = _table(algorithm, samples)
    at = [_gradient(loss, scores, {"logprobs": scores.logprobs * factor})[1] for factor in (0.0, 1.0)]
    return "" if torch.equal(*at) else "linear is declared, but the gradient moves with the scores."


def _leaves(algorithm: algorithms.Algorithm, scores: pack.Scores) -> dict[str, Tensor]:
    """Return the fields of the scores that the loss may differentiate."""
    needed = {n: getattr(scores, n) for n in ("logprobs", *algorithm.needs) if hasattr(scores, n)}
    return {n: values for n, values in needed.items() if n != "top1"}


def _gradient(
    loss: Callable[[pack.Scores], tuple[Tensor, record.Any]], scores: pack.Scores, given: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient by the given fields, one row each."""
    leaves = {n: values.clone().requires_grad_() for n, values in given.items()}
    value, _ = loss(attrs.evolve(scores, **leaves))
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return value, torch.stack(found)


PROPERTIES: Mapping[str, Callable[[algorithms.Algorithm, Sequence[sample.Sample]], str]] = {
    "arguments stay as they are": _pure,
    "tree = alone": _tree_is_alone,
    "additive over units": _additive,
    "order-free": _order_free,
    "finite at extremes": _finite,
    "declared coupling": _couples,
    "declared linearity": _linear,
}


def _grads(
    algorithm: algorithms.Algorithm, parts: Sequence[Sequence[sample.Sample]], *, share: bool = True
) -> dict[str, Tensor]:
    """Return the loss and the gradients of a step over packs of these parts."""
    counts = pack.count([s for part in parts for s in part])
    packs = [
        pack.build(part, counts, needs=algorithm.reads, share=share, dtype=torch.float64) for part in parts
    ]
    value, _, grads = steps.loss_and_grad(reference.Reference(), algorithm, reference.params(), packs, 0)
    return {"the loss": value, **grads}


def _table(
    algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]
) -> tuple[pack.Batch, pack.Scores, Callable[[pack.Scores], tuple[Tensor, record.Any]]]:
    """Return a batch, its scores and the step's objective over them."""
    needs = algorithm.reads
    whole = pack.build(samples, pack.count(samples), needs=needs, dtype=torch.float64)
    scores = reference.Reference().predict(reference.params(), whole, 0)
    return whole.batch, scores, steps.objective(algorithm, whole.batch, algorithm.carry)


def units(algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]) -> list[list[sample.Sample]]:
    """Split samples into what must be seen together."""
    keys = {"pair": lambda i, s: s.unit, "group": lambda i, s: s.group, "step": lambda i, s: 0}
    key = keys.get(algorithm.couples, lambda i, s: i)
    units: dict[int, list[sample.Sample]] = {}
    for i, s in enumerate(samples):
        units.setdefault(key(i, s), []).append(s)
    return list(units.values())


def _unit_of_rows(
    algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample], batch: pack.Batch
) -> Tensor:
    """Number the unit of each row."""
    if algorithm.couples == "token":
        return torch.arange(len(batch.terms.sample))
    place = {id(s): n for n, unit in enumerate(units(algorithm, samples)) for s in unit}
    return torch.tensor([place[id(s)] for s in samples]).index_select(0, batch.terms.sample)


def _differ(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Name the entry that differs most, against the largest gradient's scale; empty when all agree."""
    scale = max(v.abs().max().item() for v in wanted.values())
    gaps = {n: (got[n] - wanted[n]).abs().max().item() / max(scale, 1e-300) for n in wanted}
    worst = max(gaps, key=gaps.__getitem__)
    return (
        "" if gaps[worst] <= TOLERANCE else f"{worst} differs by {gaps[worst]:.1e} of the largest gradient."
    )
