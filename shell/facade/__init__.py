"""Espalier's public names in one place: `import espalier as es`.

A name is imported when it is first asked for, so `import espalier` alone does not bring torch.
"""

import importlib
import importlib.metadata
import importlib.util
import pathlib
from typing import Any

# Public name -> the module that it is, or `module:name` for a function or record of one.
PUBLIC = {
    # Algorithms and what they are made of
    "Algorithm": "core.algorithms:Algorithm",
    "algorithms": "core.algorithms",
    "check": "core.check:check",
    "Broken": "core.check:Broken",
    "Failure": "core.check:Failure",
    "failures": "shell.failures",
    "advantages": "core.advantages",
    "ratios": "core.ratios",
    "kl": "core.kl",
    "reduce": "core.reduce",
    "supervised": "core.losses.supervised",
    "policy": "core.losses.policy",
    "composition": "core.losses.composition",
    "preference": "core.losses.preference",
    "anchored": "core.losses.anchored",
    "transport": "core.losses.transport",
    "reference_free": "core.losses.reference_free",
    "pair_composition": "core.losses.pair_composition",
    "margins": "core.losses.margins",
    "unpaired": "core.losses.unpaired",
    "reward": "core.losses.reward",
    "distill": "core.losses.distill",
    "metrics": "core.metrics",
    # What a loss sees
    "Batch": "core.pack:Batch",
    "Scores": "core.pack:Scores",
    # From samples to packs
    "Sample": "core.plan.sample:Sample",
    "batching": "core.plan.batching",
    "cost": "core.plan.cost",
    "pack": "core.pack",
    "padding": "core.plan.padding",
    "prefix_tree": "core.plan.prefix_tree",
    # Steps
    "TrainState": "core.steps:TrainState",
    "optimizers": "core.optimizers",
    "schedules": "core.schedules",
    "steps": "core.steps",
    "segments": "core.segments",
    "keys": "core.keys",
    "reference": "core.reference",
    # Machinery
    "train": "shell.api:train",
    "device": "adapters.pick:device",
}

__version__ = importlib.metadata.version("espalier-lm")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in PUBLIC:
        raise AttributeError(f"espalier has no {name!r}; its names are {', '.join(PUBLIC)}.")
    _refuse_strangers()
    module, _, member = PUBLIC[name].partition(":")
    found = importlib.import_module(module)
    globals()[name] = getattr(found, member) if member else found
    return globals()[name]


def __dir__() -> list[str]:
    """List the public names for completion."""
    return sorted(("__version__", *PUBLIC))


def _refuse_strangers() -> None:
    """Raise ImportError when `core`, `adapters` or `shell` is another package than ours."""
    here = pathlib.Path(__file__).resolve().parent
    wanted = here.parent if here.name == "facade" else here.parent / "shell"
    spec = importlib.util.find_spec("shell")
    places = list(spec.submodule_search_locations or ()) if spec else []
    # Our own check lives in `shell`, so that one name is looked at before anything of it runs.
    if not places or pathlib.Path(places[0]).resolve() != wanted:
        found = places[0] if places else "nowhere"
        raise ImportError(
            f"package shell: found {found}; Espalier's {wanted} was wanted. Start from a folder without a "
            f"`shell` of its own, or install Espalier in an environment of its own."
        )
    roots = importlib.import_module("shell.roots")
    try:
        roots.check()
    except ValueError as told:
        raise ImportError(str(told)) from None
