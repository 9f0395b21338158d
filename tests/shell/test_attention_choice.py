"""Which attention runs: what was asked for where the device has it and it is right there, else a note."""

import attrs
import pytest
import torch

from adapters import cpu, pick
from core import blocks
from shell import choose, config, prepare


class Notes(list):
    """A display that keeps what it is told."""

    def note(self, line):
        """Keep a line."""
        self.append(line)


def chosen(kernel, *more):
    """The options of a run that asks for a kernel."""
    words = (
        "sft",
        "--model",
        "tiny",
        "--dataset",
        "demo",
        "--output_dir",
        "out",
        "--attn_implementation",
        kernel,
        *more,
    )
    return config.parse(words).options


def taken(kernel, kinds, monkeypatch, *more):
    """The kind that runs on a device of these kinds, and what was told."""
    device = attrs.evolve(cpu.DEVICE, attention=kinds)
    monkeypatch.setattr(pick, "DEVICES", {"cpu": device})
    notes = Notes()
    asked = chosen(kernel, *more)
    return choose.attention(asked, prepare.device(asked, notes)), notes


@pytest.mark.parametrize(
    ("kernel", "kinds", "kind"),
    [
        ("auto", ("blocks", "mask"), "blocks"),
        ("auto", ("mask", "blocks"), "mask"),
        ("eager", ("blocks", "mask"), "mask"),
        ("sdpa", ("mask", "blocks"), "blocks"),
        ("flash_attention_2", ("mask", "blocks"), "blocks"),
    ],
)
def test_what_is_asked_for_runs_and_nothing_is_told(kernel, kinds, kind, monkeypatch):
    assert taken(kernel, kinds, monkeypatch) == (kind, [])


@pytest.mark.parametrize(
    ("kernel", "kinds"), [("flash_attention_2", ("mask",)), ("flex_attention", ("blocks", "mask"))]
)
def test_a_kernel_that_the_device_lacks_gives_way_with_a_note(kernel, kinds, monkeypatch):
    kind, notes = taken(kernel, kinds, monkeypatch)
    assert kind == kinds[0]
    assert notes == [f"attn_implementation {kernel}: cpu has no such kernel; {kind} is taken, as exact"]


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ((), "mask"),
        (("--bf16",), "blocks"),
        (("--dtype", "bfloat16"), "blocks"),
        (("--dtype", "float64"), "mask"),
    ],
)
def test_kernels_are_tried_in_the_dtype_of_the_runs_products(more, kind, monkeypatch):
    monkeypatch.setattr(blocks, "KERNELS", {"cpu": blocks.HOST._replace(dtypes=(torch.bfloat16,))})
    found, notes = taken("auto", ("blocks", "mask"), monkeypatch, *more)
    assert found == kind
    assert len(notes) == (kind == "mask")
    assert all("its kernel takes no float" in note for note in notes)
    # What was asked for, and is not what the device prefers, is tried likewise.
    found, notes = taken("sdpa", ("mask", "blocks"), monkeypatch, *more)
    assert found == kind
    assert len(notes) == (kind == "mask")


@pytest.mark.parametrize(("kinds", "told"), [(("blocks", "mask"), 0), (("mask", "blocks"), 1)])
def test_selective_is_told_to_be_true_where_no_blocks_run(kinds, told, monkeypatch):
    kind, notes = taken("auto", kinds, monkeypatch, "--gradient_checkpointing", "selective")
    line = f"gradient_checkpointing selective: of attention {kind} nothing is kept; true is taken"
    assert notes == [line] * told


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention"])
def test_a_kernel_that_fails_its_self_test_gives_way_with_a_note(kernel, monkeypatch):
    # FlexAttention refuses a backward on the CPU by itself; blocks are given a kernel that is none.
    monkeypatch.setattr(blocks, "KERNELS", {"cpu": blocks.HOST._replace(forward=None)})
    kind, notes = taken(kernel, ("mask", "blocks", "flex"), monkeypatch)
    assert kind == "mask"
    assert len(notes) == 1
    assert notes[0].startswith(f"attn_implementation {kernel}: it fails its self-test (")
    assert notes[0].endswith("); mask is taken, as exact")
