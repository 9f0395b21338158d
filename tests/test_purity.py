"""The core is pure: values in, values out."""

import pytest

from tests import paths, purity

CORE = sorted((paths.ROOT / "core").rglob("*.py"))

# (file, function, rule) -> why it is right there. An entry that is no longer needed fails below.
ALLOWED = {
    ("core/record.py", "_plain_init", "calls exec"): "writes the __init__ that one would type by hand",
    ("core/record.py", "record", "writes an attribute"): "gives a class its __init__ before anyone sees it",
    ("core/record.py", "record.build", "writes an attribute"): "fills a record made one line above",
    ("core/differences.py", "_Held.__init__", "writes an attribute"): "made and forgotten in one call",
    ("core/differences.py", "_Held.__torch_function__", "method for its effect"): "as above: its own list",
    ("core/head.py", "_pull", "writes to an argument"): "takes over a tile that its callers made for it",
    ("core/head.py", "add", "writes to an argument"): "as above, and adds to sums that its callers made",
    ("core/places.py", "put", "writes to an argument"): "fills an output that its caller made",
    ("core/places.py", "put", "method for its effect"): "as above",
    ("core/places.py", "add", "writes to an argument"): "adds to a sum that its caller made",
    ("core/places.py", "add", "method for its effect"): "as above",
}


def found() -> dict[tuple[str, str, str], int]:
    """Return every finding in the core with its line."""
    return {
        (str(path.relative_to(paths.ROOT)), one.function, one.rule): one.line
        for path in CORE
        for one in purity.findings(path.read_text())
    }


def test_core_has_no_effects_no_hidden_inputs_and_writes_to_no_argument():
    unexpected = [
        f"{key[0]}:{line} {key[1]}: {key[2]}" for key, line in found().items() if key not in ALLOWED
    ]
    assert not unexpected, "\n".join(unexpected)


def test_every_allowance_is_still_needed():
    assert set(ALLOWED) <= set(found())


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    x.add_(1)\n    return x",
        "def f(x):\n    return x.view(-1).mul_(2)",
        "def f(batch):\n    rows = batch.rows\n    rows[0] = 1\n    return rows",
        "def f(x):\n    x += 1\n    return x",
        "def f(x):\n    return torch.nn.init.zeros_(x)",
        "def f(x, y):\n    return torch.add(x, y, out=x)",
        "def f(names):\n    names.append(1)\n    return names",
        "def f(x):\n    def g():\n        x[0] = 1\n    return g",
        "def f(state):\n    state.step = 1",
        "def f(a, b):\n    (a.x, b) = 1, 2",
        "def f(x):\n    print(x)",
        "def f():\n    return open('a')",
        "def f():\n    global x\n    x = 1",
        "import time",
        "from os import path",
        "from torch import distributed",
        "import torch.distributed as dist",
        "def f():\n    return torch.randn(3)",
        "def f(x):\n    return torch.nn.functional.dropout(x)",
        "def f():\n    return np.random.rand(3)",
        "def f():\n    return np.random.default_rng()",
        "def f(x):\n    return x.cuda()",
        "def f():\n    return torch.cuda.is_available()",
        "class A(torch.nn.Module):\n    pass",
        "def f(x):\n    del x[0]",
        "def f(rows):\n    rows += [1]\n    rows = list(rows)\n    return rows",
        "def f(rows):\n    rows = rows.view(-1)\n    rows[0] = 1\n    return rows",
    ],
)
def test_each_kind_of_impurity_is_found(source):
    assert purity.findings(source)


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    y = x + 1\n    y += 2\n    y.mul_(3)\n    return y",
        "def f(x):\n    table = torch.zeros(3)\n    table[0] = x[0]\n    return table",
        "def f(names):\n    kept = []\n    kept.append(names[0])\n    return kept",
        "def f(key):\n    return torch.rand(3, generator=key)",
        "def f(seed):\n    return np.random.default_rng(seed)",
        "def f(model, x):\n    return model.predict(x).sum()",
        "def forward(ctx, x):\n    ctx.save_for_backward(x)\n    ctx.size = 1\n    return x + 1",
        "def f(rows):\n    rows = list(rows)\n    rows += [1]\n    return rows",
        "def f(x):\n    return x.clone().requires_grad_()",
        "import math\nimport torch",
    ],
)
def test_writing_to_what_a_function_made_itself_is_pure(source):
    assert purity.findings(source) == []
