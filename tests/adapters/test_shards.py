"""Parameters split over two processes give what whole ones give on one, whatever is run a second time."""

import json

import pytest
import torch

from adapters import shards
from tests import warm
from tests.adapters import sharded

CASES = [
    f"{mode}, {budget}"
    for mode in (*sharded.MODES, "no rows", "no rows and a whole head", "nobody trains")
    for budget in sharded.BUDGETS
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Start two processes, and read what each saw."""
    folder = tmp_path_factory.mktemp("shards")
    code, _, err = warm.program("tests.adapters.sharded", str(folder), ranks=2)
    assert code == 0, err[-8000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_split_parameters_give_the_loss_and_gradients_of_whole_ones(found, case):
    for rank in found:
        assert rank[case]["scores"] <= 1e-10
        assert rank[case]["loss"] <= 1e-10
        assert rank[case]["gap"] <= 1e-10
        assert rank[case]["norm"] == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_each_process_holds_its_part_and_all_parts_are_the_parameters(found, case):
    for rank in found:
        assert rank[case]["same"]
        assert rank[case]["held"] <= rank[case]["whole"] / 2 + 40  # a part is rounded up to a whole number


@pytest.mark.parametrize("case", CASES)
def test_no_layer_is_whole_any_more_when_the_forward_has_ended(found, case):
    for rank in found:
        assert rank[case]["gathered"] > 0
        assert rank[case]["left"] == 0


@pytest.mark.parametrize(("shape", "num"), [((3, 5), 2), ((7,), 4), ((1,), 3), ((4, 4), 2)])
def test_parts_of_any_shape_put_side_by_side_are_the_parameter_and_zeros(shape, num):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layouts = [shards.Layout(shapes={"w": whole.shape}, index=i, num=num) for i in range(num)]
    side_by_side = torch.cat([layout.part("w", whole).flatten() for layout in layouts])
    assert torch.equal(side_by_side[: whole.numel()].view(shape), whole)
    assert not side_by_side[whole.numel() :].any()
