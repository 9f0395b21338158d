"""A public signature changes only on purpose."""

from tests import paths
from tests.api import signatures


def test_public_signatures_are_the_pinned_ones():
    pinned = (paths.ROOT / "tests" / "api" / "signatures.txt").read_text().splitlines()
    now = list(signatures.lines())
    changes = [f"- {line}" for line in pinned if line not in now] + [
        f"+ {line}" for line in now if line not in pinned
    ]
    assert now == pinned, "\n".join(
        ["Tell it in CHANGELOG.md, then: python -m tests.api.signatures > tests/api/signatures.txt", *changes]
    )
