"""What a run writes into its folder, kept apart from what it reads there and from what no run wrote."""

import filecmp
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import yaml

from shell import config, mistake, options, written

SCRAPS = {*written.FILES, written.PREPARED, written.ROWS, written.LOCK}
"""What a start that was killed before its first checkpoint leaves behind."""

_MODELS = ("model", "tokenizer", "init_from", "ref_model", "teacher_model", "chat_template")
# A run's own file names every option that has a value; nobody writes all of these by hand.
_RESOLVED = {"resume", "dry_run", "packing", "device", "seed"}


def placed(chosen: options.Options) -> None:
    """Refuse a training run that has nowhere to write, or would write over what it reads.

    Args:
        chosen: the options.

    Raises:
        mistake.Mistake: output_dir is not set and this is no dry run, or it holds what another option names.
    """
    if chosen.output_dir is None:
        if not chosen.dry_run:
            raise mistake.Mistake("--output_dir: nothing came; a folder to write to, as in --output_dir out.")
        return
    place = pathlib.Path(chosen.output_dir)
    made = (written.BASE,) if chosen.use_peft and chosen.model == "tiny" else ()
    folders = (*written.FOLDERS, *made)
    _check(place, folders, "folder", _is_own_folder)
    for name, text in _read(chosen):
        below = _below(pathlib.Path(text), place)
        if below is None:
            continue
        if below == "" and name.endswith("dataset"):
            raise mistake.Mistake(
                f"{name}: {text} is output_dir, too, and what a run writes there would be read as rows; name "
                "a file in it, or another output_dir"
            )
        first = below.partition("/")[0]
        if first in {*written.FILES, *folders} or first.startswith("checkpoint-"):
            raise mistake.Mistake(
                f"{name}: {text} lies in output_dir {place}, where this run would write over its {first}; "
                "name another output_dir"
            )


def check(folder: pathlib.Path) -> None:
    """Refuse a folder in which something else stands where a run writes.

    Args:
        folder: output_dir; may be missing.

    Raises:
        mistake.Mistake: a file stands where a folder is written, or the reverse.
    """
    _check(folder, written.FILES, "file", pathlib.Path.is_file)
    _check(folder, written.FOLDERS, "folder", _is_own_folder)


def _check(folder: pathlib.Path, names: Iterable[str], what: str, right: Callable[..., bool]) -> None:
    """Refuse names at which something else stands than what is written there."""
    for name in names:
        path = folder / name
        if os.path.lexists(path) and not right(path):
            found = "a link" if what == "folder" and path.is_symlink() else f"no {what}"
            raise mistake.Mistake(
                f"output_dir {folder}: {name} there is {found}, and a run writes a {what} of this name; "
                "move it away, or name another output_dir"
            )


def check_anew(folder: pathlib.Path, algorithm: str, chosen: options.Options) -> None:
    """Refuse to begin anew over what no killed start has left: a whole run's files, or somebody else's.

    Args:
        folder: output_dir, without a checkpoint.
        algorithm: that is asked for.
        chosen: the options.

    Raises:
        mistake.Mistake: says what is there. A finished run of the same options is none.
    """
    others = (written.MODEL, written.METRICS, written.COMPLETIONS, written.RUN)
    there = [name for name in others if os.path.lexists(folder / name)]
    old = _resolved(folder / written.CONFIG)
    if there and old is None:
        raise mistake.Mistake(
            f"output_dir {folder} holds {there[0]}, which no run of this folder wrote, and this one would "
            "write over it; move it away, or name another output_dir"
        )
    if written.MODEL not in there or old is None:
        return
    facts = run_facts(folder)
    before = facts.get("algorithm")
    if chosen.max_length != old.get("max_length"):  # the file has what the model held of what was asked for
        old["max_length"] = facts.get("max_length_asked", old.get("max_length"))
    changed = config.changes(old, chosen) if before == algorithm else ["algorithm"]
    if facts.get("finished") and not changed:
        return
    was = {**config.plain(options.Options()), **old, "algorithm": before}
    now = {**config.plain(chosen), "algorithm": algorithm}
    told = "".join(f", of a run with {name} {was[name]}; {now[name]} came" for name in changed[:1])
    raise mistake.Mistake(
        f"output_dir {folder} holds a model and no checkpoint to go on from{told}. Name another output_dir "
        "(init_from starts from its weights), or remove the folder to begin anew"
    )


def ended(folder: pathlib.Path) -> int | None:
    """Return the steps of a run that is finished, its model written whole; None where there is none.

    Args:
        folder: output_dir.
    """
    facts = run_facts(folder)
    step = facts.get("step")
    is_whole = facts.get("finished") and (folder / written.MODEL).is_dir()
    return step if is_whole and isinstance(step, int) else None


def keep_config(folder: pathlib.Path, note: Callable[[str], None]) -> None:
    """Move a config.yaml that somebody wrote by hand out of the way of the run's own.

    Args:
        folder: output_dir.
        note: told where it is now.
    """
    path = folder / written.CONFIG
    if path.is_file() and _resolved(path) is None:
        note(f"{path} was not written by a run and is now {set_aside(path).name}")


def set_aside(path: pathlib.Path) -> pathlib.Path:
    """Give what stands in the way another name, and return its place.

    Args:
        path: a file or a folder.
    """
    taken = (path.with_name(f"{path.name}.old-{number}") for number in range(1, 1 << 30))
    return path.rename(next(free for free in taken if not os.path.lexists(free)))


def make_way(
    place: pathlib.Path, made: pathlib.Path, note: Callable[[str], None], *, same: bool = False
) -> None:
    """Set aside a folder that holds other files than the one that is to take its place.

    Args:
        place: the folder; may be missing.
        made: what is to take its place, written whole.
        note: told where the folder is now.
        same: files of one name must hold the same, too.
    """
    if not place.is_dir():
        return
    there = {path.relative_to(place) for path in place.rglob("*")}
    right = there <= {path.relative_to(made) for path in made.rglob("*")}
    if right and same:
        named = [name for name in there if (place / name).is_file()]
        right = len(filecmp.cmpfiles(place, made, named, shallow=False)[0]) == len(named)
    if not right:
        moved = set_aside(place)
        note(f"{place} held other files than a model of this run; it is now {moved.name}")


def _read(chosen: options.Options) -> Iterator[tuple[str, str]]:
    """Give each option that names what is read, with what it names."""
    for name in _MODELS:
        value = getattr(chosen, name)
        if isinstance(value, str):
            yield name, value
    for name in ("dataset", "eval_dataset"):
        rows = getattr(chosen, name)
        for row in rows if isinstance(rows, tuple) else (rows,):
            path = row.get("path") if isinstance(row, dict) else row
            if isinstance(path, str):
                yield name, path


def _below(path: pathlib.Path, folder: pathlib.Path) -> str | None:
    """Return where a path that exists lies below a folder; None where it does not."""
    try:
        found, place = path.expanduser().resolve(strict=True), folder.resolve()
    except (OSError, RuntimeError, ValueError):  # it is no path, or nothing is there
        return None
    if not found.is_relative_to(place):
        return None
    return "" if found == place else found.relative_to(place).as_posix()


def _is_own_folder(path: pathlib.Path) -> bool:
    """Say whether a path is a folder itself: a link to one cannot be replaced as a whole."""
    return path.is_dir() and not path.is_symlink()


def _resolved(path: pathlib.Path) -> dict[str, Any] | None:
    """Return the options in a run's own config.yaml; None where there is none."""
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return read if isinstance(read, dict) and read.keys() >= _RESOLVED else None


def run_facts(folder: pathlib.Path) -> dict[str, Any]:
    """Return run.json, empty where there is none.

    Args:
        folder: output_dir.
    """
    try:
        read = json.loads((folder / written.RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
