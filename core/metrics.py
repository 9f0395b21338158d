"""What is logged about a step, in forms that add up.

A metric over many packs, ranks and steps must be the same number as over all of them at once. So nothing here
is an average until it is read: a mean is a sum and a weight, both merged by addition.

`loss` shows NaN as NaN. Every other metric is over its finite values, and `nonfinite/NAME` counts the rest.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Num
from torch import Tensor

from core import precision, record

Scalar: TypeAlias = Num[Tensor, ""] | float | int

NONFINITE = "nonfinite/"


@record.record
class Mean:
    """A mean that is still a sum and a weight.

    Attributes:
        total: sum of weight times value, in the metric's unit.
        weight: sum of the weights: rows, tokens, steps. 0: nothing was seen, and the metric is left out.
    """

    total: Scalar
    weight: Scalar


@record.record
class Sum:
    """A count or an amount that adds up.

    Attributes:
        total: in the metric's unit.
    """

    total: Scalar


@record.record
class Minimum:
    """The least value seen.

    Attributes:
        value: in the metric's unit; infinity means that nothing was seen, and the metric is left out.
    """

    value: Scalar


@record.record
class Maximum:
    """The greatest value seen.

    Attributes:
        value: in the metric's unit; minus infinity means that nothing was seen, and the metric is left out.
    """

    value: Scalar


Metric: TypeAlias = Mean | Sum | Minimum | Maximum
Metrics: TypeAlias = Mapping[str, Metric]


def mean(
    values: Num[Tensor, "*rows"] | Bool[Tensor, "*rows"],
    weights: Num[Tensor, "*rows"] | Bool[Tensor, "*rows"] | None = None,
) -> Mean:
    """Return the mean of the finite values, detached.

        total = sum_{i finite} w_i v_i        weight = sum_{i finite} w_i

    >>> values({"kl": mean(torch.tensor([0.5, torch.nan, 1.0]))})
    {'kl': 0.75}

    Args:
        values: one a row, sample or pair, or a single number.
        weights: likewise, not negative; True and False are 1 and 0. None: 1 each.
    """
    rows, weight = _wide(values), _weights(values, weights)
    weight = torch.where(rows.isfinite(), weight, 0)
    return Mean(total=torch.where(weight > 0, rows * weight, 0).sum(), weight=weight.sum())


def nonfinite(
    values: Num[Tensor, "*rows"] | Bool[Tensor, "*rows"],
    weights: Num[Tensor, "*rows"] | Bool[Tensor, "*rows"] | None = None,
) -> Sum:
    """Count the NaN and infinite values at places of a weight above 0: what `mean` left out."""
    rows = _wide(values)
    return Sum(total=(~rows.isfinite() & (_weights(values, weights) > 0)).sum(dtype=rows.dtype))


def whole(value: Scalar, weight: Scalar = 1.0) -> Mean:
    """Return one number, detached, that stays NaN if it is, and stands for `weight` rows, tokens or steps.

    >>> values(merge({"loss": whole(1.0, 10)}, {"loss": whole(3.0, 30)}))
    {'loss': 2.5}
    """
    number = value.detach() if isinstance(value, Tensor) else value
    return Mean(total=number * weight, weight=weight)


def minimum(values: Num[Tensor, "*rows"], mask: Bool[Tensor, "*rows"] | None = None) -> Minimum:
    """Return the least finite value where the mask is True, detached."""
    return Minimum(value=_seen(values, mask, torch.inf).amin())


def maximum(values: Num[Tensor, "*rows"], mask: Bool[Tensor, "*rows"] | None = None) -> Maximum:
    """Return the greatest finite value where the mask is True, detached."""
    return Maximum(value=_seen(values, mask, -torch.inf).amax())


def collect(watched: Mapping[str, Any]) -> dict[str, Metric]:
    """Turn what a loss function returned as metrics into forms that add up.

    Args:
        watched: by name: values, one a row, sample or pair, or a single number, become a mean over the finite
            ones beside a count of the rest; forms that add up already pass through.

    Raises:
        ValueError: a metric is neither.
    """
    found: dict[str, Metric] = {}
    for name, value in watched.items():
        if isinstance(value, Tensor):
            found |= {name: mean(value), NONFINITE + name: nonfinite(value)}
        elif isinstance(value, Mean | Sum | Minimum | Maximum):
            found[name] = value
        else:
            raise ValueError(
                f"metric {name!r} is a {type(value).__name__}; a tensor or a form of core.metrics was "
                "wanted. A field of Scores that was not asked for is None: name it in the algorithm's needs "
                "or watches, and build packs with needs=algorithm.reads."
            )
    return found


def merge(*parts: Metrics) -> dict[str, Metric]:
    """Merge the metrics of packs, ranks or steps; a name may be missing in some.

    Raises:
        ValueError: one name stands for two forms.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _join(name, merged[name], metric) if name in merged else metric
    return merged


def host(metrics: Metrics) -> dict[str, Metric]:
    """Bring metrics to the host as Python numbers, with one wait a device: ready to be sent between ranks."""
    leaves, structure = record.tree.flatten(dict(metrics))
    numbers = [float(leaf) if not isinstance(leaf, Tensor) else torch.nan for leaf in leaves]
    places: dict[torch.device, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            places.setdefault(leaf.device, []).append(place)
    for device, group in places.items():
        # Not every accelerator has float64; on the host it keeps counts above 2 ** 24 exact.
        wide = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        row = torch.stack([leaves[place].detach().to(wide) for place in group]).tolist()
        for place, number in zip(group, row, strict=True):
            numbers[place] = number
    return dict(record.tree.unflatten(structure, numbers))


def values(metrics: Metrics) -> dict[str, float]:
    """Read the metrics: left out is what nothing was seen of, and a count of non-finite values that is 0."""
    return {
        name: number for name, metric in host(metrics).items() if (number := _read(name, metric)) is not None
    }


def _read(name: str, metric: Metric) -> float | None:
    """Return the number a metric (of Python numbers) stands for, or None if for none."""
    if isinstance(metric, Mean):
        return float(metric.total / metric.weight) if metric.weight else None
    if isinstance(metric, Sum):
        return None if name.startswith(NONFINITE) and not metric.total else float(metric.total)
    empty = torch.inf if isinstance(metric, Minimum) else -torch.inf
    return None if metric.value == empty else float(metric.value)


def _join(name: str, left: Metric, right: Metric) -> Metric:
    """Merge two metrics of one name."""
    if isinstance(left, Mean) and isinstance(right, Mean):
        return Mean(total=left.total + right.total, weight=left.weight + right.weight)
    if isinstance(left, Sum) and isinstance(right, Sum):
        return Sum(total=left.total + right.total)
    if isinstance(left, Minimum) and isinstance(right, Minimum):
        return Minimum(value=_extreme(torch.minimum, left.value, right.value))
    if isinstance(left, Maximum) and isinstance(right, Maximum):
        return Maximum(value=_extreme(torch.maximum, left.value, right.value))
    kinds = f"{type(left).__name__} and {type(right).__name__}"
    raise ValueError(f"metric {name!r} came as {kinds}; one name must be one form: rename one of them")


def _extreme(choose: Callable[[Tensor, Tensor], Tensor], left: Scalar, right: Scalar) -> Scalar:
    """Choose between two numbers, of which the host may know either."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return choose(torch.as_tensor(left), torch.as_tensor(right))
    return (min if choose is torch.minimum else max)(left, right)


def _wide(values: Tensor) -> Tensor:
    """Return the values, detached, in float32 or wider."""
    return precision.widened(values.detach())


def _weights(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return a weight for each value."""
    return torch.ones_like(_wide(values)) if weights is None else _wide(weights)


def _seen(values: Tensor, mask: Tensor | None, empty: float) -> Tensor:
    """Return the finite values where the mask is True, behind a value that loses against any."""
    rows = _wide(values).flatten()
    kept = rows.isfinite() if mask is None else rows.isfinite() & mask.flatten()
    return torch.cat([rows.new_full((1,), empty), torch.where(kept, rows, empty)])
