"""What is written is on the disk before it is named, whole, and to be read by others."""

import errno
import os
import pathlib
import shutil

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


def kept(folder):
    """Return what is in a folder, hidden too."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def write(place, name):
    """Replace a folder by one that holds a file."""
    with files.whole(place) as made:
        (made / name).write_text(name)


@pytest.mark.parametrize(
    ("number", "left"),
    [(1, [".model.partial/new", "model/old"]), (2, [".model.partial/new", ".model.replaced/old"])],
)
def test_a_kill_at_a_rename_leaves_the_old_and_the_new_whole(tmp_path, monkeypatch, number, left):
    place = tmp_path / "model"
    write(place, "old")
    renames, move = iter(range(1, 9)), pathlib.Path.rename
    with monkeypatch.context() as killed:

        def renamed(self, target):
            if next(renames) == number:
                killed.setattr(files, "_settle", lambda *_: None)
                killed.setattr(shutil, "rmtree", lambda *_, **named: None)
                raise KeyboardInterrupt
            return move(self, target)

        killed.setattr(pathlib.Path, "rename", renamed)
        with pytest.raises(KeyboardInterrupt):
            write(place, "new")
    assert kept(tmp_path) == left
    with pytest.raises(ValueError, match="x"), files.whole(place):
        raise ValueError("x")
    assert kept(tmp_path) == ["model/old"]


def test_what_a_kill_leaves_of_the_old_is_removed_by_the_next_write(tmp_path, monkeypatch):
    place = tmp_path / "model"
    write(place, "old")
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **named: None)
        write(place, "new")
    assert kept(tmp_path) == [".model.replaced/old", "model/new"]
    write(place, "newer")
    assert kept(tmp_path) == ["model/newer"]


@pytest.mark.parametrize("why", [errno.EBUSY, errno.EXDEV])
def test_a_folder_that_cannot_be_renamed_gets_the_files_where_it_is_empty(tmp_path, monkeypatch, why):
    place = tmp_path / "model"
    place.mkdir()
    number = place.stat().st_ino
    move = os.rename

    def stuck(source, target, **named):
        if pathlib.Path(source) == place:
            raise OSError(why, os.strerror(why))
        move(source, target, **named)

    monkeypatch.setattr(os, "rename", stuck)
    write(place, "new")
    assert (kept(tmp_path), place.stat().st_ino) == (["model/new"], number)
    if why == errno.EBUSY:
        with pytest.raises(OSError, match="busy"):
            write(place, "newer")
        assert kept(tmp_path) == ["model/new"]
        (place / "new").unlink()
        monkeypatch.setattr(shutil, "move", lambda *_: (place / "half").touch() or os.fsync(-1))
        with pytest.raises(OSError, match="descriptor"):
            write(place, "new")
        assert (place.is_dir(), kept(tmp_path)) == (True, [])
    else:
        write(place, "newer")
        assert kept(tmp_path) == ["model/newer"]


def test_a_place_is_tried_without_a_trace(tmp_path):
    files.check(tmp_path / "below" / "model")
    assert not [*tmp_path.iterdir()]
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        files.check(tmp_path / "file" / "model")
