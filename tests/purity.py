"""Finds what a pure function may not do, by reading source: effects, hidden inputs, written arguments."""

import ast
import re
from collections.abc import Iterator

import attrs

EFFECTS = {"print", "open", "exec", "eval", "input", "setattr", "delattr", "breakpoint", "__import__"}
MODULES = {
    "asyncio", "datetime", "http", "io", "logging", "multiprocessing", "os", "pathlib", "pickle", "random",
    "secrets", "shutil", "socket", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
    "torch.distributed", "torch.multiprocessing",
}  # fmt: skip
# Chains that begin so are device choice, process groups or hidden state.
PLACES = re.compile(
    r"torch\.(distributed|cuda|backends|random|hub|set_|manual_seed|seed|initial_seed|get_rng|get_default"
    r"|use_deterministic)|(np|numpy)\.random\.(seed|rand|randn|randint|choice|shuffle|permutation|random|normal)"
)
# A draw is pure when the generator is handed in.
DRAWS = re.compile(
    r"torch\.(rand|randn|randint|randperm|normal|multinomial|bernoulli)$|(.*\.)?(np|numpy)\.random\.default_rng$"
)
# PyTorch hands `ctx` to both halves of a custom backward to be written to: it belongs to the call.
REMEMBERS = "ctx"
# What these return may be the same memory: `x.view(-1).add_(1)` writes to x, `x.clone().add_(1)` does not.
VIEWS = {
    "as_strided", "chunk", "contiguous", "detach", "diagonal", "double", "expand", "flatten", "float", "get",
    "items", "movedim", "narrow", "numpy", "permute", "ravel", "reshape", "select", "split", "squeeze", "to",
    "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "values", "view", "view_as",
}  # fmt: skip
IN_PLACE = re.compile(r"[a-z]\w*[a-z0-9]_$")


@attrs.frozen
class Finding:
    """One place: the function it stands in, which rule it breaks, and where."""

    function: str
    rule: str
    line: int


def chain(node: ast.expr) -> str:
    """Return `a.b.c` for an attribute chain (subscripts are passed over), or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript):
        return chain(node.value)
    if isinstance(node, ast.Attribute):
        base = chain(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def root(node: ast.expr) -> str:
    """Return the name at the root of a chain of attributes, subscripts and methods that return views."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _same(node.func.attr):
            node = node.func.value
        else:
            return ""
    return node.id


def _same(method: str) -> bool:
    """Whether what a method returns may share memory with what it was called on."""
    return method in VIEWS or bool(IN_PLACE.match(method))


def findings(source: str) -> list[Finding]:
    """Return every finding in a module's source."""
    return sorted(_walk(ast.parse(source), "", frozenset()), key=lambda finding: finding.line)


def _walk(node: ast.AST, function: str, arguments: frozenset[str]) -> Iterator[Finding]:
    """Go down a tree; `arguments` are the names in sight that belong to a caller."""
    for child in ast.iter_child_nodes(node):
        inside, mine = function, arguments
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            name = getattr(child, "name", "lambda")
            inside = f"{function}.{name}" if function else name
            mine = arguments | _parameters(child.args)
            mine |= _aliases(child, mine)
        elif isinstance(child, ast.ClassDef):
            inside = f"{function}.{child.name}" if function else child.name
        for rule in _rules(child, mine, bool(function)):
            yield Finding(inside or "<module>", rule, child.lineno)
        yield from _walk(child, inside, mine)
        # `rows = list(rows)` as a statement of the function's own: from here on the name is not the caller's.
        if isinstance(node, ast.FunctionDef) and isinstance(child, ast.Assign) and not root(child.value):
            arguments -= {target.id for target in child.targets if isinstance(target, ast.Name)}


def _parameters(given: ast.arguments) -> frozenset[str]:
    """Return the names of a function's parameters."""
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return frozenset(one.arg for one in every if one) - {REMEMBERS}


def _aliases(function: ast.AST, arguments: frozenset[str]) -> frozenset[str]:
    """Return names that are bound to a piece of an argument: `rows = batch.rows`."""
    found = set(arguments)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and root(node.value) in found:
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found - arguments)


def _rules(node: ast.AST, arguments: frozenset[str], nested: bool) -> Iterator[str]:
    """Yield the rules that this one node breaks."""
    if isinstance(node, ast.Import):
        yield from (f"import {alias.name}" for alias in node.names if _forbidden(alias.name))
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (f"import {name}" for name in names[:1] if _forbidden(name))
        yield from (f"import {name}" for name in names[1:] if name in MODULES and not _forbidden(names[0]))
    elif isinstance(node, ast.Global | ast.Nonlocal):
        yield "global or nonlocal"
    elif isinstance(node, ast.ClassDef):
        yield from ("nn.Module" for base in node.bases if chain(base).endswith("nn.Module"))
    elif isinstance(node, ast.Call):
        yield from _calls(node, arguments)
    elif isinstance(node, ast.Expr):
        called = node.value
        if nested and isinstance(called, ast.Call) and isinstance(called.func, ast.Attribute):
            yield from ("method for its effect" for _ in "." if root(called.func) in arguments)
    else:
        yield from _writes(node, arguments)


def _forbidden(module: str) -> bool:
    """Whether a module brings effects or hidden inputs."""
    return module in MODULES or module.split(".")[0] in MODULES or module.startswith("torch.distributed.")


def _calls(node: ast.Call, arguments: frozenset[str]) -> Iterator[str]:
    """Yield what a call does that it may not."""
    name = chain(node.func)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if isinstance(node.func, ast.Name) and name in EFFECTS:
        yield f"calls {name}"
    if name == "object.__setattr__":
        yield "writes an attribute"
    if PLACES.match(name):
        yield f"calls {name}"
    if DRAWS.match(name) and not (keywords.get("generator") or ("default_rng" in name and node.args)):
        yield "draws without a key"
    if name.rpartition(".")[2] in ("dropout", "cuda") and "." in name:
        yield f"calls {name}"
    if "out" in keywords and root(keywords["out"]) in arguments:
        yield "writes to an argument"
    if isinstance(node.func, ast.Attribute) and IN_PLACE.match(node.func.attr):
        # torch.nn.init.zeros_(weights) writes to what it is given, weights.zero_() to what it stands on.
        touched = [root(node.func), *(root(value) for value in node.args[:1])]
        yield from ("writes to an argument" for name in touched[:2] if name in arguments)


def _writes(node: ast.AST, arguments: frozenset[str]) -> Iterator[str]:
    """Yield what an assignment or deletion changes that it may not."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    for target in (leaf for each in targets for leaf in _leaves(each)):
        # `x += 1` writes into the tensor that the caller holds; `x = 1` only forgets it.
        inside = isinstance(target, ast.Subscript) or isinstance(node, ast.AugAssign)
        if isinstance(target, ast.Attribute) and root(target) != REMEMBERS:
            yield "writes an attribute"
        elif inside and root(target) in arguments:
            yield "writes to an argument"


def _leaves(target: ast.expr) -> Iterator[ast.expr]:
    """Yield the single targets of a nested one."""
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _leaves(element)
    else:
        yield target.value if isinstance(target, ast.Starred) else target
