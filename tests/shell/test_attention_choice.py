"""Which attention runs: what was asked for where the device has it and it is right there, else a note."""

import attrs
import pytest

from adapters import cpu, pick
from core import blocks
from shell import choose, config, prepare


class Notes(list):
    """A display that keeps what it is told."""

    def note(self, line):
        """Keep a line."""
        self.append(line)


def chosen(kernel):
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
    )
    return config.parse(words).options


def taken(kernel, kinds, monkeypatch):
    """The kind that runs on a device of these kinds, and what was told."""
    device = attrs.evolve(cpu.DEVICE, attention=kinds)
    monkeypatch.setattr(pick, "DEVICES", {"cpu": device})
    notes = Notes()
    found = prepare.device("cpu", notes, kernel)
    return choose.attention(chosen(kernel), found), notes


@pytest.mark.parametrize(
    ("kernel", "kinds", "kind"),
    [
        ("auto", ("rectangles", "mask"), "rectangles"),
        ("auto", ("mask", "rectangles"), "mask"),
        ("eager", ("rectangles", "mask"), "mask"),
        ("sdpa", ("mask", "rectangles"), "rectangles"),
    ],
)
def test_what_is_asked_for_runs_and_nothing_is_told(kernel, kinds, kind, monkeypatch):
    assert taken(kernel, kinds, monkeypatch) == (kind, [])


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention"])
def test_a_kernel_that_the_device_lacks_gives_way_with_a_note(kernel, monkeypatch):
    kind, notes = taken(kernel, ("rectangles", "mask"), monkeypatch)
    assert kind == "rectangles"
    assert notes == [f"attn_implementation {kernel}: cpu has no such kernel; rectangles is taken, as exact"]


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention"])
def test_a_kernel_that_fails_its_self_test_gives_way_with_a_note(kernel, monkeypatch):
    # FlexAttention refuses a backward on the CPU by itself; blocks are given a kernel that is none.
    monkeypatch.setattr(blocks, "KERNELS", {"cpu": blocks.HOST._replace(forward=None)})
    kind, notes = taken(kernel, ("mask", "flash", "flex"), monkeypatch)
    assert kind == "mask"
    assert len(notes) == 1
    assert notes[0].startswith(f"attn_implementation {kernel}: it fails its self-test (")
    assert notes[0].endswith("); mask is taken, as exact")
