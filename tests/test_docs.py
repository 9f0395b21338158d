"""The documentation names what exists, and all of it."""

import ast
import re

import pytest
import yaml

import espalier
from tests import paths
from tests.api import signatures

DOCS = paths.ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
README = (paths.ROOT / "README.md").read_text()


def blocks(text, language):
    """Return the fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def documented():
    """Return every name that a page renders from its docstring."""
    return {name for page in PAGES for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("name", sorted(espalier.PUBLIC))
def test_every_public_name_has_a_page(name):
    module, _, member = espalier.PUBLIC[name].partition(":")
    assert {module, f"{module}.{member}"} & documented()


def test_every_core_module_has_a_page():
    wanted = {name for name in signatures.modules() if name.startswith("core.")}
    wanted -= {"core.plan", "core.losses"}
    assert wanted - documented() == set()


def test_every_page_is_in_the_navigation():
    # The file has tags that only mkdocs knows.
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    config = yaml.load((paths.ROOT / "mkdocs.yml").read_text(), loader)
    leaves, waiting = set(), [config["nav"]]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            leaves.add(one)
        else:
            waiting += one.values() if isinstance(one, dict) else one
    assert leaves == {str(page.relative_to(DOCS)) for page in PAGES}


@pytest.mark.parametrize("page", [paths.ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_python_in_the_documentation_compiles(page):
    for block in blocks(page.read_text(), "python"):
        ast.parse(block)


def test_the_tour_runs_as_it_stands():
    scope = {}
    for block in blocks((DOCS / "tour.md").read_text(), "python"):
        exec(block, scope)
    assert scope["mine"].loss is scope["weighted"]


def test_the_readme_shows_code_by_its_twentieth_line():
    assert any(line.startswith("```") for line in README.splitlines()[:20])


def test_the_readme_maps_every_folder_that_git_keeps():
    folders = {
        path.name
        for path in paths.ROOT.iterdir()
        if path.is_dir() and any(path.rglob("*.py")) | (path.name == "docs") and not path.name.startswith(".")
    }
    folders -= {"build", "dist", "out", "site"}
    assert {name for name in folders if f"{name}/" not in README} == set()


def test_ci_runs_the_commands_of_the_readme():
    script = (paths.ROOT / ".ci" / "run").read_text()
    commands = [
        line for block in blocks(README, "bash") for line in block.replace("\\\n", " ").splitlines() if line
    ]
    assert len(commands) == 2
    for step in (" ".join(step.split()) for line in commands for step in line.split("&&")):
        assert step in script, step


def test_benchmarks_take_json_as_their_page_says():
    page = (DOCS / "benchmarks.md").read_text()
    named = set(re.findall(r"`python -m tests\.benchmarks\.(\w+)", page))
    sources = {name: (paths.ROOT / "tests" / "benchmarks" / f"{name}.py").read_text() for name in named}
    assert {name for name, text in sources.items() if '"--json"' not in text} == {"curves", "picture"}
