"""Whether `core`, `adapters` and `shell` are Espalier's: other packages may bear such common names."""

import base64
import hashlib
import importlib.metadata
import importlib.util
import pathlib

from shell import mistake

ROOTS = ("core", "adapters", "shell")
DISTRIBUTION = "espalier-lm"


def check() -> None:
    """Refuse to go on when a stranger answers to one of our package names.

    Call it before the first import of `core` or `adapters`. It looks packages up and reads their first file;
    it imports nothing.

    Raises:
        Mistake: names the package, the folder it was found in and the folder it was wanted in.
    """
    home = pathlib.Path(__file__).resolve().parent.parent
    for name in ROOTS:
        _in_place(name, home)
        _unchanged(name, home)


def _in_place(name: str, home: pathlib.Path) -> None:
    """Refuse a package that is found anywhere but beside this one."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    wanted = home / name
    if not places:
        what = f"is the file {spec.origin}" if spec else "was not found"
        raise mistake.Mistake(
            f"package {name}: it {what}; Espalier's {wanted} was wanted. Rename it, or install again."
        )
    found = pathlib.Path(places[0]).resolve()
    if found == wanted:
        return
    if found.parent == pathlib.Path.cwd():
        todo = f"The current folder's own {name} hides Espalier's: start from another folder, or rename it."
    else:
        todo = "Another package of that name hides Espalier's: install Espalier in an environment of its own."
    raise mistake.Mistake(f"package {name}: found in {found}; Espalier's {wanted} was wanted. {todo}")


def _unchanged(name: str, home: pathlib.Path) -> None:
    """Refuse a package whose first file another distribution wrote over when it was installed."""
    first = home / name / "__init__.py"
    recorded = _recorded_hash(f"{name}/__init__.py", home)
    if recorded is None:
        return
    digest = base64.urlsafe_b64encode(hashlib.sha256(first.read_bytes()).digest()).rstrip(b"=").decode()
    if digest != recorded:
        raise mistake.Mistake(
            f"package {name}: {first} is not the file that Espalier installed; another distribution with "
            f"a package of that name wrote over it. Install Espalier in an environment of its own."
        )


def _recorded_hash(path: str, home: pathlib.Path) -> str | None:
    """Return the sha256 that pip wrote down for an installed file; None where it copied nothing."""
    try:
        files = importlib.metadata.distribution(DISTRIBUTION).files or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    ours = [file for file in files if file.as_posix() == path and file.hash]
    ours = [file for file in ours if pathlib.Path(str(file.locate())).resolve() == home / path]
    return ours[0].hash.value if ours else None
