"""State on disk: `checkpoint-N` folders that are whole or do not count.

A checkpoint is a folder of

    tensors-00001.safetensors ...   every tensor once, under its path
    state.json                      the plain values, and which paths share one tensor
    (anything else)                 whatever the caller adds, such as a folder of model weights
    manifest.json                   the step, and size and SHA-256 of every other file

It is written under another name in the same folder, put on the disk file by file, and renamed when it is
whole: a rename happens or does not. Nothing here reads or writes pickle.
"""

import errno
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import attrs
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from shell import files, mistake, states, written

FORMAT = "espalier-checkpoint-1"
MANIFEST = "manifest.json"
MAX_FILE_BYTES = 4 << 30  # tensors are copied to the host one file at a time

_FOLDER = re.compile(r"checkpoint-(\d+)")
_TENSORS = re.compile(r"tensors-\d+\.safetensors")
_LEFTOVER = re.compile(r"\.(checkpoint-\d+)\.(partial|removed|replaced)")
_OUT_OF_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Note = Callable[[str], None]


@attrs.frozen(kw_only=True)
class Saved:
    """What `load` found.

    Attributes:
        step: optimizer steps done when it was saved.
        tensors: by path, on the CPU; paths that shared a tensor share one again.
        values: what was given to `save`, through JSON.
    """

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]


def save(
    root: pathlib.Path | str,
    step: int,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    *,
    extra: Callable[[pathlib.Path], None] | None = None,
    note: Note = lambda text: None,
) -> pathlib.Path:
    """Write `checkpoint-STEP` into a folder, whole or not at all.

    Args:
        root: the folder that holds the checkpoints; created if missing.
        step: optimizer steps done.
        tensors: by path, on any device, of any dtype but complex; kept bit for bit. Paths that share one
            tensor (tied weights) are stored once.
        values: anything JSON can hold (keys are strings, no tuples); NaN and infinities included.
        extra: writes further files into the folder it is given; they become part of the checkpoint.
        note: told when a folder of the same name that is not ours had to be moved out of the way.

    Returns:
        The folder `root/checkpoint-STEP`.

    Raises:
        mistake.Mistake: the disk is full or the folder cannot be written; earlier checkpoints are untouched.
        ValueError: a tensor or value that cannot be stored.
    """
    root = pathlib.Path(root)
    aliases = _aliases(tensors)
    text = _state_text(values, tensors, aliases)
    kept = {path: tensor for path, tensor in tensors.items() if path not in aliases}
    wanted = sum(t.numel() * t.element_size() for t in kept.values())
    aside = root / f".checkpoint-{step}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        _write_tensors(aside, kept)
        (aside / written.STATE).write_text(text)
        if extra is not None:
            extra(aside)
        _seal(aside, step)
        return _put_in_place(aside, root / f"checkpoint-{step}", note)
    except (OSError, safetensors.SafetensorError) as error:
        raise _told(error, root, step, wanted) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def load(folder: pathlib.Path | str, *, check: bool = True) -> Saved:
    """Read a checkpoint back.

    Args:
        folder: a `checkpoint-N` folder; never written to.
        check: compare every file with its checksum first. False is for what `newest` has just returned.

    Raises:
        mistake.Mistake: the folder is not a whole checkpoint.
    """
    folder = pathlib.Path(folder)
    problem = fault(folder, deep=check)
    if problem:
        raise mistake.Mistake(f"{folder} is not a whole checkpoint: {problem}; name another one")
    manifest = json.loads((folder / MANIFEST).read_text())
    tensors: dict[str, Tensor] = {}
    with states.reading(folder):
        state = json.loads((folder / written.STATE).read_text())
        for name in filter(_TENSORS.fullmatch, manifest["files"]):
            tensors |= states.aligned(safetensors.torch.load_file(folder / name))
        tensors |= {path: tensors[original] for path, original in state["aliases"].items()}
        ordered = {path: tensors[path] for path in state["paths"]}
        return Saved(step=manifest["step"], tensors=ordered, values=dict(state["values"]))


def newest(root: pathlib.Path | str, *, note: Note = lambda text: None) -> pathlib.Path | None:
    """Return the newest whole checkpoint of a folder, or None. Reads only.

    Args:
        root: the folder that holds the checkpoints; may be missing.
        note: told of each newer folder that was passed over, and why.
    """
    for step, folder in reversed(_folders(pathlib.Path(root))):
        problem = fault(folder)
        if not problem:
            return folder
        note(f"{folder} was passed over: {problem}; looking for a checkpoint before step {step}")
    return None


def fault(folder: pathlib.Path | str, *, deep: bool = True) -> str | None:
    """Say what keeps a folder from being a whole checkpoint, or None.

    Args:
        folder: a `checkpoint-N` folder.
        deep: compare checksums; otherwise only that each file is there with its size.
    """
    folder = pathlib.Path(folder)
    manifest = _manifest(folder)
    if not manifest:
        return f"it has no readable {MANIFEST} that names {written.STATE}"
    named = _FOLDER.fullmatch(folder.name)
    if named and int(named[1]) != manifest["step"]:
        return f"its name does not agree with its step, {manifest['step']}"
    for name, wanted in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != wanted["bytes"]:
            return f"{name} has {size} of {wanted['bytes']} bytes"
        if deep and _digest(path) != wanted["sha256"]:
            return f"{name} does not match its checksum"
    return None


def before(root: pathlib.Path | str, step: int) -> int | None:
    """Return the newest of our checkpoints from before a step, or None."""
    return max(
        (n for n, folder in _folders(pathlib.Path(root)) if n < step and _manifest(folder)), default=None
    )


def prune(
    root: pathlib.Path | str,
    keep: int | None,
    *,
    newest: int | None = None,
    kept: Collection[int | None] = (),
) -> tuple[int, ...]:
    """Remove old checkpoints, never the newest and never the best.

    Only `checkpoint-N` folders with a manifest of ours count or are touched; steps after the newest are left
    alone (what a damaged newer folder holds is for people to look at).

    Args:
        root: the folder that holds the checkpoints.
        keep: how many to keep, `save_total_limit`; None keeps all. With 1 the best stays beside the newest.
        newest: the step just saved; by default the newest whole one.
        kept: steps to keep whatever their age, such as the best; None among them is none.

    Returns:
        The steps that were removed.
    """
    root = pathlib.Path(root)
    ours = [(step, folder) for step, folder in _folders(root) if _manifest(folder)]
    if newest is None:
        newest = max((step for step, folder in ours if fault(folder) is None), default=None)
    if keep is None or newest is None:
        return ()
    past = [(step, folder) for step, folder in ours if step <= newest]
    spared = {newest, *kept} & {step for step, _ in past}
    others = [(step, folder) for step, folder in past if step not in spared]
    doomed = others[: max(0, len(past) - max(keep, len(spared)))]
    for _, folder in doomed:
        _remove(folder)
    return tuple(step for step, _ in doomed)


def best(history: Mapping[int, float], *, greater_is_better: bool) -> int | None:
    """Return the step with the best metric, the earliest of equals; NaN is never best.

    >>> best({1: 3.0, 2: 1.0, 3: 2.0}, greater_is_better=False)
    2
    """
    sign = -1 if greater_is_better else 1
    ranked = [(sign * value, step) for step, value in history.items() if value == value]
    return min(ranked)[1] if ranked else None


def sweep(root: pathlib.Path | str) -> None:
    """Clear what a killed process left half done in a folder. Call it while holding the folder's lock."""
    root = pathlib.Path(root)
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        found = _LEFTOVER.fullmatch(path.name)
        if not found or path.is_symlink() or not path.is_dir():
            continue
        if found[2] == "replaced" and not (root / found[1]).exists():
            path.rename(root / found[1])
        else:
            shutil.rmtree(path)


def _aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each path whose tensor is stored under an earlier path to that path."""
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for path, tensor in tensors.items():
        if tensor.is_meta or tensor.is_complex() or tensor.layout != torch.strided:
            raise ValueError(
                f"tensor {path} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) cannot be stored; "
                "pass a real, dense tensor that has data"
            )
        if tensor.numel() == 0:  # no memory, so no identity
            continue
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        original = first.setdefault(key, path)
        if original != path:
            aliases[path] = original
    return aliases


def _state_text(values: Mapping[str, Any], tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> str:
    """Return the text of state.json; raises before anything is written."""
    _check_plain(values, "values")
    return json.dumps({"values": values, "paths": list(tensors), "aliases": aliases})


def _check_plain(value: Any, where: str) -> None:
    """Refuse what JSON would change on the way."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; JSON holds string keys only: convert it")
            _check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        kind = type(value).__name__
        raise ValueError(f"{where} is a {kind}; pass str, int, float, bool, None, list or dict")


def _write_tensors(folder: pathlib.Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors into as many files as it takes to hold few of them on the host at once."""
    for number, paths in enumerate(_shards(tensors), start=1):
        host: dict[str, Tensor] = {}
        storages: set[int] = set()
        for path in paths:
            tensor = tensors[path].detach().contiguous().cpu()
            storage = tensor.untyped_storage().data_ptr()
            # safetensors refuses two views of one memory; those that were the same tensor are aliases by now.
            host[path] = tensor.clone() if storage in storages else tensor
            storages.add(storage)
        safetensors.torch.save_file(host, folder / f"tensors-{number:05d}.safetensors")


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Cut the paths, in order, into runs of at most MAX_FILE_BYTES (or one tensor)."""
    shard: list[str] = []
    room = MAX_FILE_BYTES
    for path, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shard and size > room:
            yield shard
            shard, room = [], MAX_FILE_BYTES
        shard.append(path)
        room -= size
    if shard:
        yield shard


def _seal(folder: pathlib.Path, step: int) -> None:
    """Put every file and folder on the disk and write the manifest last."""
    found = {}
    mode = (folder / written.STATE).stat().st_mode
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            files.sync_folder(path)
            continue
        path.chmod(mode)  # safetensors creates its files for the owner alone
        files.sync(path)
        name = path.relative_to(folder).as_posix()
        found[name] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    files.replace(folder / MANIFEST, json.dumps({"format": FORMAT, "step": step, "files": found}, indent=1))


def _put_in_place(aside: pathlib.Path, target: pathlib.Path, note: Note) -> pathlib.Path:
    """Rename a whole folder to its name, moving what had the name before out of the way."""
    old = None
    if target.exists() and (target / MANIFEST).exists():
        old = target.with_name(f".{target.name}.replaced")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    elif target.exists() or target.is_symlink():
        number = next(n for n in range(1, 1 << 30) if not target.with_name(f"{target.name}.old-{n}").exists())
        moved = target.rename(target.with_name(f"{target.name}.old-{number}"))
        note(f"{target} was not a checkpoint of ours and has been moved to {moved.name}")
    aside.rename(target)
    files.sync_folder(target.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _remove(folder: pathlib.Path) -> None:
    """Remove a checkpoint so that a kill on the way leaves no half of it under its name."""
    doomed = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    files.sync_folder(folder.parent)
    shutil.rmtree(doomed)


def _folders(root: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """Return (step, folder) of everything that is named like a checkpoint, oldest first."""
    named = [(_FOLDER.fullmatch(path.name), path) for path in root.iterdir()] if root.is_dir() else []
    return sorted((int(m[1]), path) for m, path in named if m and path.is_dir() and not path.is_symlink())


def _manifest(folder: pathlib.Path) -> dict[str, Any] | None:
    """Return the manifest if it is one of ours, else None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return None
    files = manifest.get("files")
    whole = (
        isinstance(files, dict)
        and written.STATE in files
        and all(isinstance(each, dict) and {"bytes", "sha256"} <= each.keys() for each in files.values())
    )
    return manifest if whole and isinstance(manifest.get("step"), int) else None


def _digest(path: pathlib.Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _told(error: Exception, root: pathlib.Path, step: int, wanted: int) -> Exception:
    """Turn a failure to write into the caller's mistake where it is one."""
    number = getattr(error, "errno", None)
    if number is None and (found := re.search(r"os error (\d+)", str(error))):
        number = int(found[1])
    if number is None:
        return error
    why = "there is no room" if number in _OUT_OF_ROOM else os.strerror(number)
    return mistake.Mistake(
        f"checkpoint {step} ({wanted:,} bytes of tensors) could not be saved in {root}: {why} "
        f"({_free(root)}); earlier checkpoints are untouched. Make room there and run the same command again"
    )


def _free(root: pathlib.Path) -> str:
    """Say how much room the folder's disk has."""
    try:
        return f"{shutil.disk_usage(root).free:,} bytes free"
    except OSError:
        return "the folder cannot be read"
