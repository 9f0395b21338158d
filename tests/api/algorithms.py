"""Print the page of all algorithms, from the code and the tests: `python -m tests.api.algorithms`.

What each is composed of is read from its record, its source from the docstring that stands under it, and the
tests that know its right values from the tests themselves: those that name the loss, in their own lines or
through the tables and functions of their file.
"""

import ast
import functools
import importlib
import inspect
import itertools
import pathlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from core import algorithms, check, losses
from core.losses import composition
from shell import about, options
from tests import paths

FILE = paths.ROOT / "docs" / "algorithms.md"
KINDS = {
    "text": "Text",
    "pairs": "Pairs of answers",
    "unpaired": "Answers that are good or bad on their own",
    "prompts": "Prompts, answered by the policy",
}
PUBLISHED = {
    "grpo": ("--loss_type", "grpo"),
    "dapo": ("--epsilon_high", "0.28"),
    "dapo_prompts": ("--epsilon_high", "0.28"),
    "dr_grpo": ("--scale_rewards", "none"),
    "cispo": ("--epsilon_high", "5"),
    "exo_pair": ("--label_smoothing", "0.001"),
    "gdpo": ("--multi_objective_aggregation", "normalize_then_sum"),
}
"""Beside a name, what makes its algorithm the published one; other options are at their defaults."""
HEAD = """# Algorithms

Made by `python -m tests.api.algorithms > docs/algorithms.md` from the code and the tests; a test says so.

An algorithm is a loss, a reduction, and what they read. Every one below is a value of `espalier.algorithms`.
`tests/properties/test_algorithms.py` checks of each, on forests that are drawn, that it is what a loop over
plain rows is, that a sample without targets changes nothing, that compiled it is what it is eager, and:

{properties}

*Right values* are the tests of `tests/core` that know what the loss must be: constants from papers, and loops
in plain numbers. *Run* is what makes the algorithm on the command line what it is here, number by number;
other flags make its relatives.

To add one, see [Adding a loss](adding-a-loss.md).
"""


def modules() -> list[Any]:
    """Return the modules of losses."""
    names = sorted(module.name for module in pkgutil.iter_modules(losses.__path__))
    return [importlib.import_module(f"core.losses.{name}") for name in names]


def of_module(module: Any) -> dict[str, Callable[..., Any]]:
    """Return the losses of a module and what is put around losses: public, called with scores and a batch."""
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_") or not inspect.isfunction(value) or value.__module__ != module.__name__:
            continue
        named = inspect.signature(value)
        returns = str(named.return_annotation)
        if list(named.parameters)[:2] == ["scores", "batch"] and ("tuple" in returns or "Values" in returns):
            found[name] = value
    return found


def chain(function: Any) -> Iterator[tuple[Callable[..., Any], Mapping[str, Any]]]:
    """Yield a loss and those inside of it, the outermost first, each with the numbers bound to it."""
    bound: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        bound = {**function.keywords, **bound}
        function = function.func
    inner = [bound.pop("loss")] if "loss" in bound else [one for one, _ in bound.pop("parts", ())]
    yield function, bound
    for one in inner:
        yield from chain(one)


def named() -> dict[str, algorithms.Algorithm]:
    """Return every algorithm by its name; a preference loss that is no value of its own by `preferences`."""
    found = {n: a for n, a in vars(algorithms).items() if isinstance(a, algorithms.Algorithm)}
    others = {n: a for n, a in algorithms.preferences.items() if a not in found.values()}
    return found | {f'preferences["{n}"]': a for n, a in others.items()}


def sources() -> dict[str, str]:
    """Return what stands under each algorithm: what it is and where it comes from."""
    body = ast.parse(inspect.getsource(algorithms)).body
    return {
        one.targets[0].id: " ".join(ast.literal_eval(after.value).split())
        for one, after in itertools.pairwise(body)
        if isinstance(one, ast.Assign)
        and isinstance(one.targets[0], ast.Name)
        and isinstance(after, ast.Expr)
    }


def right_values() -> dict[str, dict[str, int]]:
    """Return, by the name of a loss (`policy.clipped`), how many tests of each file of tests/core know it."""
    known = {
        f"{module.__name__.rpartition('.')[2]}.{name}" for module in modules() for name in of_module(module)
    }
    found: dict[str, dict[str, int]] = {name: {} for name in sorted(known)}
    for file in sorted((paths.ROOT / "tests" / "core").glob("test_*.py")):
        for names in _tests(file).values():
            for name in names & known:
                found[name][file.name] = found[name].get(file.name, 0) + 1
    return found


def page() -> str:
    """Return the page."""
    lines = [HEAD.format(properties="\n".join(f"* {name}" for name in check.PROPERTIES))]
    told, tests = sources(), right_values()
    for kind, title in KINDS.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| name | what it is | composed of | run | right values |",
            "|---|---|---|---|---|",
        ]
        for name, one in named().items():
            if one.rows == kind:
                lines.append(f"| {' | '.join(_cells(name, one, told, tests))} |")
    lines += ["", "## Put around a loss", "", "| name | what it does | right values |", "|---|---|---|"]
    for module in modules():
        short = module.__name__.rpartition(".")[2]
        for name, function in of_module(module).items():
            if _wraps(function):
                what = _cell(str(inspect.getdoc(function)).splitlines()[0])
                lines.append(f"| `{short}.{name}` | {what} | {_files(tests[f'{short}.{name}'])} |")
    return "\n".join(lines) + "\n"


def _wraps(function: Callable[..., Any]) -> bool:
    """Say whether a function is put around losses."""
    return bool({"loss", "parts"} & inspect.signature(function).parameters.keys())


def _cells(
    name: str, one: algorithms.Algorithm, told: Mapping[str, str], tests: Mapping[str, Mapping[str, int]]
) -> list[str]:
    """Return one row of a table."""
    links = list(chain(one.loss))
    inner = links[-1][0]
    what = told.get(name) or _source(inner)
    made = [f"`{_call(function, numbers)}`" for function, numbers in links]
    made.append(f"`{_call(*next(chain(one.reduce)))}`")
    if one.columns is not None:
        made.append(f"`{_call(*next(chain(one.columns)))}`")
    needs = [f"needs {', '.join(one.needs)}"] if one.needs else []
    rest = "; ".join([*needs, f"couples {one.couples}"])
    words = f"`{' '.join(run(name))}`" if run(name) else "from Python"
    return [f"`{name}`", _cell(what), f"{', '.join(made)}; {rest}", words, _files(tests[_short(inner)])]


def _cell(text: str) -> str:
    """Keep a text from ending its cell."""
    return text.replace("|", "\\|")


def _source(loss: Callable[..., Any]) -> str:
    """Return a loss' first line, and the paragraph of its docstring that names a paper."""
    text = str(inspect.getdoc(loss))
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    found = (re.search(r".*?\(arXiv:[\d.]+\)(, (eqs?|sec)\. \d+(\.\d+)?)?", part) for part in paragraphs)
    paper = next((one.group() for one in found if one), "")
    return f"{paragraphs[0]} {paper}." if paper else paragraphs[0]


def _call(function: Callable[..., Any], numbers: Mapping[str, Any]) -> str:
    """Write a function with the numbers that are bound to it."""
    values = ", ".join(
        f"{name}={_short(value) if callable(value) else value}" for name, value in numbers.items()
    )
    return _short(function) + (f"({values})" if values else "")


def _short(function: Any) -> str:
    """Name a function with its module."""
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def run(name: str) -> tuple[str, ...]:
    """Return the words that run an algorithm as it was published; none where only Python does.

    Args:
        name: from `named`.
    """
    kind = re.sub(r'preferences\["(.*)"\]', r"\1", name)
    flags = PUBLISHED.get(kind, ())
    if about.ALGORITHMS.get(name):
        return (name, *flags)
    if kind == "gdpo":
        return ("grpo", *flags)
    for algorithm, taken in (options.known("loss_type").choices or {}).items():
        if kind in taken:
            return (algorithm, "--loss_type", kind, *flags)
    return ()


def parts(function: Any) -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return what a loss, a reduction or columns are made of, each with every number, set or not.

    What only reports is left out.

    Args:
        function: of an algorithm.
    """
    return [(one, _whole(one, bound)) for one, bound in chain(function) if one is not composition.observed]


def _whole(function: Callable[..., Any], bound: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a function, its own where none are bound."""
    found = {n: p.default for n, p in inspect.signature(function).parameters.items()}
    numbers = {n: v for n, v in {**found, **bound}.items() if v is not inspect.Parameter.empty}
    return {n: v for n, v in numbers.items() if n not in ("loss", "parts")}


def _files(tests: Mapping[str, int]) -> str:
    """Write which files know a loss."""
    return ", ".join(
        f"{number} in {file.removeprefix('test_').removesuffix('.py')}" for file, number in tests.items()
    )


def _tests(file: pathlib.Path) -> dict[str, set[str]]:
    """Return the losses that each test of a file names, by itself or through what it uses of the file."""
    tree = ast.parse(file.read_text())
    parts: dict[str, set[str]] = {}
    for one in tree.body:
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            parts[one.name] = _names(one)
        elif isinstance(one, ast.Assign):
            parts |= {target.id: _names(one.value) for target in one.targets if isinstance(target, ast.Name)}
    return {name: _reached(name, parts) for name in parts if name.startswith("test_")}


def _names(node: ast.AST) -> set[str]:
    """Return the names and the attributes of modules in a piece of code; of an algorithm, its loss."""
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
            found.add(f"{one.value.id}.{one.attr}")
            made = getattr(algorithms, one.attr, None) if one.value.id == "algorithms" else None
            if made is algorithms.preference_mixture:
                found.add("pair_composition.mixture")
            if isinstance(made, algorithms.Algorithm):
                found.add(_short(list(chain(made.loss))[-1][0]))
    return found


def _reached(name: str, parts: Mapping[str, set[str]]) -> set[str]:
    """Return all names that a part of a file uses, directly or through other parts."""
    found, waiting = set[str](), [name]
    while waiting:
        more = parts.get(waiting.pop(), set()) - found
        found |= more
        waiting += more
    return found


if __name__ == "__main__":
    print(page(), end="")
