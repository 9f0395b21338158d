"""Adapters on the hub: which ids are of one, brought into the cache and read from there as a folder.

Nothing here imports torch. While options are read the network is not asked: what the cache knows is known.
"""

import contextlib
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from adapters import peft_format
from shell import mistake, options

FILES = ("adapter_*", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "*.jinja", "*.model")
"""What is read of an adapter's repository."""

_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def folder(name: Any, revision: str | None = None) -> pathlib.Path | None:
    """Return the folder of an adapter in PEFT's format; None: the name is of no such adapter.

    Args:
        name: a path, or a hub id whose files the cache may hold.
        revision: branch, tag or commit of the id.
    """
    place = pathlib.Path(str(name))
    if name is not None and (place / peft_format.CONFIG).is_file():
        return place
    found = _cached(str(name), peft_format.CONFIG, revision) if _is_id(name) else None
    return pathlib.Path(found).parent if isinstance(found, str) else None


def fetched(chosen: options.Options) -> bool:
    """Bring adapters that options name by hub ids into the cache; say whether one came.

    Args:
        chosen: the options.

    Raises:
        mistake.Mistake: the hub cannot be reached and the cache holds nothing of the id.
    """
    came = [_fetched(*named) for named in _names(chosen)]
    return any(came)


def _names(chosen: options.Options) -> Iterator[tuple[str, str, str | None]]:
    """Give the options that may name an adapter, what they say, and the revision."""
    asked = chosen.teacher_model_init_kwargs or {}
    revisions = {
        "model": chosen.revision,
        "init_from": None,
        "ref_model": None,
        "teacher_model": asked.get("revision") or chosen.teacher_model_revision,
    }
    for option, revision in revisions.items():
        name = getattr(chosen, option)
        if _is_id(name):
            yield option, name, revision


def _fetched(option: str, name: str, revision: str | None) -> bool:
    """Fetch one adapter unless the cache knows already what the id is."""
    if any(_cached(name, file, revision) is not None for file in (peft_format.CONFIG, "config.json")):
        return False
    import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        huggingface_hub.hf_hub_download(name, peft_format.CONFIG, revision=revision)
        huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(FILES))
    except errors.LocalEntryNotFoundError as problem:
        if constants.HF_HUB_OFFLINE:
            return False  # who loads it says what it looked for
        raise mistake.Mistake(
            f"{option} {name}: there is no such folder, the cache holds nothing of such an id, and the hub "
            "cannot be reached; name a folder, or a hub id that was loaded before"
        ) from problem
    except (errors.EntryNotFoundError, OSError, ValueError):
        return False  # no adapter, or nothing that may be read: who loads it says so
    return True


def _is_id(name: Any) -> bool:
    """Say whether a name can only be a hub id."""
    return isinstance(name, str) and name != "tiny" and bool(_ID.fullmatch(name)) and not _exists(name)


def _exists(name: str) -> bool:
    return pathlib.Path(name).exists()


def _cached(name: str, file: str, revision: str | None) -> Any:
    """Return what the cache knows of a file: its path, a mark that there is none, or None for nothing."""
    import huggingface_hub

    with contextlib.suppress(ValueError):  # such an id cannot be
        return huggingface_hub.try_to_load_from_cache(name, file, revision=revision)
    return None
