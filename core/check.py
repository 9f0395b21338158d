"""Properties that any algorithm must have, for users' own too.

`check(mine)` runs them on a small model in float64 and raises on the first that fails, saying which and by
how much. The error carries a smallest batch on which it fails, which `shell.failures` writes to a file.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from core import algorithms, differences, missing, pack, record, reference, shrink, steps
from core.plan import batching, sample

TOLERANCE = 1e-10
EXTREMES = (0.0, -1e-12, -50.0, -1e4)
BUDGETS = (1, 6, 12, 24)
DIRECTIONS = 3
_SCORES = tuple(field.name for field in attrs.fields(pack.Scores))


@attrs.frozen(kw_only=True, eq=False)
class Failure:
    """A property that does not hold.

    Attributes:
        name: of the property, one of `PROPERTIES`.
        problem: by how much, or where.
        seed: of the batch that was drawn.
        samples: a smallest batch on which it does not hold.
    """

    name: str
    problem: str
    seed: int
    samples: tuple[sample.Sample, ...]


@attrs.frozen
class Broken(ValueError):
    """An algorithm lacks a property.

    Attributes:
        failure: which, and a batch that shows it.
    """

    failure: Failure

    def __str__(self) -> str:
        """Say what failed."""
        told = self.failure
        return (
            f"{told.name} does not hold (batch of seed {told.seed}; of its kind the smallest has "
            f"{len(told.samples)} samples, {sum(len(s.tokens) for s in told.samples)} tokens): {told.problem}"
        )


def check(
    algorithm: algorithms.Algorithm, *, seeds: Iterable[int] = range(5), without: Sequence[str] = ()
) -> None:
    """Check every property of `PROPERTIES` on batches that are drawn.

    A step that is not logged has the same loss; a gradient flows to the scores; a forest, a split, a budget
    and an order change nothing; values are finite; gradients are the slopes of values; `couples` is true. The
    loss of a policy, one that is given an `advantage`, has REINFORCE's gradient where the policy is the one
    that wrote the answers: each token's log-probability is pulled by the advantage times one weight for the
    whole sample, or left alone.

    Args:
        algorithm: any Algorithm.
        seeds: a batch is drawn for each.
        without: names of properties that it is not meant to have.

    Raises:
        Broken: a ValueError with the property that failed, by how much, and as `failure` a smallest batch.
        ValueError: `without` names what is no property.
    """
    failure = find(algorithm, seeds=seeds, without=without)
    if failure is not None:
        raise Broken(failure)


def find(
    algorithm: algorithms.Algorithm, *, seeds: Iterable[int] = range(5), without: Sequence[str] = ()
) -> Failure | None:
    """Return the first property that does not hold with a smallest batch that shows it; None: all hold.

    Args:
        algorithm: any Algorithm.
        seeds: a batch is drawn for each.
        without: names of properties that it is not meant to have.

    Raises:
        ValueError: `without` names what is no property.
    """
    strange = sorted(set(without) - PROPERTIES.keys())
    if strange:
        raise ValueError(f"without: {strange[0]!r} came; one of {', '.join(PROPERTIES)} was wanted.")
    for seed in seeds:
        samples = draw(algorithm, seed)
        for name in PROPERTIES:
            if name not in without and problem(algorithm, name, samples):
                least = shrink.smallest(samples, lambda few, name=name: _fails(algorithm, name, few))
                told = problem(algorithm, name, least)
                return Failure(name=name, problem=told, seed=seed, samples=least)
    return None


def problem(algorithm: algorithms.Algorithm, name: str, samples: Sequence[sample.Sample]) -> str:
    """Return what is wrong with one property on a batch, empty where it holds.

    Args:
        algorithm: any Algorithm.
        name: of the property.
        samples: of a step, with every column that the loss reads: drawn, or of a failure that was kept.
    """
    return PROPERTIES[name](algorithm, samples)


def _fails(algorithm: algorithms.Algorithm, name: str, samples: Sequence[sample.Sample]) -> bool:
    """Say whether a property fails on a batch; a batch that the loss refuses shows nothing."""
    try:
        return bool(problem(algorithm, name, samples))
    except (ValueError, RuntimeError, IndexError, ZeroDivisionError):
        return False


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
        columns |= {n: float(source.random()) for n in algorithm.needs if n not in (*columns, *_SCORES)}
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


def _flows(algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]) -> str:
    batch, scores, _ = _table(algorithm, samples)
    leaves = {n: values.clone().requires_grad_() for n, values in _leaves(algorithm, scores).items()}
    values, _ = algorithm.loss(attrs.evolve(scores, **leaves), batch, **algorithm.carry)
    if not values.requires_grad:
        return "the loss returns values that no gradient flows from: look for a detach or a comparison."
    return "" if algorithm.reduce(values, batch).requires_grad else "reduce lets no gradient through."


def _tree_is_alone(algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]) -> str:
    return _differ(_grads(algorithm, [samples], share=True), _grads(algorithm, [samples], share=False))


def _additive(algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]) -> str:
    return _differ(_grads(algorithm, units(algorithm, samples)), _grads(algorithm, [samples]))


def _budget_free(algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]) -> str:
    """Plan packs for several budgets."""
    wanted = _grads(algorithm, [samples])
    for budget in BUDGETS:
        (plan,) = batching.assign(samples, budget=budget, couples=algorithm.couples)
        parts = [[samples[i] for i in members] for members in plan if members]
        told = _differ(_grads(algorithm, parts), wanted)
        if told:
            return f"with packs of at most {budget} tokens {told}"
    return ""


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


def _slopes(algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]) -> str:
    """Hold gradients against differences of values, in a few directions."""
    _, scores, loss = _table(algorithm, samples)
    at = _leaves(algorithm, scores)
    value = abs(loss(scores)[0].item())
    for number in range(DIRECTIONS):
        way = differences.direction(at, number)
        slope, found = differences.along(lambda given: loss(attrs.evolve(scores, **given))[0], at, way)
        if not abs(slope - found) <= 1e-5 * max(abs(slope), abs(found)) + 1e-8 * value:
            return f"autograd says a slope of {slope:.6g}, differences of the loss say {found:.6g}."
    return ""


def _reinforces(algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]) -> str:
    """Pull with other advantages where the policy is the one that wrote the answers."""
    if algorithm.rows != "prompts" or not all("advantage" in s.columns for s in samples):
        return ""
    batch, scores, _ = _table(algorithm, samples)
    own = {name: scores.logprobs for name in ("old_logprobs", "sampled_logprobs")}
    terms = attrs.evolve(batch.terms, columns={**batch.terms.columns, **own})

    def pull(advantage: Tensor) -> Tensor:
        columns = {**batch.samples.columns, "advantage": advantage}
        given = attrs.evolve(batch, terms=terms, samples=attrs.evolve(batch.samples, columns=columns))
        loss = steps.objective(algorithm, given, algorithm.carry)
        return _gradient(loss, scores, {"logprobs": scores.logprobs})[1][0]

    rest = pull(torch.zeros_like(batch.samples.advantage))
    weights = rest - pull(torch.ones_like(batch.samples.advantage))
    scale, owner = weights.abs().max().item(), batch.terms.sample
    if not scale:
        return "the advantage pulls on no token."
    places = torch.arange(len(samples), dtype=rest.dtype)
    advantage = (1.0 + places) * (-1.0) ** places
    off = (rest - pull(advantage) - advantage.index_select(0, owner) * weights).abs().max().item()
    if off > TOLERANCE * scale * len(samples):
        return f"the pull on a token is not in proportion to its advantage (off by {off / scale:.1e})."
    for i in range(len(samples)):
        mine = weights[owner == i]
        uneven = torch.minimum(mine.abs(), (mine - mine.amax().clamp(min=0.0)).abs()).max().item()
        if uneven > TOLERANCE * scale:
            return (
                "a good answer's tokens are pushed away, or those of one sample are pulled with different "
                f"weights (by {uneven / scale:.1e} of the largest)."
            )
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


def _unlogged(algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample]) -> str:
    """Score without what only metrics read, as at most steps of a run."""

    def run(needs: Sequence[str]) -> Tensor:
        _, scores, loss = _table(algorithm, samples, needs)
        return loss(scores)[0]

    return missing.problem(algorithm, run)


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
    "the loss is the same at steps that are not logged": _unlogged,
    "arguments stay as they are": _pure,
    "a gradient flows to the scores": _flows,
    "tree = alone": _tree_is_alone,
    "additive over units": _additive,
    "budget-free": _budget_free,
    "order-free": _order_free,
    "finite at extremes": _finite,
    "gradcheck": _slopes,
    "on-policy gradient is REINFORCE's": _reinforces,
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
    algorithm: algorithms.Algorithm, samples: Sequence[sample.Sample], needs: Sequence[str] | None = None
) -> tuple[pack.Batch, pack.Scores, Callable[[pack.Scores], tuple[Tensor, record.Any]]]:
    """Return a batch, its scores and the step's objective over them."""
    needs = algorithm.reads if needs is None else needs
    whole = pack.build(samples, pack.count(samples), needs=tuple(needs), dtype=torch.float64)
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
