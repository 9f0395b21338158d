"""The kind of attention that runs is one that was right at start."""

import attrs
import pytest
import torch

from adapters import cpu, self_test, tree_attention
from core import attention, blocks


@pytest.mark.parametrize("dtype", cpu.DEVICE.dtypes)
@pytest.mark.parametrize("kind", cpu.DEVICE.attention)
def test_every_kind_of_the_cpu_passes_in_every_dtype(kind, dtype):
    assert self_test.fault(kind, cpu.DEVICE, dtype) is None


def test_a_device_whose_first_kind_passes_stays_as_it_is():
    device, notes = self_test.tested(cpu.DEVICE, torch.float32)
    assert device is cpu.DEVICE
    assert notes == ()


def bent(how):
    """Return `rectangles` gone wrong: its output, or one of its gradients only."""
    right = attention.rectangles

    def wrong(query, key, value, *rest, **numbers):
        if how == "output":
            return right(query, key, value, *rest, **numbers) * 1.1
        if how == "value":
            value = value * 2 - value.detach()
        if how == "raises":
            raise RuntimeError("no kernel\nfor this")
        return right(query, key, value, *rest, **numbers)

    return wrong


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("output", "its output is"),
        ("value", "its gradient of the value is"),
        ("raises", "RuntimeError: no kernel)"),
    ],
)
def test_a_kind_that_is_wrong_gives_way_to_the_next_and_is_told(monkeypatch, how, told):
    monkeypatch.setattr(tree_attention.attention, "rectangles", bent(how))
    device, notes = self_test.tested(cpu.DEVICE, torch.float32)
    assert device.attention == ("mask",)
    assert len(notes) == 1
    assert "attention blocks fails its self-test on cpu" in notes[0]
    assert told in notes[0]


def test_a_device_on_which_nothing_is_right_is_refused(monkeypatch):
    monkeypatch.setattr(tree_attention.attention, "rectangles", bent("output"))
    with pytest.raises(ValueError, match="device cpu: no attention is right here: attention blocks"):
        self_test.tested(attrs.evolve(cpu.DEVICE, attention=("blocks",)), torch.float32)


def test_nothing_is_tried_where_each_shape_is_compiled(monkeypatch):
    monkeypatch.setattr(tree_attention.attention, "rectangles", bent("output"))
    planned = attrs.evolve(cpu.DEVICE, static_shapes=True)
    assert self_test.tested(planned, torch.float32) == (planned, ())


def test_a_kernel_that_does_not_take_the_dtype_of_the_products_gives_way_by_name(monkeypatch):
    monkeypatch.setattr(blocks, "KERNELS", {"cpu": blocks.HOST._replace(dtypes=(torch.bfloat16,))})
    assert self_test.tested(cpu.DEVICE, torch.bfloat16) == (cpu.DEVICE, ())
    device, notes = self_test.tested(cpu.DEVICE, torch.float64)
    assert device.attention == ("mask",)
    assert notes == ("attention blocks fails its self-test on cpu (its kernel takes no float64)",)


def test_the_forest_has_forks_and_a_second_tree():
    sequences = [torch.tensor(one) for one in self_test.SEQUENCES]
    assert len({int(one[0]) for one in sequences}) == 2
    assert len({tuple(one[:3].tolist()) for one in sequences}) < len(sequences)
