"""What is written is on the disk before it is named, whole, and to be read by others."""

import os
import pathlib

import pytest
import torch

from shell import checkpoint, files


@pytest.fixture
def events(monkeypatch):
    """Record in which order files and folders are put on the disk and named."""
    found = []

    def synced(descriptor):
        found.append(("sync", pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))

    def named(move):
        def moved(self, target):
            found.append(("name", pathlib.Path(target).name))
            return move(self, target)

        return moved

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("rename", "replace"):
        monkeypatch.setattr(pathlib.Path, name, named(getattr(pathlib.Path, name)))
    return found


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_after_that(tmp_path, events):
    files.replace(tmp_path / "a.json", "{}")
    assert events == [("sync", ".a.json.partial"), ("name", "a.json"), ("sync", tmp_path.name)]


def test_so_are_the_files_of_a_folder_and_their_names_in_it(tmp_path, events):
    with files.whole(tmp_path / "model") as made:
        (made / "below").mkdir()
        (made / "below" / "a").write_text("a")
        (made / "b").write_text("b")
    before, after = events[:-2], events[-2:]
    assert {*before} == {("sync", name) for name in (".model.partial", "below", "a", "b")}
    assert after == [("name", "model"), ("sync", tmp_path.name)]


def test_so_is_a_checkpoint(tmp_path, events):
    checkpoint.save(tmp_path, 3, {"w": torch.ones(2)}, {"n": 1})
    name = ".checkpoint-3.partial"
    last = events.index(("name", "checkpoint-3"))
    assert {("sync", "state.json"), ("sync", "tensors-00001.safetensors"), ("sync", name)} <= {*events[:last]}
    assert events[last + 1] == ("sync", tmp_path.name)


def test_a_folder_that_is_not_finished_leaves_what_was_there(tmp_path):
    place = tmp_path / "model"
    place.mkdir()
    (place / "old").write_text("old")
    with pytest.raises(IsADirectoryError), files.whole(place) as made:
        made.write_text("no file")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "old"]
    with files.whole(place) as made:
        (made / "new").write_text("new")
        (made / "new").chmod(0o600)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "new"]
    (tmp_path / "plain").touch()
    assert (place / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode
