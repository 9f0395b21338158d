"""The public signatures as text: `python -m tests.api.signatures > tests/api/signatures.txt` pins them."""

import ast
import sys
from collections.abc import Iterator

from tests import paths

# Protocols and records are read from source, so that no import hook and no lazy annotation changes a letter.


def modules() -> list[str]:
    """Return the modules whose names are public: all of the core, and what the facade takes elsewhere."""
    core = (path.relative_to(paths.ROOT) for path in (paths.ROOT / "core").rglob("*.py"))
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in core}
    return sorted(name for name in names | facade() if not name.rpartition(".")[2].startswith("_"))


def facade() -> set[str]:
    """Return the modules that the facade's table names."""
    source = (paths.ROOT / "shell" / "facade" / "__init__.py").read_text()
    tables = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    table = next(node.value for node in tables if ast.unparse(node.targets[0]) == "PUBLIC")
    return {target.partition(":")[0] for target in ast.literal_eval(table).values()}


def lines() -> Iterator[str]:
    """Yield one line for each public function, class, field and method."""
    for module in modules():
        path = paths.ROOT / f"{module.replace('.', '/')}.py"
        path = path if path.exists() else path.with_suffix("") / "__init__.py"
        for node in ast.parse(path.read_text()).body:
            yield from _described(node, module)


def _described(node: ast.stmt, inside: str) -> Iterator[str]:
    """Yield the lines of one statement of a module or of a class."""
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        yield f"{inside}.{node.name}({ast.unparse(node.args)}){result}"
    elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        yield f"{inside}.{node.name}({bases})" if bases else f"{inside}.{node.name}"
        for member in node.body:
            yield from _described(member, f"{inside}.{node.name}")
    elif isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
        default = f" = {ast.unparse(node.value)}" if node.value else ""
        yield f"{inside}.{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{default}"


def main() -> int:
    """Print the signatures."""
    print(*lines(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
