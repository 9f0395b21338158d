"""The few shapes that a device will see: how many nodes a forward has, and how many edges its head."""

from collections.abc import Sequence

import attrs


@attrs.frozen(kw_only=True)
class Sizes:
    """Planned sizes, rising; forward i has `nodes[i]` nodes and `edges[i]` edges, padding among them.

    Attributes:
        nodes: of a forward.
        edges: of its head.
    """

    nodes: tuple[int, ...]
    edges: tuple[int, ...]


def fitting(sizes: Sizes, nodes: int, edges: int) -> tuple[int, int]:
    """Return the least planned size that holds a forward, in nodes and edges.

    >>> fitting(Sizes(nodes=(128, 512), edges=(64, 512)), 100, 70)
    (512, 512)

    Args:
        sizes: the plan.
        nodes, edges: of the forward.

    Raises:
        ValueError: it is larger than every planned size.
    """
    for room, head in zip(sizes.nodes, sizes.edges, strict=True):
        if nodes <= room and edges <= head:
            return room, head
    raise ValueError(
        f"a forward of {nodes} tokens, {edges} of them predicted, came; the largest planned size is "
        f"{sizes.nodes[-1]} with {sizes.edges[-1]}. Plan with all forwards, or lower the token budget to it."
    )


def heads(forwards: Sequence[tuple[int, int]], rooms: Sequence[int], *, step: int, whole: bool) -> Sizes:
    """Plan edges beside planned numbers of nodes: the most that any known forward of each has.

    A forward with more goes to the next size; the last one has as many edges as nodes unless all are known.

    Args:
        forwards: (nodes, edges) of those that are known.
        rooms: planned numbers of nodes, rising; the last holds every forward.
        step: what numbers of edges are multiples of.
        whole: no other forward will come.
    """
    most = [0] * len(rooms)
    for nodes, edges in forwards:
        place = next(i for i, room in enumerate(rooms) if room >= nodes)
        most[place] = max(most[place], edges)
    found, least = [], 1
    for room, edges in zip(rooms, most, strict=True):
        least = max(least, edges)
        found.append(min(room, -(-least // step) * step))
    if not whole:
        found[-1] = rooms[-1]
    return Sizes(nodes=tuple(rooms), edges=tuple(found))
