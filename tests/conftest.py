"""What every test has: shape checks over core, hypothesis without a clock, and an honest count of skips.

With several workers the files that take longest come first, so that no worker is left with one alone.
"""

import collections
import os

import hypothesis
import jaxtyping

from tests import disk, shapes

PLAIN = os.environ.get("ESPALIER_PLAIN") == "1"

# Tests never reach a hub, whatever the machine could reach.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# The hook must stand before anything of core is imported; it makes calls tenfold slower and stops fullgraph.
if not PLAIN:
    jaxtyping.install_import_hook("core", f"{shapes.__name__}.checked")

disk.hurry()

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


# Half a minute and more each; a name that is missing here costs time and nothing else.
LONGEST = (
    "test_plain.py", "test_static.py", "test_resume.py", "test_train_grpo.py", "test_rollout.py",
    "test_train_preference.py", "test_references.py", "test_dynamic_sampling.py", "test_fsdp.py",
    "test_adding_a_loss.py", "test_examples.py", "test_ranks_train.py", "test_train_distill.py",
)  # fmt: skip


def pytest_collection_modifyitems(config, items):
    """Leave the `plain` tests to the process of their own that test_plain.py starts."""
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
    if PLAIN:
        return
    plain = [item for item in items if item.get_closest_marker("plain")]
    if plain:
        config.hook.pytest_deselected(items=plain)
        items[:] = [item for item in items if not item.get_closest_marker("plain")]


def pytest_terminal_summary(terminalreporter):
    """Say how many tests were skipped, and why, in one place."""
    reasons = collections.Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reasons[report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)] += 1
    terminalreporter.write_line(f"skips: {sum(reasons.values())}")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"  {count} x {reason.removeprefix('Skipped: ')}")
