import errno
import hashlib
import json
import math
import pathlib

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from shell import checkpoint, mistake

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def snapshot(folder):
    return {
        path.relative_to(folder).as_posix(): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def save(root, step, **more):
    return checkpoint.save(root, step, {"w": torch.full((8,), float(step))}, {"step": step}, **more)


@hypothesis.given(
    shapes=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=6),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(max_examples=25)
def test_tensors_of_any_type_and_shape_come_back_bit_for_bit(tmp_path_factory, shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for i, (dtype, shape) in enumerate(shapes):
        width = torch.empty((), dtype=dtype).element_size()
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, width), generator=generator)
        tensors[f"layer.{i}"] = raw.to(torch.uint8).view(dtype).reshape(shape)
    folder = checkpoint.save(tmp_path_factory.mktemp("run"), 1, tensors, {})
    saved = checkpoint.load(folder)
    assert list(saved.tensors) == list(tensors)
    for path, tensor in tensors.items():
        found = saved.tensors[path]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert bits(found) == bits(tensor)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@hypothesis.given(values=st.dictionaries(st.text(max_size=5), JSON, max_size=3))
@hypothesis.settings(max_examples=25)
def test_plain_values_come_back_equal(tmp_path_factory, values):
    folder = checkpoint.save(tmp_path_factory.mktemp("run"), 1, {}, values)
    assert checkpoint.load(folder).values == values


def test_a_nan_among_the_values_comes_back_as_one(tmp_path):
    assert math.isnan(checkpoint.load(checkpoint.save(tmp_path, 1, {}, {"loss": math.nan})).values["loss"])


@pytest.mark.parametrize("value", [(1, 2), {1: "a"}, {"a": [torch.tensor(1)]}, {1, 2}])
def test_a_value_that_json_would_change_is_refused_before_anything_is_written(tmp_path, value):
    with pytest.raises(ValueError, match=r"values\['x'\]"):
        checkpoint.save(tmp_path, 1, {}, {"x": value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "tensor", [torch.empty(2, device="meta"), torch.eye(2).to_sparse(), torch.ones(2) * 1j]
)
def test_a_tensor_that_cannot_be_stored_is_refused_by_name(tmp_path, tensor):
    with pytest.raises(ValueError, match=r"tensor head\.weight"):
        checkpoint.save(tmp_path, 1, {"head.weight": tensor}, {})


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path):
    weight = torch.randn(256, 64)
    views = {
        "embed": weight,
        "first": torch.ones(2),
        "head": weight,
        "part": weight[:1],
        "turned": weight.t(),
    }
    folder = checkpoint.save(tmp_path, 1, views, {})
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert size < 2.1 * weight.numel() * 4  # embed and turned
    found = checkpoint.load(folder).tensors
    assert list(found) == list(views)
    assert found["head"] is found["embed"]
    for path, tensor in views.items():
        assert torch.equal(found[path], tensor)


def test_large_states_are_cut_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", 100)
    tensors = {f"w{i}": torch.full((i + 1,), float(i), dtype=torch.float64) for i in range(20)}
    folder = checkpoint.save(tmp_path, 1, tensors, {})
    assert len(list(folder.glob("tensors-*.safetensors"))) > 10
    found = checkpoint.load(folder).tensors
    assert all(torch.equal(found[path], tensor) for path, tensor in tensors.items())


def test_every_file_is_data_and_readable_as_the_folder_is(tmp_path):
    folder = save(tmp_path, 1)
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".safetensors", ".json"}
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_further_files_become_part_of_the_checkpoint(tmp_path):
    def extra(folder):
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")

    folder = save(tmp_path, 1, extra=extra)
    assert checkpoint.fault(folder) is None
    (folder / "model" / "config.json").write_text("[]")
    assert checkpoint.fault(folder) == "model/config.json does not match its checksum"


def test_without_checkpoints_there_is_no_newest(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.newest(tmp_path / "missing") is None


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 10, 100, 11):
        save(tmp_path, step)
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoint-100"


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip, pathlib.Path.unlink])
@pytest.mark.parametrize("name", ["tensors-00001.safetensors", "state.json", "manifest.json"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_said(tmp_path, damage, name):
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "checkpoint-3" / name)
    before, told = snapshot(tmp_path), []
    newest = checkpoint.newest(tmp_path, note=told.append)
    assert newest == tmp_path / "checkpoint-2"
    assert checkpoint.load(newest, check=False).values == {"step": 2}
    assert len(told) == 1
    assert "checkpoint-3 was passed over" in told[0]
    assert name in told[0]
    assert snapshot(tmp_path) == before
    with pytest.raises(mistake.Mistake, match="checkpoint-3 is not a whole checkpoint"):
        checkpoint.load(tmp_path / "checkpoint-3")


def test_a_renamed_checkpoint_does_not_pass_for_another_step(tmp_path):
    save(tmp_path, 1).rename(tmp_path / "checkpoint-7")
    assert checkpoint.fault(tmp_path / "checkpoint-7") == "its name does not agree with its step, 1"


def test_pruning_keeps_the_best_and_the_newest(tmp_path):
    history = {}
    for step, loss in enumerate([3.0, 1.0, 2.0], start=1):
        history[step] = loss
        save(tmp_path, step)
        best = checkpoint.best(history, greater_is_better=False)
        checkpoint.prune(tmp_path, 1, newest=step, kept=(best,))
    assert best == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoint-3"
    assert checkpoint.load(tmp_path / f"checkpoint-{best}").values == {"step": 2}


@hypothesis.given(
    steps=st.sets(st.integers(1, 30), min_size=1, max_size=6), keep=st.integers(1, 4), data=st.data()
)
@hypothesis.settings(max_examples=20)
def test_pruning_keeps_as_many_as_asked_and_the_newest_of_them(tmp_path_factory, steps, keep, data):
    root = tmp_path_factory.mktemp("run")
    for step in steps:
        save(root, step)
    best = data.draw(st.sampled_from([None, *sorted(steps)]))
    removed = checkpoint.prune(root, keep, kept=(best,))
    left = {int(path.name.split("-")[1]) for path in root.iterdir()}
    assert left == steps - set(removed)
    assert max(steps) in left
    assert best is None or best in left
    assert len(left) == min(len(steps), max(keep, len({max(steps), best} - {None})))
    assert all(step > old for step in left - {best} for old in removed)


def test_pruning_touches_nothing_that_is_not_ours(tmp_path):
    outside = tmp_path / "elsewhere"
    for step in (1, 2, 3, 4):
        save(tmp_path / "run", step)
    save(outside, 1)
    run = tmp_path / "run"
    (run / "checkpoint-best").mkdir()
    (run / "checkpoint-0").mkdir()
    (run / "checkpoint-0" / "trainer_state.json").write_text("{}")
    (run / "checkpoint-05").symlink_to(outside / "checkpoint-1")
    (run / "notes.txt").write_text("mine")
    assert checkpoint.prune(run, 1) == (1, 2, 3)
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoint-0", "checkpoint-05", "checkpoint-4", "checkpoint-best", "notes.txt",
    ]  # fmt: skip
    assert checkpoint.load(outside / "checkpoint-1").step == 1


def test_a_damaged_newer_checkpoint_does_not_cost_the_whole_ones(tmp_path):
    for step in (6, 9):
        save(tmp_path, step)
    truncate(tmp_path / "checkpoint-9" / "state.json")
    save(tmp_path, 7)
    assert checkpoint.prune(tmp_path, 1) == (6,)
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoint-7"


def test_no_limit_keeps_all(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert checkpoint.prune(tmp_path, None) == ()
    assert len(list(tmp_path.iterdir())) == 3


def test_the_best_step_is_never_one_of_nan_and_the_earliest_of_equals():
    assert checkpoint.best({1: math.nan, 2: 2.0, 3: 2.0}, greater_is_better=True) == 2
    assert checkpoint.best({1: math.nan}, greater_is_better=True) is None


def test_the_folder_that_was_loaded_from_is_untouched_by_a_run_elsewhere(tmp_path):
    source, target = tmp_path / "x", tmp_path / "y"
    for step in (1, 2):
        save(source, step)
    before = snapshot(source)
    state = checkpoint.load(checkpoint.newest(source))
    for step in (3, 4, 5):
        state.tensors["w"].add_(1)
        checkpoint.save(target, step, state.tensors, state.values)
        checkpoint.prune(target, 1, newest=step)
    assert snapshot(source) == before
    assert [path.name for path in target.iterdir()] == ["checkpoint-5"]


def test_a_step_saved_again_replaces_what_was_there(tmp_path):
    truncate(save(tmp_path, 1) / "state.json")
    checkpoint.save(tmp_path, 1, {}, {"new": True})
    assert checkpoint.load(checkpoint.newest(tmp_path)).values == {"new": True}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_a_folder_of_somebody_elses_with_our_name_is_moved_away_whole_and_said(tmp_path):
    told = []
    for content in ("a", "b"):
        (tmp_path / "checkpoint-1").mkdir()
        (tmp_path / "checkpoint-1" / "model.bin").write_text(content)
        checkpoint._remove(save(tmp_path, 1, note=told.append))
    assert (tmp_path / "checkpoint-1.old-1" / "model.bin").read_text() == "a"
    assert (tmp_path / "checkpoint-1.old-2" / "model.bin").read_text() == "b"
    assert len(told) == 2
    assert "moved to checkpoint-1.old-1" in told[0]


def test_sweeping_clears_what_a_kill_left_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / ".checkpoint-2.replaced")
    save(tmp_path, 3)
    for name in (
        ".checkpoint-3.replaced",
        ".checkpoint-4.partial",
        ".checkpoint-0.removed",
        ".checkpoint-x.partial",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("x")
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoint-3"
    checkpoint.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".checkpoint-x.partial", "checkpoint-1", "checkpoint-2", "checkpoint-3",
    ]  # fmt: skip


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("place", ["tensors", "manifest", "extra"])
def test_a_full_disk_is_one_line_and_leaves_the_earlier_checkpoints(tmp_path, monkeypatch, place):
    save(tmp_path, 1)
    before = snapshot(tmp_path)
    if place != "extra":
        target = {
            "tensors": (checkpoint.safetensors.torch, "save_file"),
            "manifest": (checkpoint.files, "replace"),
        }
        monkeypatch.setattr(*target[place], full)
    with pytest.raises(mistake.Mistake, match=r"checkpoint 2 \(32 bytes of tensors\).* no room") as caught:
        save(tmp_path, 2, extra=full if place == "extra" else None)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert snapshot(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_an_interrupt_in_the_middle_leaves_no_half_folder(tmp_path):
    def interrupt(folder):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, extra=interrupt)
    assert not list(tmp_path.iterdir())


def test_the_manifest_lists_every_other_file(tmp_path):
    folder = save(tmp_path, 5)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 5
    assert set(manifest["files"]) == {"tensors-00001.safetensors", "state.json"}
