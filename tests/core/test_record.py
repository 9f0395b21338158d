"""Records are frozen, are pytrees for optree and torch alike, and a rebuild skips their checks."""

import attrs
import optree
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

from core import record


@record.record
class Point:
    """Two leaves and a name."""

    x: Tensor
    y: Tensor | None = None
    name: str = record.static(default="p")

    def __attrs_post_init__(self):
        if self.name == "bad":
            raise ValueError("the name is bad")


@record.record
class Line:
    """Records inside a record, and a default that is made anew each time."""

    start: Point
    stops: dict[str, Point] = attrs.field(factory=dict)


def line() -> Line:
    """A line of three numbers."""
    return Line(
        start=Point(x=torch.tensor(1.0)), stops={"a": Point(x=torch.tensor(2.0), y=torch.tensor(3.0))}
    )


def test_leaves_are_the_tensors_in_order_and_static_fields_are_structure():
    assert [leaf.item() for leaf in record.tree.leaves(line())] == [1.0, 2.0, 3.0]
    renamed = attrs.evolve(line(), start=attrs.evolve(line().start, name="q"))
    assert record.tree.structure(renamed) != record.tree.structure(line())


def test_optree_without_the_namespace_sees_one_leaf():
    assert len(optree.tree_leaves(line())) == 1


def test_torch_sees_the_same_leaves():
    assert [leaf.item() for leaf in torch_pytree.tree_leaves(line())] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("transform", [record.tree.map, torch_pytree.tree_map])
def test_a_map_gives_a_record_of_the_same_class_and_structure(transform):
    doubled = transform(lambda leaf: leaf * 2, line())
    assert isinstance(doubled, Line)
    assert isinstance(doubled.stops["a"], Point)
    assert doubled.stops["a"].y.item() == 6.0
    assert doubled.start.name == "p"
    assert doubled.start.y is None


def test_paths_name_every_leaf():
    paths, _, _ = record.tree.flatten_with_path(line())
    assert paths == [("start", "x"), ("stops", "a", "x"), ("stops", "a", "y")]


def test_fields_can_be_neither_set_nor_given_by_position():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        line().start = None
    with pytest.raises(TypeError):
        Point(torch.tensor(1.0))
    with pytest.raises(TypeError, match="x"):
        Point()


def test_two_records_are_equal_only_when_they_are_the_same():
    one = line()
    assert one == one
    assert one != line()


def test_evolve_runs_the_checks_and_a_rebuild_does_not():
    with pytest.raises(ValueError, match="bad"):
        attrs.evolve(line().start, name="bad")
    leaves, structure = record.tree.flatten(line())
    assert record.tree.unflatten(structure, [object() for _ in leaves]).start.name == "p"


def test_a_rebuild_skips_checks_that_its_leaves_would_fail():
    @record.record
    class Picky:
        x: Tensor

        def __attrs_post_init__(self):
            assert isinstance(self.x, Tensor)

    rebuilt = record.tree.map(lambda leaf: "placeholder", Picky(x=torch.ones(1)))
    assert rebuilt.x == "placeholder"


def test_a_default_that_is_made_is_made_for_each_record():
    assert Line(start=line().start).stops is not Line(start=line().start).stops


def test_a_record_without_fields_is_a_tree_without_leaves():
    @record.record
    class Nothing:
        pass

    assert record.tree.leaves(Nothing()) == []


def test_torch_func_differentiates_through_a_record():
    def energy(value):
        return value.start.x**2 + value.stops["a"].x * value.stops["a"].y

    grads = torch.func.grad(energy)(line())
    assert isinstance(grads, Line)
    assert [leaf.item() for leaf in record.tree.leaves(grads)] == [2.0, 3.0, 2.0]


@pytest.mark.plain
def test_a_record_goes_through_a_full_compiled_graph():
    def double(value):
        start = Point(x=value.start.x * 2, name=value.start.name)
        return Line(start=start, stops={n: attrs.evolve(p, y=None) for n, p in value.stops.items()})

    compiled = torch.compile(double, backend="eager", fullgraph=True)
    assert compiled(line()).start.x.item() == 2.0
    assert compiled(line()).stops["a"].y is None
