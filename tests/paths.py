"""Where the optional real data and models lie."""

import os
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = pathlib.Path(os.environ.get("ESPALIER_SHARED", ROOT.parent / "shared"))


def shared(*parts: str) -> pathlib.Path:
    """Return a path of the optional data folder, or skip the test that asks for it."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"optional data is missing: {'/'.join(parts)} (set ESPALIER_SHARED)")
    return path
