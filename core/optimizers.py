"""Optimizers as pairs of pure functions over mappings of tensors.

`init(params) -> state` and `update(grads, state, params, rate, donate) -> (params, state)`. With `donate` the
memory of the old parameters and state is used for the new ones, as in JAX: the arguments must not be used
again. Results are the same to the bit.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from jaxtyping import Float
from torch import Tensor

from core import ports, precision, record

Params = ports.Params
Norm = Callable[[Params], Tensor]


@record.record
class Moments:
    """What AdamW remembers.

    Attributes:
        first: running mean of each gradient.
        second: running mean of its square.
        count: updates done, one number a parameter: the fused kernel wants it so.
    """

    first: Mapping[str, Tensor]
    second: Mapping[str, Tensor]
    count: Mapping[str, Tensor]


@record.record
class Mastered:
    """What `with_masters` remembers.

    Attributes:
        masters: float32 copies of the parameters that are narrower; the truth, of which these are roundings.
        rule: what the rule itself remembers.
    """

    masters: Mapping[str, Tensor]
    rule: record.Any


@runtime_checkable
class Update(Protocol):
    """Gradients and the old state in, the new parameters and state out."""

    def __call__(
        self,
        grads: Params,
        state: record.Any,
        params: Params,
        *,
        rate: float,
        donate: bool = False,
        norm: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], record.Any]:
        """Make one update at learning rate `rate`; `norm` is that of the gradients, where it is known."""
        ...


@attrs.frozen(kw_only=True)
class Optimizer:
    """An update rule and the learning rate it is used at.

    Attributes:
        init: parameters to the state before the first update.
        update: see `Update`.
        rate: updates done so far to the learning rate of the next one.
        norm: measures gradients, before they are clipped.
    """

    init: Callable[[Params], record.Any]
    update: Update
    rate: Callable[[int], float]
    norm: Norm


def global_norm(grads: Params) -> Float[Tensor, ""]:
    """Return the Euclidean norm of all gradients taken as one vector, in float32 or better."""
    norms = torch._foreach_norm([precision.widened(g) for g in grads.values()])
    return torch.linalg.vector_norm(torch.stack(list(norms)))


def clip_by_global_norm(update: Update, *, max_norm: float, norm: Norm = global_norm) -> Update:
    """Scale all gradients down together when their norm exceeds `max_norm`, then update.

        g <- g min(1, max_norm / (|g| + 1e-6))

    Pascanu et al. 2013 (arXiv:1211.5063), sec. 3.2, with the guard that torch.nn.utils.clip_grad_norm_ uses.

    Args:
        update: what sees the clipped gradients.
        max_norm: in the unit of the gradients; 0: no clipping.
        norm: of all gradients, where an update is not told it; another one where each process holds a part.
    """
    measure = norm
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm}; a number of at least 0 is wanted, 0 for no clipping.")
    if max_norm == 0:
        return update

    def clipped(
        grads: Params,
        state: record.Any,
        params: Params,
        *,
        rate: float,
        donate: bool = False,
        norm: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], record.Any]:
        scale = (max_norm / ((measure(grads) if norm is None else norm) + 1e-6)).clamp(max=1.0)
        scaled = torch._foreach_mul(list(grads.values()), scale)
        return update(dict(zip(grads, scaled, strict=True)), state, params, rate=rate, donate=donate)

    return clipped


def adamw(
    *,
    rate: Callable[[int], float],
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    max_norm: float = 0.0,
    norm: Norm = global_norm,
) -> Optimizer:
    """Adam with decoupled weight decay, which spares norms and biases: parameters of fewer than two axes.

        m <- b1 m + (1 - b1) g              v <- b2 v + (1 - b2) g^2
        p <- p (1 - rate decay) - rate (m / (1 - b1^k)) / (sqrt(v / (1 - b2^k)) + eps)

    Loshchilov & Hutter 2019 (arXiv:1711.05101), algorithm 2.

    Args:
        rate: updates done so far to the learning rate.
        beta1, beta2: decay of the running means, in [0, 1).
        epsilon: added to the denominator.
        weight_decay: fraction of a parameter that is taken off at learning rate 1.
        max_norm, norm: see `clip_by_global_norm`; 0: no clipping.
    """
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= value < 1.0:
            raise ValueError(f"adamw: {name} is {value}; a number from 0 up to but not 1 is wanted.")
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"adamw: epsilon is {epsilon}; a number above 0 is wanted: gradients can be all 0.")
    if not 0.0 <= weight_decay < math.inf:
        raise ValueError(f"adamw: weight_decay is {weight_decay}; a number of at least 0 is wanted.")

    def update(
        grads: Params,
        state: Moments,
        params: Params,
        *,
        rate: float,
        donate: bool = False,
        norm: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Moments]:
        _check_types("adamw", grads, params)
        new, moments = (
            (dict(params), state) if donate else record.tree.map(torch.clone, (dict(params), state))
        )
        numbers = {"lr": rate, "beta1": beta1, "beta2": beta2, "eps": epsilon}
        matrices = [n for n, p in new.items() if p.ndim >= 2]
        _fused(matrices, new, grads, moments, weight_decay=weight_decay, **numbers)
        _fused([n for n in new if n not in matrices], new, grads, moments, weight_decay=0.0, **numbers)
        return new, moments

    clipped = clip_by_global_norm(update, max_norm=max_norm, norm=norm)
    return Optimizer(init=_moments, update=clipped, rate=rate, norm=norm)


def sgd(
    *,
    rate: Callable[[int], float],
    max_norm: float = 0.0,
    norm: Norm = global_norm,
) -> Optimizer:
    """Plain stochastic gradient descent.

        p <- p - rate g

    Args:
        rate: updates done so far to the learning rate.
        max_norm, norm: see `clip_by_global_norm`; 0: no clipping.
    """

    def update(
        grads: Params,
        state: tuple[()],
        params: Params,
        *,
        rate: float,
        donate: bool = False,
        norm: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], tuple[()]]:
        _check_types("sgd", grads, params)
        new = params if donate else {n: p.clone() for n, p in params.items()}
        torch._foreach_add_(list(new.values()), [grads[n] for n in new], alpha=-rate)
        return dict(new), state

    clipped = clip_by_global_norm(update, max_norm=max_norm, norm=norm)
    return Optimizer(init=lambda params: (), update=clipped, rate=rate, norm=norm)


def with_masters(rule: Optimizer) -> Optimizer:
    """Update float32 copies of parameters that are narrower, and round these to the parameters.

        m <- update(m, g in float32)        p <- round(m)

    Most updates are smaller than half a step of bfloat16, which has 8 bits: added to the parameters they
    would be rounded away. Micikevicius et al. 2018 (arXiv:1710.03740), sec. 3.1. Parameters of float32 or
    better are left to the rule; where all are, this changes nothing, the state's structure included.

    Args:
        rule: what updates the copies.
    """

    def init(params: Params) -> record.Any:
        masters = {n: precision.widened(p) for n, p in params.items() if precision.wide(p.dtype) != p.dtype}
        if not masters:
            return rule.init(params)
        return Mastered(masters=masters, rule=rule.init({**params, **masters}))

    def update(
        grads: Params,
        state: record.Any,
        params: Params,
        *,
        rate: float,
        donate: bool = False,
        norm: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], record.Any]:
        if not isinstance(state, Mastered):
            return rule.update(grads, state, params, rate=rate, donate=donate, norm=norm)
        grads = {n: precision.widened(g) for n, g in grads.items()}
        wide = {n: state.masters.get(n, p) for n, p in params.items()}
        new, remembered = rule.update(grads, state.rule, wide, rate=rate, donate=donate, norm=norm)
        masters = {n: new[n] for n in state.masters}
        rounded = {n: params[n] if donate else torch.empty_like(params[n]) for n in masters}
        torch._foreach_copy_(list(rounded.values()), list(masters.values()))
        return {**new, **rounded}, Mastered(masters=masters, rule=remembered)

    return attrs.evolve(rule, init=init, update=update)


def _fused(names: Sequence[str], new: Params, grads: Params, moments: Moments, **numbers: float) -> None:
    """Update some parameters and their moments, whose memory is ours."""
    if not names:
        return
    counts = [moments.count[n] for n in names]
    torch._foreach_add_(counts, 1.0)
    written = [group[n] for group in (new, moments.first, moments.second) for n in names]
    flat = [t.contiguous() for t in written]  # the kernel walks memory, however the axes lie in it
    given = [grads[n].contiguous() for n in names]
    size = len(names)
    how: dict[str, Any] = {"amsgrad": False, "maximize": False, **numbers}
    torch._fused_adamw_(flat[:size], given, flat[size:-size], flat[-size:], [], counts, **how)
    for tensor, found in zip(written, flat, strict=True):
        if found is not tensor:
            tensor.copy_(found)


def _check_types(rule: str, grads: Params, params: Params) -> None:
    """Refuse gradients of another dtype than their parameters': steps would be rounded away, or not taken."""
    odd = next((n for n in params if grads[n].dtype != params[n].dtype), None)
    if odd is not None:
        raise ValueError(
            f"{rule}: {odd} is {params[odd].dtype} and its gradient {grads[odd].dtype}; wrap the optimizer "
            "in with_masters, which updates in float32."
        )


def _moments(params: Params) -> Moments:
    """Return the moments before the first update."""

    def zeros() -> dict[str, Tensor]:
        return {n: torch.zeros_like(p, memory_format=torch.preserve_format) for n, p in params.items()}

    counts = {n: torch.zeros((), dtype=torch.float32, device=p.device) for n, p in params.items()}
    return Moments(first=zeros(), second=zeros(), count=counts)
