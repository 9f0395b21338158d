"""The rules of the house: who imports whom, how long a thing may be, and how it may be called."""

import ast
import re
import subprocess
import sys

import pytest
from importlinter import cli

from tests import paths, warm

ROOTS = ("core", "adapters", "shell")
OURS = sorted(path for root in ROOTS for path in (paths.ROOT / root).rglob("*.py"))
EVERY = OURS + sorted(path for root in ("tests", "examples") for path in (paths.ROOT / root).rglob("*.py"))
# Entry points and the loop tell a whole story, and may be longer.
STORIES = re.compile(r"shell/(loop\.py|\w+\.py:main$)")


def functions():
    """Yield `(place, name, node)` for every function in the three roots."""
    for path in OURS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield str(path.relative_to(paths.ROOT)), node.name, node


def statements(function: ast.AST) -> int:
    """Count the statements of a function, its docstring and signature aside."""
    every = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
    return len(
        [node for node in every if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    )


def test_float32_or_better_is_said_in_one_place():
    said = [path.name for path in OURS if "promote_types" in path.read_text()]
    assert said == ["precision.py"]


def test_imports_follow_the_direction_of_the_house(monkeypatch, capsys):
    monkeypatch.chdir(paths.ROOT)
    status = cli.lint_imports(config_filename="pyproject.toml", no_cache=True)
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("module", ["shell.config", "shell.main", "espalier", "core.plan"])
def test_importing_it_brings_neither_torch_nor_transformers(module):
    code = f"import sys, {module}; print(*sorted({{'torch', 'transformers', 'datasets'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_what_a_run_loads_brings_no_compiler():
    loaded = ("shell.jobs", "transformers.models.llama.modeling_llama", "torch._inductor.compile_fx")
    code, out, err = warm.program("-c", f"import sys; print([name in sys.modules for name in {loaded}])")
    assert (code, out) == (0, "[True, True, False]\n"), err


def test_no_file_is_longer_than_four_hundred_lines():
    lengths = {str(path.relative_to(paths.ROOT)): len(path.read_text().splitlines()) for path in EVERY}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_no_example_is_longer_than_a_hundred_and_twenty_lines():
    examples = (paths.ROOT / "examples").glob("*.py")
    assert [path.name for path in examples if len(path.read_text().splitlines()) > 120] == []


def test_functions_are_short():
    long = [
        f"{place}:{node.lineno} {name} has {node.end_lineno - node.lineno + 1} lines"
        for place, name, node in functions()
        if node.end_lineno - node.lineno + 1
        > (80 if STORIES.match(place) or STORIES.match(f"{place}:{name}") else 60)
    ]
    assert not long, "\n".join(long)


def test_functions_have_at_most_forty_statements():
    busy = {f"{place}:{node.lineno} {name}": statements(node) for place, name, node in functions()}
    assert {where: count for where, count in busy.items() if count > 40} == {}


def test_no_module_takes_a_name_of_the_standard_library():
    names = {path.stem if path.stem != "__init__" else path.parent.name for path in OURS}
    assert names & set(sys.stdlib_module_names) == set()


def test_no_name_says_utils_helper_manager_get_or_compute():
    empty = re.compile(r"_?(get_|compute_)|.*_fn$|.*(utils|helper|manager)", re.IGNORECASE)
    names = {path.stem for path in OURS} | {name for _, name, _ in functions()}
    names |= {
        n.name for path in OURS for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)
    }
    assert [name for name in sorted(names) if empty.match(name)] == []


def test_modules_are_imported_rather_than_their_functions():
    wrong = []
    for path in OURS:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in ROOTS:
                continue
            folder = paths.ROOT / node.module.replace(".", "/")
            for name in (alias.name for alias in node.names):
                is_module = (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists()
                # Types read as types wherever they stand, and the record decorator is a word of its own.
                if not (is_module or name[0].isupper() or node.module == "core.record"):
                    wrong.append(f"{path.relative_to(paths.ROOT)}:{node.lineno} {node.module}.{name}")
    assert not wrong, "\n".join(wrong)
