"""The few verbs that everything is composed from: loss_and_grad, update, train_step.

The shell calls these functions and no others; a loop composed by hand gives the same numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from jaxtyping import Float
from torch import Tensor

from core import algorithms, keys, metrics, optimizers, pack, ports, precision, record

Metrics = metrics.Metrics


@record.record
class TrainState:
    """All that a run carries from one step to the next; frozen weights are not part of it.

    Attributes:
        params: the trained parameters by name.
        optimizer: what the optimizer remembers.
        carry: what the algorithm remembers.
        step: updates done.
        key: root of every random draw of the run.
        place: where in the data the next step begins.
    """

    params: Mapping[str, Tensor]
    optimizer: Any
    carry: Mapping[str, float]
    step: int = record.static(default=0)
    key: int = record.static(default=0)
    place: int | tuple[int, ...] = record.static(default=0)


def init(
    params: ports.Params,
    optimizer: optimizers.Optimizer,
    algorithm: algorithms.Algorithm,
    *,
    key: int,
    place: int | tuple[int, ...] = 0,
) -> TrainState:
    """Make the state before the first step."""
    return TrainState(
        params=dict(params),
        optimizer=optimizer.init(params),
        carry=dict(algorithm.carry),
        key=key,
        place=place,
    )


def objective(
    algorithm: algorithms.Algorithm, batch: pack.Batch, carry: Mapping[str, float]
) -> Callable[[pack.Scores], tuple[Float[Tensor, ""], Metrics]]:
    """Close the loss over one batch: scores in, its part of the step's scalar and its metrics out.

    Raises:
        ValueError: labels of single answers are other numbers than 1 and 0; when called, if the loss returned
            anything but values on an axis of the batch and metrics, or lets no gradient through.
    """
    if algorithm.rows == "unpaired":
        _check_labels(batch.samples.columns)

    def loss(scores: pack.Scores) -> tuple[Float[Tensor, ""], Metrics]:
        values, watched = _returned(algorithm.loss(scores, batch, **carry), batch)
        value = algorithm.reduce(values, batch)
        flows = torch.is_grad_enabled() and any(field.requires_grad for field in record.tree.leaves(scores))
        if flows and len(scores.logprobs):
            _check_flows(values, value)
        return value, metrics.collect(watched)

    return loss


def _check_flows(values: Tensor, value: Tensor) -> None:
    """Refuse a loss that hangs on no score: nothing would be trained."""
    if not value.requires_grad:
        where = "the loss returned values" if not values.requires_grad else "reduce returned a number"
        raise ValueError(
            f"{where} that no gradient flows from to the scores, so nothing would be trained; one that hangs "
            "on them was wanted: look for a detach, a no_grad, an item or a comparison."
        )


def _check_labels(columns: Mapping[str, Tensor]) -> None:
    """Refuse labels that are neither 1 nor 0: a loss weighs by them, and -1 would train without a word."""
    for name in ("label", "mismatched"):
        values = columns.get(name)
        if values is not None and not bool(((values == 0) | (values == 1)).all()):
            odd = [(i, value) for i, value in enumerate(values.tolist()) if value not in (0, 1)]
            raise ValueError(
                f"sample {odd[0][0]} of the batch has {name} {odd[0][1]:g}; 1 (yes) or 0 (no) is wanted."
            )


def _returned(found: Any, batch: pack.Batch) -> tuple[Tensor, Mapping[str, Any]]:
    """Return what a loss returned, or say what was wanted: a single number would be spread over all rows."""
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor)):
        raise ValueError(f"the loss returned {type(found).__name__}; a tuple (values, metrics) was wanted.")
    values, watched = found
    sizes = {
        "term": len(batch.terms.sample),
        "sample": len(batch.samples.group),
        "pair": len(batch.pairs.chosen),
    }
    if values.ndim != 1 or len(values) not in sizes.values():
        wanted = ", ".join(f"{size} (one a {axis})" for axis, size in sizes.items())
        raise ValueError(
            f"the loss returned values of shape {tuple(values.shape)}; one axis of {wanted} was wanted. "
            "Leave sums and means to the algorithm's reduce."
        )
    return values, watched


def loss_and_grad(
    model: ports.Model,
    algorithm: algorithms.Algorithm,
    params: ports.Params,
    packs: Sequence[pack.Pack],
    key: int,
    *,
    carry: Mapping[str, float] | None = None,
    ranks: ports.Ranks = ports.ALONE,
) -> tuple[Float[Tensor, ""], Metrics, dict[str, Tensor]]:
    """Return the loss of a step, its metrics, and the gradient for every parameter.

    Units are never split over packs and the reduction divides by the totals of the step, so the sum over
    packs is the gradient of the whole step, whatever the packs. It is float32 or better, whatever the
    parameters: bfloat16 would round the sums.

    Args:
        model: scores packs and pulls gradients back.
        algorithm: what is minimized.
        params: the trained parameters by name.
        packs: all of this rank's; at least one, an empty one where a rank has no work.
        key: names the draws of this step.
        carry: what the algorithm remembers; None: what it starts with.
        ranks: adds up over ranks.
    """
    carry = algorithm.carry if carry is None else carry
    value, gathered, grads = None, {}, {}
    for i, each in enumerate(packs):
        loss = objective(algorithm, each.batch, carry)
        told = _sloped(each, loss) if algorithm.linear else each
        draws = keys.fold_in(key, "rank", ranks.index, "pack", i)
        part, means, grad = model.pull_back(params, told, draws, loss)
        value = part if value is None else value + part
        gathered = metrics.merge(gathered, means)
        grads = _add(grads, grad)
        del grad  # the next pack's would stand beside it
    return ranks.sum(value), ranks.merge(gathered), grads if ranks.split else ranks.sum(grads)


def with_reference(
    model: ports.Model,
    algorithm: algorithms.Algorithm,
    params: ports.Params | None,
    packs: Sequence[pack.Pack],
) -> list[pack.Pack]:
    """Return packs with the column `reference_logprobs`, where the algorithm needs it and it is not there.

    They come from the same packs by the same functions as the policy's, so a policy that equals its reference
    has log-ratios of exactly 0. Nothing is drawn.

    Args:
        model: scores packs.
        algorithm: what is minimized.
        params: of the reference, frozen; None where the algorithm needs none.
        packs: all of this rank's.

    Raises:
        ValueError: the algorithm needs a reference, and none came.
    """
    there = all("reference_logprobs" in each.batch.terms.columns for each in packs)
    if "reference_logprobs" not in algorithm.needs or there:
        return list(packs)
    if params is None:
        raise ValueError(
            "the algorithm needs reference_logprobs, and no parameters of a reference came; pass those that "
            "the policy starts from."
        )
    plain = (attrs.evolve(each, needs=()) for each in packs)
    found = [model.predict(params, each, None).logprobs for each in plain]
    return [
        pack.with_column(each, "reference_logprobs", values)
        for each, values in zip(packs, found, strict=True)
    ]


def synced(
    reference: ports.Params, params: ports.Params, *, alpha: float, donate: bool = False
) -> dict[str, Tensor]:
    """Move a reference towards the policy.

        reference' = alpha params + (1 - alpha) reference

    TR-DPO, Gorbatovski et al. 2024 (arXiv:2404.09656), the soft update; with alpha 1 the hard one.

    Args:
        reference: its parameters, in float32 or better; with `donate` they must not be used again.
        params: of the policy, under the same names.
        alpha: in [0, 1].
        donate: use the old reference's memory for the new one.

    Raises:
        ValueError: alpha is none, or one below 1 comes with parameters narrower than float32.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha is {alpha}; a number in [0, 1] is wanted: the part that the policy has.")
    narrow = [n for n, p in reference.items() if p.dtype != precision.wide(p.dtype)]
    if narrow and alpha < 1.0:
        raise ValueError(
            f"reference {narrow[0]} is {reference[narrow[0]].dtype}, which rounds small moves away; hold it "
            "in float32, as in {n: precision.widened(p) for n, p in reference.items()}."
        )
    new = dict(reference) if donate else {n: p.clone() for n, p in reference.items()}
    with torch.no_grad():
        torch._foreach_lerp_(list(new.values()), [params[n].to(p.dtype) for n, p in new.items()], alpha)
    return new


def evaluate(
    model: ports.Model,
    algorithm: algorithms.Algorithm,
    params: ports.Params,
    packs: Sequence[pack.Pack],
    *,
    carry: Mapping[str, float] | None = None,
    ranks: ports.Ranks = ports.ALONE,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Return the loss and the metrics of `loss_and_grad`, from the same functions; nothing is drawn."""
    carry = algorithm.carry if carry is None else carry
    value, gathered = None, {}
    for each in packs:
        scores = model.predict(params, each, None)
        part, means = objective(algorithm, each.batch, carry)(scores)
        value = part if value is None else value + part
        gathered = metrics.merge(gathered, means)
    return ranks.sum(value), ranks.merge(gathered)


def update(
    optimizer: optimizers.Optimizer,
    state: TrainState,
    grads: ports.Params,
    *,
    donate: bool = False,
    norm: Float[Tensor, ""] | None = None,
) -> TrainState:
    """Make one update of the parameters.

    Args:
        optimizer: the rule and its learning rate.
        state: before the update; with `donate` it must not be used again.
        grads: one for every parameter.
        donate: use the old state's memory for the new one.
        norm: of the gradients, by `optimizer.norm`; None: measured where it is needed.
    """
    rate = optimizer.rate(state.step)
    if not math.isfinite(rate):
        raise ValueError(f"the learning rate of update {state.step} is {rate}; a finite number is wanted.")
    params, remembered = optimizer.update(
        grads, state.optimizer, state.params, rate=rate, donate=donate, norm=norm
    )
    return attrs.evolve(state, params=params, optimizer=remembered, step=state.step + 1)


def train_step(
    model: ports.Model,
    algorithm: algorithms.Algorithm,
    optimizer: optimizers.Optimizer,
    state: TrainState,
    packs: Sequence[pack.Pack],
    *,
    donate: bool = False,
    ranks: ports.Ranks = ports.ALONE,
) -> tuple[TrainState, Metrics]:
    """Run `loss_and_grad`, then `update`, then the algorithm's `next_carry`.

    Args:
        model, algorithm, optimizer: what is trained and how.
        state: before the step.
        packs: all of this rank's.
        donate: see `update`.
        ranks: see `loss_and_grad`.

    Returns:
        The state after the step and its metrics, `loss` and `grad_norm` among them: the norm before clipping.
    """
    if not packs:
        raise ValueError(
            "no packs came; at least one is wanted: pack.build([], pack.count(samples)) trains nothing."
        )
    key = keys.fold_in(state.key, "step", state.step)
    value, means, grads = loss_and_grad(
        model, algorithm, state.params, packs, key, carry=state.carry, ranks=ranks
    )
    terms, norm = packs[0].batch.totals.terms, optimizer.norm(grads)
    means = {
        **means,
        "loss": metrics.whole(value, terms),
        **metrics.collect({"grad_norm": norm}),
    }
    carry = state.carry
    if algorithm.next_carry is not None:
        # Before the update: what a caller's function raises must find the old state whole, donated or not.
        carry = algorithm.next_carry(carry, metrics.values(means))
    return attrs.evolve(update(optimizer, state, grads, donate=donate, norm=norm), carry=carry), means


def _sloped(each: pack.Pack, loss: ports.Loss) -> pack.Pack:
    """Write the gradient of a linear loss into a pack: at zero it is what it is anywhere."""
    dtype = each.batch.totals.terms.dtype
    edges = torch.zeros(len(each.edge_nodes), dtype=dtype, device=each.tokens.device, requires_grad=True)
    with torch.enable_grad():
        value, _ = loss(pack.Scores(logprobs=edges.index_select(0, each.term_edges)))
        slopes = torch.autograd.grad(value, edges)[0] if len(edges) else edges.detach()
    return attrs.evolve(each, slopes=slopes)


def _add(sums: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add gradients, in float32 or better, into the sums, whose memory is ours."""
    more = {n: precision.widened(g) for n, g in more.items()}
    if not sums:
        return more
    torch._foreach_add_([sums[n] for n in sums], [more[n] for n in sums])
    return sums
