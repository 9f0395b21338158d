"""Advantages: how much better a sample did than others of its group, once a step, before anything is packed.

Every function takes the rewards of the whole step, so a group that later spans two packs or ranks is still
one group. A reward of NaN stands for no reward: every function abstained, or the sample was masked
(`leave_out`). Such a sample leaves the mean and the deviation of the others, and its advantage is 0.

Sums run in float64, the deviation by the two-pass formula: E[x^2] - E[x]^2 leaves a residue of rounding that
a division blows up. A group whose rewards are equal gives exactly 0. What comes back is in float32 or better.

Axes: samples, functions (reward functions).
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from core import precision

EPSILON = 1e-4


def group_normalized(
    rewards: Float[Tensor, " samples"], groups: Int[Tensor, " samples"]
) -> Float[Tensor, " samples"]:
    """Center rewards in their group and divide by the group's standard deviation.

        A = (R - mean_group(R)) / (std_group(R) + 1e-4)

    Shao et al. 2024 (arXiv:2402.03300), sec. 4.1.2; the deviation has Bessel's correction.

    >>> group_normalized(torch.tensor([0.0, 1.0, 10.0, 12.0]), torch.tensor([0, 0, 1, 1]))
    tensor([-0.7070,  0.7070, -0.7071,  0.7071])

    Args:
        rewards: any unit; NaN for none.
        groups: which prompt each sample answers.

    Raises:
        ValueError: a group of one, or an infinite reward.
    """
    _refuse_groups_of_one(rewards, groups)
    return _scaled(rewards, groups, lambda wide: _deviations(wide, groups))


def batch_normalized(
    rewards: Float[Tensor, " samples"], groups: Int[Tensor, " samples"]
) -> Float[Tensor, " samples"]:
    """Center rewards in their group and divide by the standard deviation of all rewards of the step.

        A = (R - mean_group(R)) / (std_step(R) + 1e-4)

    Liu et al. 2025, "Part I: Tricks or Traps" (arXiv:2508.08221).

    Args:
        rewards: any unit; NaN for none.
        groups: which prompt each sample answers.

    Raises:
        ValueError: a group of one, or an infinite reward.
    """
    _refuse_groups_of_one(rewards, groups)
    return _scaled(rewards, groups, lambda wide: _deviations(wide, torch.zeros_like(groups)))


def centered(
    rewards: Float[Tensor, " samples"], groups: Int[Tensor, " samples"]
) -> Float[Tensor, " samples"]:
    """Center rewards in their group and divide by nothing; a group of one gives 0.

        A = R - mean_group(R)

    Liu et al. 2025, Dr. GRPO (arXiv:2503.20783), sec. 3.2.

    >>> centered(torch.tensor([0.0, 1.0, 10.0, 12.0]), torch.tensor([0, 0, 1, 1]))
    tensor([-0.5000,  0.5000, -1.0000,  1.0000])

    Args:
        rewards: any unit; NaN for none.
        groups: which prompt each sample answers.

    Raises:
        ValueError: an infinite reward.
    """
    _check(rewards, groups)
    return _scaled(rewards, groups, None)


def group_mean(
    rewards: Float[Tensor, " samples"], groups: Int[Tensor, " samples"]
) -> Float[Tensor, " samples"]:
    """Return each sample's group mean, 0 where nobody in the group has a reward.

    Args:
        rewards: any unit; NaN for none.
        groups: which prompt each sample answers.

    Raises:
        ValueError: an infinite reward.
    """
    _check(rewards, groups)
    return _given_back(_means(_wide(rewards), groups), rewards)


def leave_one_out(
    rewards: Float[Tensor, " samples"], groups: Int[Tensor, " samples"]
) -> Float[Tensor, " samples"]:
    """Compare each reward with the mean of the others of its group.

        A_i = R_i - sum_{j != i} R_j / (K - 1)

    Ahmadian et al. 2024, RLOO (arXiv:2402.14740). A sample whose others all have no reward gets 0.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0]))
    tensor([ 0.6667, -0.6667, -0.6667,  0.6667])

    Args:
        rewards: any unit; NaN for none.
        groups: which prompt each sample answers.

    Raises:
        ValueError: a group of one, or an infinite reward.
    """
    _refuse_groups_of_one(rewards, groups)
    wide = _wide(rewards)
    count = _sums((~wide.isnan()).to(wide.dtype), groups)
    # R_i - (S - R_i) / (K - 1) = (R_i - mean) K / (K - 1): equal rewards give 0 without a remainder.
    gain = torch.where(count > 1, count / (count - 1).clamp(min=1.0), 0.0)
    return _given_back((_centered(wide, groups) * gain).nan_to_num(nan=0.0), rewards)


def normalize_then_sum(
    rewards: Float[Tensor, "samples functions"],
    groups: Int[Tensor, " samples"],
    *,
    weights: Sequence[float] | None = None,
) -> Float[Tensor, " samples"]:
    """Normalize each reward function in its group, add the weighted scores up, normalize over the step.

        s = sum_k w_k (R_k - mean_group(R_k)) / (std_group(R_k) + 1e-4)
        A = (s - mean_step(s)) / (std_step(s) + 1e-4)

    Liu et al. 2026, GDPO (arXiv:2601.05242), sec. 3: rewards that are added first can no longer be told
    apart.

    Args:
        rewards: of each function, any unit; NaN where it has none for the sample.
        groups: which prompt each sample answers.
        weights: of the functions; None: 1 each.

    Raises:
        ValueError: a group of one, an infinite reward, or weights that are not one a function.
    """
    _refuse_groups_of_one(rewards, groups, axes=2)
    scores = [_standardized(_wide(column), groups) for column in rewards.unbind(1)]
    return _given_back(standardized(weighted_sum(torch.stack(scores, 1), weights=weights)), rewards)


def weighted_sum(
    rewards: Float[Tensor, "samples functions"], *, weights: Sequence[float] | None = None
) -> Float[Tensor, " samples"]:
    """Add the rewards of several functions up; one without a reward for a sample is left out of its sum.

        R = sum_k w_k R_k over the functions with a reward; NaN where none has one

    >>> weighted_sum(torch.tensor([[1.0, torch.nan], [torch.nan, 2.0], [torch.nan, torch.nan]]))
    tensor([1., 2., nan])

    Args:
        rewards: of each function; NaN where it has none for the sample.
        weights: of the functions; None: 1 each.

    Raises:
        ValueError: weights that are not one a function.
    """
    _check(rewards, None, axes=2)
    num_functions = rewards.shape[1]
    given = [1.0] * num_functions if weights is None else list(weights)
    if len(given) != num_functions:
        raise ValueError(
            f"weights: {len(given)} came for {num_functions} reward functions; give one for each."
        )
    total = (rewards.double() * torch.tensor(given, dtype=torch.float64, device=rewards.device)).nansum(1)
    return _given_back(total.where(~rewards.isnan().all(1), torch.nan), rewards)


def standardized(values: Float[Tensor, " samples"]) -> Float[Tensor, " samples"]:
    """Bring advantages of the whole step to mean 0 and deviation 1; NaN gives 0, as do equal values.

        A' = (A - mean_step(A)) / (std_step(A) + 1e-4)

    Args:
        values: any unit; NaN for none.

    Raises:
        ValueError: an infinite value.
    """
    _check(values, None)
    everybody = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    return _given_back(_standardized(_wide(values), everybody).nan_to_num(nan=0.0), values)


def leave_out(
    rewards: Float[Tensor, " samples"], kept: Bool[Tensor, " samples"]
) -> Float[Tensor, " samples"]:
    """Take the reward from samples that the loss will not see: they leave the others' baseline.

    Args:
        rewards: any unit.
        kept: False where the sample is masked out of the loss: cut off, or its reward suppressed.
    """
    return rewards.where(kept, torch.nan)


def penalized(
    rewards: Float[Tensor, " samples"],
    divergences: Float[Tensor, " samples"],
    *,
    beta: float = 0.05,
    low: float = -torch.inf,
    high: float = torch.inf,
) -> Float[Tensor, " samples"]:
    """Clip rewards, then subtract a divergence from the reference.

        R' = clip(R, low, high) - beta KL

    Ahmadian et al. 2024, RLOO (arXiv:2402.14740), with the divergence of the whole answer.

    Args:
        rewards: any unit; NaN for none.
        divergences: in nats, each sample's sum of `kl.k1` over its trained tokens, under the policy that
            wrote it.
        beta: reward a nat.
        low, high: bounds of the reward.
    """
    return rewards.clamp(low, high) - beta * divergences


def without_variance(
    rewards: Float[Tensor, " samples"], groups: Int[Tensor, " samples"]
) -> Bool[Tensor, " samples"]:
    """Say whose group has equal rewards, so that its advantages are 0 and it teaches nothing.

    Args:
        rewards: any unit; NaN for none: a group with at most one reward is without variance.
        groups: which prompt each sample answers.

    Raises:
        ValueError: an infinite reward.
    """
    _check(rewards, groups)
    return _equal(_wide(rewards), groups)


def _scaled(rewards: Tensor, groups: Tensor, deviations: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Center in the group, divide by a deviation if there is one, give 0 to who has no reward."""
    wide = _wide(rewards)
    above = _centered(wide, groups)
    scaled = above if deviations is None else above / (deviations(wide) + EPSILON)
    return _given_back(scaled.nan_to_num(nan=0.0), rewards)


def _standardized(wide: Tensor, groups: Tensor) -> Tensor:
    """Center and scale in the group; NaN stays."""
    return _centered(wide, groups) / (_deviations(wide, groups) + EPSILON)


def _centered(wide: Tensor, groups: Tensor) -> Tensor:
    """Subtract the group's mean, exactly 0 where all rewards of the group are equal; NaN stays."""
    above = wide - _means(wide, groups)
    return torch.where(_equal(wide, groups) & ~wide.isnan(), 0.0, above)


def _deviations(wide: Tensor, groups: Tensor) -> Tensor:
    """Return each sample's group standard deviation, by squares of the differences from the mean."""
    squares = (wide - _means(wide, groups)).square().nan_to_num(nan=0.0)
    count = _sums((~wide.isnan()).to(wide.dtype), groups)
    return (_sums(squares, groups) / (count - 1).clamp(min=1.0)).sqrt()


def _means(wide: Tensor, groups: Tensor) -> Tensor:
    """Return each sample's group mean over those with a reward, 0 for none."""
    count = _sums((~wide.isnan()).to(wide.dtype), groups)
    return _sums(wide.nan_to_num(nan=0.0), groups) / count.clamp(min=1.0)


def _sums(wide: Tensor, groups: Tensor) -> Tensor:
    """Return each sample's group sum."""
    names, index = groups.unique(return_inverse=True)
    return wide.new_zeros(len(names)).index_add(0, index, wide).index_select(0, index)


def _equal(wide: Tensor, groups: Tensor) -> Tensor:
    """Whether the rewards of each sample's group are all the same number."""
    names, index = groups.unique(return_inverse=True)
    seen = ~wide.isnan()
    bounds = [
        wide.new_full((len(names),), -way * torch.inf).scatter_reduce(0, index[seen], wide[seen], reduce)
        for way, reduce in ((1, "amax"), (-1, "amin"))
    ]
    return (bounds[0] <= bounds[1]).index_select(0, index)


def _wide(rewards: Tensor) -> Tensor:
    """Return rewards in float64, having refused those that are infinite."""
    if rewards.isinf().any():
        first = int(rewards.isinf().nonzero()[0])
        raise ValueError(
            f"sample {first} has a reward of {rewards[first].item()}; a finite number was wanted, or NaN for "
            "none: mend the reward function."
        )
    return rewards.double()


def _given_back(wide: Tensor, rewards: Tensor) -> Tensor:
    """Return numbers in the rewards' dtype, or in float32 where that is narrower: differences overflow it."""
    return wide.to(precision.wide(rewards.dtype))


def _check(rewards: Tensor, groups: Tensor | None, *, axes: int = 1) -> None:
    """Refuse what is no table of rewards, or groups that do not line up with it."""
    for name, values in (("rewards", rewards), ("groups", groups)):
        if not (isinstance(values, Tensor) or values is None):
            raise ValueError(
                f"{name} are a {type(values).__name__}; a tensor is wanted: torch.tensor({name})."
            )
    if not rewards.is_floating_point() or rewards.ndim != axes:
        wanted = "[samples]" if axes == 1 else "[samples, functions]"
        raise ValueError(
            f"rewards are {rewards.dtype} {list(rewards.shape)}; floating point {wanted} is wanted."
        )
    if groups is not None and (groups.shape != rewards.shape[:1] or groups.is_floating_point()):
        raise ValueError(
            f"groups are {groups.dtype} {list(groups.shape)} for rewards of {len(rewards)} samples; integers "
            f"[{len(rewards)}] are wanted, the group of each sample."
        )


def _refuse_groups_of_one(rewards: Tensor, groups: Tensor, *, axes: int = 1) -> None:
    """Raise when a group has nobody to be compared with."""
    _check(rewards, groups, axes=axes)
    names, sizes = groups.unique(return_counts=True)
    if bool((sizes == 1).any()):
        raise ValueError(
            f"group {names[sizes == 1][0].item()} has one sample, so there is nothing to compare it with; at "
            "least two were wanted. Raise num_generations, or use advantages.centered."
        )
