"""Slopes by differences: what is detached is held, and a wrong backward is seen."""

import pytest
import torch
from torch import Tensor

from core import differences

AT = {"x": torch.tensor([0.3, 0.7, 1.1], dtype=torch.float64)}
WAY = {"x": torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)}


class Doubled(torch.autograd.Function):
    """Twice the sine, with its own backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x.sin()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0].cos()


class Halved(Doubled):
    """The same, its backward wrong by half."""

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


def detached(given):
    return (given["x"].detach() * given["x"] ** 2).sum()


def unrecorded(given):
    with torch.no_grad():
        weight = given["x"].exp() + 1
    return (weight * given["x"] ** 2).sum()


def through_data(given):
    return (given["x"].data * given["x"] ** 2).sum()


@pytest.mark.parametrize(
    "function", [detached, unrecorded, through_data, lambda given: Doubled.apply(given["x"]).sum()]
)
def test_what_is_held_fixed_has_no_slope_on_either_side(function):
    slope, found = differences.along(function, AT, WAY)
    assert abs(slope - found) < 1e-8
    assert abs(slope) > 0.1


def test_a_backward_that_is_wrong_differs_from_the_slope_of_the_value():
    slope, found = differences.along(lambda given: Halved.apply(given["x"]).sum(), AT, WAY)
    assert found == pytest.approx(2 * slope)


def test_a_tensor_that_the_function_does_not_read_adds_nothing():
    both, ways = {**AT, "y": AT["x"]}, {**WAY, "y": WAY["x"]}
    slope, found = differences.along(lambda given: (3 * given["x"]).sum(), both, ways)
    assert slope == pytest.approx(found) == pytest.approx(3 * float(WAY["x"].sum()))


def test_a_function_that_runs_otherwise_when_called_again_is_refused():
    calls: list[Tensor] = []

    def growing(given):
        calls.append(given["x"])
        return sum((given["x"].detach() * given["x"]).sum() for _ in calls)

    with pytest.raises(ValueError, match="other operations when it is called again"):
        differences.along(growing, AT, WAY)
