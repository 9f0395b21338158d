"""Frozen records that are also pytrees.

A record is an attrs class whose tensor fields are leaves and whose `static` fields are part of the tree's
structure. Three consumers see the same tree: `core.record.tree` (optree under our namespace), `torch.func`
(torch's own registry) and `torch.compile` (through the plain `__init__` written below: the one that attrs
generates breaks a full graph).

Only `tree` may be used on records: optree without the namespace silently sees one leaf.
"""

from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import attrs
import optree
from torch.utils import _pytree as torch_pytree

NAMESPACE = "espalier"
tree = optree.pytree.reexport(namespace=NAMESPACE, module="core.record.tree")

Class = TypeVar("Class", bound=type)


def static(*, default: Any = attrs.NOTHING) -> Any:
    """Declare a hashable field that is structure, not data."""
    return attrs.field(default=default, metadata={"static": True})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(attrs.field, static))
def record(cls: Class) -> Class:
    """Make `cls` a frozen, keyword-only attrs class without equality and register it as a pytree.

    Rebuilding skips `__init__`: a transform may rebuild a record around placeholders that would fail its
    checks.
    """
    made: Any = attrs.frozen(cls, kw_only=True, eq=False)
    made.__init__ = _plain_init(made)
    fields = attrs.fields(made)
    leaves = tuple(f.name for f in fields if not f.metadata.get("static"))
    structure = tuple(f.name for f in fields if f.metadata.get("static"))

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(value, n) for n in leaves], tuple(getattr(value, n) for n in structure)

    def build(children: Any, aux: Any) -> Any:
        value = object.__new__(made)
        for name, child in zip((*leaves, *structure), (*children, *aux), strict=True):
            object.__setattr__(value, name, child)
        return value

    def flatten_some(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        # To torch None is a leaf, which its transforms refuse; to optree it is structure, so here too.
        children, aux = flatten(value)
        return [c for c in children if c is not None], (*aux, tuple(c is not None for c in children))

    def build_some(children: Any, aux: Any) -> Any:
        rest = iter(children)
        return build([next(rest) if there else None for there in aux[-1]], aux[:-1])

    optree.register_pytree_node(
        made,
        lambda value: (*flatten(value), leaves),
        lambda aux, children: build(children, aux),
        namespace=NAMESPACE,
    )
    torch_pytree.register_pytree_node(
        made, flatten_some, build_some, serialized_type_name=f"{made.__module__}.{made.__qualname__}"
    )
    return made


def _plain_init(cls: type) -> Callable[..., None]:
    """Write the `__init__` that one would type by hand for `cls`."""
    fields = attrs.fields(cls)
    # Without a name of a module: torch.compile would look for these globals there.
    scope: dict[str, Any] = {}
    params, lines = [], []
    for f in fields:
        value = f.name
        if f.default is attrs.NOTHING:
            params.append(f.name)
        elif isinstance(f.default, attrs.Factory):  # type: ignore[arg-type]
            scope |= {f"_{f.name}": f.default.factory, "_missing": _MISSING}
            params.append(f"{f.name}=_missing")
            value = f"_{f.name}() if {f.name} is _missing else {f.name}"
        else:
            scope[f"_{f.name}"] = f.default
            params.append(f"{f.name}=_{f.name}")
        lines.append(f"    object.__setattr__(self, {f.name!r}, {value})")
    if hasattr(cls, "__attrs_post_init__"):
        lines.append("    self.__attrs_post_init__()")
    head = f"def __init__(self, *, {', '.join(params)}):" if params else "def __init__(self):"
    exec("\n".join([head, *(lines or ["    pass"])]), scope)
    return scope["__init__"]


_MISSING = object()
