"""The few lengths that a compiler will see: which sizes to pad to, by what steps and compilations cost."""

import math
from collections.abc import Callable, Collection, Sequence

import attrs
import numpy as np
from jaxtyping import Bool, Float64, Int64, Integer

# What sizes are multiples of: one number; (a number up to a size, and that size beyond it); or a function
# of a length.
Multiple = int | tuple[int, int] | Callable[[int], int]
DEVICE_MULTIPLE = (128, 512)


@attrs.frozen(kw_only=True)
class PaddingPlan:
    """Sizes to pad to.

    Attributes:
        sizes: the sizes, rising.
        new: those of them that have to be compiled, rising.
        step_cost: what all steps of the planned lengths cost together, in the unit of the prices.
        compile_cost: what compiling the new sizes costs, in the same unit.
        pad_share: padding / (lengths + padding).
    """

    sizes: tuple[int, ...]
    new: tuple[int, ...]
    step_cost: float
    compile_cost: float
    pad_share: float


def plan(
    lengths: Sequence[int] | Integer[np.ndarray, " steps"],
    *,
    step_cost: Callable[[int], float],
    compile_cost: float,
    multiple: Multiple = DEVICE_MULTIPLE,
    max_shapes: int | None = None,
    cached: Collection[int] = (),
) -> PaddingPlan:
    """Choose the sizes with the least total cost, exactly.

        minimize  sum_i step_cost(size(n_i)) + compile_cost |new sizes|,    size(n) = the least size >= n

    Some best plan uses only rounded lengths and cached sizes, so with candidates c_1 < ... < c_m and
    `cost(i, j)` of padding all lengths in (c_i, c_j] to c_j, `best_k(j) = min over i of best_{k-1}(i) +
    cost(i, j)`: O(m^2) for each size used.

    Args:
        lengths: the length of every step to come, each at least 1.
        step_cost: what a step at a size costs; must not fall as the size grows.
        compile_cost: what a size that is not cached costs once, in the same unit.
        multiple: what sizes are multiples of: a number, (up to a size, beyond that size), or a function of
            a length.
        max_shapes: most sizes used, cached ones included; None: as many as pay.
        cached: sizes that are compiled already.

    Returns:
        The plan; of equally good ones, one with the fewest sizes.

    Raises:
        ValueError: there are no lengths, or a length or `max_shapes` is below 1.
    """
    rows = np.sort(np.asarray(lengths, np.int64))
    if not len(rows) or rows[0] < 1:
        raise ValueError(
            f"{len(rows)} lengths came, the least {min(lengths, default=None)}; one of 1 or more is wanted."
        )
    if max_shapes is not None and max_shapes < 1:
        raise ValueError(f"max_shapes is {max_shapes}; at least 1 is wanted.")
    needed = {rounded(int(n), multiple) for n in np.unique(rows)}
    candidates = np.array(sorted(needed | {int(size) for size in cached}), np.int64)
    fresh = np.array([size not in cached for size in candidates.tolist()])
    prices = np.array([step_cost(size) for size in candidates.tolist()], np.float64)
    counts = np.concatenate([[0], np.searchsorted(rows, candidates, side="right")])
    chosen = _cheapest(counts, prices, float(compile_cost) * fresh, max_shapes or len(candidates))
    sizes = tuple(candidates[chosen].tolist())
    padded = np.array(sizes)[np.searchsorted(sizes, rows)]
    new = tuple(size for size in sizes if size not in cached)
    return PaddingPlan(
        sizes=sizes,
        new=new,
        step_cost=float(sum(step_cost(size) * int((padded == size).sum()) for size in sizes)),
        compile_cost=compile_cost * len(new),
        pad_share=1 - float(rows.sum() / padded.sum()),
    )


def _cheapest(
    counts: Int64[np.ndarray, " borders"],
    prices: Float64[np.ndarray, " candidates"],
    compiles: Float64[np.ndarray, " candidates"],
    most: int,
) -> list[int]:
    """Return the indices of the best candidates.

    Args:
        counts: lengths up to each candidate, behind a leading zero.
        prices: what a step at each candidate costs.
        compiles: what each candidate costs once.
        most: most candidates to take.
    """
    size = len(prices)
    between = (counts[None, 1:] - counts[:, None]) * prices + compiles
    between[np.arange(size + 1)[:, None] > np.arange(size)] = np.inf
    best = np.full(size + 1, np.inf)
    best[0] = 0.0
    layers: list[tuple[Bool[np.ndarray, " candidates"], Int64[np.ndarray, " candidates"]]] = []
    while len(layers) < most:
        total = best[:, None] + between
        back = total.argmin(0)
        reached = total[back, np.arange(size)]
        better = reached < best[1:]
        layers.append((better, back))
        best[1:] = np.minimum(best[1:], reached)
        if not better.any():
            break
    whole = np.flatnonzero(counts[1:] == counts[-1])
    at = int(whole[best[1 + whole].argmin()]) + 1
    chosen = []
    for better, back in reversed(layers):
        if at and better[at - 1]:
            chosen.append(at - 1)
            at = int(back[at - 1])
    return [
        j for i, j in zip([-1, *chosen[:0:-1]], chosen[::-1], strict=True) if counts[j + 1] > counts[i + 1]
    ]


def rounded(length: int, multiple: Multiple = DEVICE_MULTIPLE) -> int:
    """Return the least allowed size that holds a length."""
    if callable(multiple):
        return multiple(length)
    small, large = (multiple, multiple) if isinstance(multiple, int) else multiple
    step = small if length <= large else large
    return -(-length // step) * step


def size(plan: PaddingPlan, length: int) -> int:
    """Return the planned size that a length is padded to.

    Raises:
        ValueError: the length is larger than every size of the plan.
    """
    for one in plan.sizes:
        if one >= length:
            return one
    raise ValueError(
        f"a length of {length} came; the padding plan's largest size is {plan.sizes[-1]}. "
        "Plan with all lengths, or cut the pack into pieces of at most that size."
    )


def ladder(max_length: int, *, multiple: Multiple = DEVICE_MULTIPLE, growth: float = 1.5) -> tuple[int, ...]:
    """Return sizes for lengths that are not known yet: powers of `growth` from the least size on, rounded up.

    Args:
        max_length: the largest length that can come.
        multiple: what sizes are multiples of, as in `plan`.
        growth: ratio of neighbors before they are rounded, above 1.

    Returns:
        Rising sizes, the last one holding max_length.
    """
    last = rounded(max_length, multiple)
    exact = float(rounded(1, multiple))
    sizes = [min(int(exact), last)]
    while sizes[-1] < last:
        exact *= growth
        step = min(last, rounded(math.ceil(exact), multiple))
        if step > sizes[-1]:
            sizes.append(step)
    return tuple(sizes)
