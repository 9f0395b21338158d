"""What takes the memory of a training step: plain arithmetic on a model's shape and on what saves memory.

Most is held at one of a few moments: at the head, whose logits stand beside all that the layers kept; in the
backward of the last layer and of the first, between which what layers kept gives way to gradients; in that of
the embedding; in the update. `plan` says for each of them what takes how much, and the rest follows from it.
An estimate: allocators, kernels' workspaces and fragmentation come on top.
"""

from collections.abc import Mapping

import attrs

from core.plan import cost

STATE = ("weights", "masters", "moments", "beside")
"""Parts that are there between steps too."""
PARTS = (*STATE, "gradients", "activations", "layer", "head", "keys_values", "gathered", "packed")
"""Parts in the order in which they are told: see `plan`."""
MOMENTS = ("head", "last layer", "first layer", "embedding", "update")

Plan = Mapping[str, Mapping[str, int]]
"""Bytes by moment and part."""


@attrs.frozen(kw_only=True)
class Levers:
    """How a step is run, as far as its memory depends on it.

    Attributes:
        adapter: parameters, float32 or better, that are trained in the place of the model's; None: those are.
        head_columns: under an adapter, columns of the output head's matrix that is trained: the rank of one
            beside it, all where the head is trained whole, 0 where it is frozen.
        checkpointing: what the backward makes again: nothing (False), layers (True), or layers but for their
            attention (`selective`).
        chunk: positions that a feed-forward part runs at a time; 0: all.
        offloaded: what layers keep waits in the memory of the host, and the device has another one.
        num_shards: over how many ranks parameters, gradients and moments are split.
        summed: several ranks hold them whole, and gradients go into one message that adds them up.
        one_pack: a step has one pack, so no gradients of earlier ones are held while it runs.
        clipped: the update makes scaled gradients beside the given ones.
        beside: bytes of frozen models that are held too: a reference, a teacher.
        tile_bytes: as of `core.head.score`.
        packed: most bytes of a second copy of the matrices, laid out for completions to be drawn with.
    """

    adapter: int | None = None
    head_columns: int = 0
    checkpointing: cost.Checkpointing = False
    chunk: int = 0
    offloaded: bool = False
    num_shards: int = 1
    summed: bool = False
    one_pack: bool = False
    clipped: bool = True
    beside: int = 0
    tile_bytes: int = 1 << 26
    packed: int = 0


def plan(shape: cost.ModelShape, nodes: int, levers: Levers, *, shared: int = 0, drawn: int = 0) -> Plan:
    """Return the bytes of every part at every moment of a step over a pack, each of its nodes predicted.

        weights      e parameters                            gradients    of earlier packs, and so far of this
        masters      4 trained where e < 4                   activations  what layers keep for the backward
        moments      2 w trained                             layer        the widest part of one layer
        beside       frozen models                           head         tiles of logits, last states, sums
        keys_values  what pieces of a forest share           gathered     what is whole of split parameters
        packed       matrices to draw with, once more

    e is the shape's element_bytes and w is 4 or e, whichever is more. What a layer keeps of a node is, of
    `h` hidden and `i` inner numbers, in the order of its forward

        e (h + h) + norm,  e (q + k + v + out) + 4 heads,  e (h + h) + norm,  e 4 i (2 i where nothing gates)

    with norm = 4 h where e < 4, for norms run in float32, and e h less in each under an adapter. Layers that
    are made again keep e h, and `selective` e out + 4 heads beside. The backward of a feed-forward part has
    2 i more at once, and h for each of the gradients on the two ways around it.

    Args:
        shape: of the model.
        nodes: tokens in the pack, or in one piece of it.
        levers: how the step is run.
        shared: nodes that pieces of a forest keep for one another.
        drawn: nodes of prompts and completions whose keys and values are held while these are drawn.

    Returns:
        By moment, then by part: 0 where it takes nothing. Where something is drawn, `drawing` is a moment.
    """
    state, made = _state(shape, levers), _gradients(shape, levers)
    kept, layer = _kept(shape, nodes, levers), _layer(shape, nodes, levers)
    gathered = _gathered(shape, levers)
    lasting = shape.layers * (kept[0] + (0 if levers.offloaded else kept[1]))
    stored = 0 if levers.offloaded else dormant(shape, shared)
    beside = {m: {"gradients": made[m], "gathered": gathered[m]} for m in MOMENTS}
    head = _head(shape, nodes, levers)
    found = {
        "head": _row(state, **beside["head"], activations=lasting, head=head, keys_values=stored),
        "last layer": _row(
            state, **beside["last layer"], activations=lasting, layer=layer, keys_values=stored
        ),
        "first layer": _row(
            state, **beside["first layer"], activations=sum(kept), layer=layer, keys_values=stored
        ),
        "embedding": _row(state, **beside["embedding"], keys_values=stored),
        "update": _row(state, **beside["update"]),
    }
    if drawn:
        whole = shape.element_bytes * shape.parameters if levers.num_shards > 1 else 0
        values = 2 * shape.layers * drawn * shape.kv_heads * shape.head_dim * shape.element_bytes
        matrices = shape.layers * cost.layer_weights(shape) + shape.vocab * shape.hidden
        packed = min(levers.packed, shape.element_bytes * matrices)
        found["drawing"] = _row(state, keys_values=values, gathered=whole, packed=packed)
    return found


def _row(state: Mapping[str, int], **parts: int) -> dict[str, int]:
    """Return every part at a moment: what is there between steps, what is told, and 0 for the rest."""
    return {**dict.fromkeys(PARTS, 0), **state, **parts}


def peak(shape: cost.ModelShape, nodes: int, levers: Levers, *, shared: int = 0) -> int:
    """Return the most bytes that a step holds at once; Args as of `plan`."""
    return max(sum(parts.values()) for parts in plan(shape, nodes, levers, shared=shared).values())


def hosted(shape: cost.ModelShape, nodes: int, levers: Levers, *, shared: int = 0) -> int:
    """Return the bytes that wait in the host's memory in the place of the device's; Args as of `plan`."""
    if not levers.offloaded:
        return 0
    return shape.layers * _kept(shape, nodes, levers)[1] + dormant(shape, shared)


def budget(shape: cost.ModelShape, memory_bytes: int, levers: Levers, *, reserve: float = 0.1) -> int:
    """Return the largest pack, in tokens, whose `peak` fits.

    Args:
        shape: of the model.
        memory_bytes: memory of one device.
        levers: how steps are run.
        reserve: share of the memory that is left free for what the estimate does not know, in [0, 1).

    Returns:
        The budget; 0 where not even the parameters and their state fit.
    """
    room, low, high = int((1 - reserve) * memory_bytes), 0, 1
    while peak(shape, high, levers) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(shape, middle, levers) <= room else (low, middle)
    return low


def dormant(shape: cost.ModelShape, shared: int) -> int:
    """Return the memory of what pieces of a forest keep for one another: keys, values and their gradients.

        layers shared 2 kv d (e + max(e, 4))

    It is the device's, or the host's where activations wait there: that much more then fits a pack.

    Args:
        shape: of the model; e is its element_bytes.
        shared: nodes that later pieces attend to.
    """
    size = shape.element_bytes
    return shape.layers * shared * 2 * shape.kv_heads * shape.head_dim * (size + max(size, 4))


def _state(shape: cost.ModelShape, levers: Levers) -> dict[str, int]:
    """Return what is there between steps."""
    size, wide = shape.element_bytes, max(shape.element_bytes, 4)
    whole = levers.adapter is None
    trained = shape.parameters if levers.adapter is None else levers.adapter

    def part(number: int) -> int:
        return -(-number // levers.num_shards)

    return {
        "weights": part(size * shape.parameters + (0 if whole else wide * trained)),
        "masters": part(4 * trained) if whole and size < 4 else 0,
        "moments": part(2 * wide * trained),
        "beside": levers.beside,
    }


def _gradients(shape: cost.ModelShape, levers: Levers) -> dict[str, int]:
    """Return the gradients that are held at each moment."""
    wide, whole = max(shape.element_bytes, 4), levers.adapter is None
    size = shape.element_bytes if whole else wide  # in one pack; sums over packs are wide
    trained = shape.parameters if levers.adapter is None else levers.adapter
    columns = _columns(shape, levers)
    matrix = size * shape.vocab * columns
    earlier = 0 if levers.one_pack else -(-wide * trained // levers.num_shards)
    every = -(-size * trained // levers.num_shards)
    one = -(-size * cost.layer_weights(shape) // levers.num_shards) if whole else 0
    # Both uses of a tied matrix give a gradient before these are added up; an untied one's is among all.
    twice = matrix if shape.tied and columns == shape.hidden else 0
    # Narrow gradients are widened one beside the other; a message is a copy; clipping scales into new memory.
    copied = wide if levers.clipped or levers.summed else size if size < wide else 0
    update = (wide + copied) * trained
    return {
        "head": earlier,
        "last layer": earlier + matrix + one,
        "first layer": earlier + every,
        "embedding": earlier + every + twice,
        "update": -(-update // levers.num_shards),
    }


def _kept(shape: cost.ModelShape, nodes: int, levers: Levers) -> tuple[int, int]:
    """Return what a layer keeps for its backward: what stays on the device always, and what may leave."""
    size = shape.element_bytes
    attended = (size * shape.head_dim + 4) * shape.heads
    if levers.checkpointing == "selective":
        return nodes * attended, nodes * size * shape.hidden
    if levers.checkpointing:
        return 0, nodes * size * shape.hidden
    return 0, _block(shape, nodes, levers)


def _block(shape: cost.ModelShape, nodes: int, levers: Levers) -> int:
    """Return what the backward reads of one layer."""
    size, hidden = shape.element_bytes, shape.hidden
    norm = 4 * hidden if size < 4 else 0
    attention = size * shape.head_dim * 2 * (shape.heads + shape.kv_heads) + 4 * shape.heads
    # Only a scale that trains needs what it scaled.
    each = 2 * ((3 if levers.adapter is None else 2) * size * hidden + norm) + attention
    if not _in_chunks(nodes, levers):
        each += size * (4 if shape.gated else 2) * shape.intermediate
    return nodes * each


def _layer(shape: cost.ModelShape, nodes: int, levers: Levers) -> int:
    """Return what the backward of one layer takes beside what layers keep."""
    size, hidden, inner = shape.element_bytes, shape.hidden, shape.intermediate
    again = _block(shape, nodes, levers) if levers.checkpointing or levers.offloaded else 0
    around = 2 * size * hidden * nodes
    if not _in_chunks(nodes, levers):
        return again + around + 2 * size * inner * nodes
    inside = (6 if shape.gated else 4) * size * inner * levers.chunk
    # Each chunk gives a gradient of the whole matrices, which is added to that of the others.
    return again + around + inside + (size * hidden * inner if levers.adapter is None else 0)


def _in_chunks(nodes: int, levers: Levers) -> bool:
    """Say whether the feed-forward part runs in chunks, and keeps nothing of its inner width."""
    return 0 < levers.chunk < nodes


def _head(shape: cost.ModelShape, nodes: int, levers: Levers) -> int:
    """Return what the head takes: two tiles of logits, the last states and their gradients, a wide sum."""
    size, wide, hidden = shape.element_bytes, max(shape.element_bytes, 4), shape.hidden
    tile = min(max(levers.tile_bytes, wide * shape.vocab), wide * shape.vocab * nodes)
    columns = _columns(shape, levers)
    beside = columns if columns < hidden else 0
    # The sum becomes narrow; an adapter's matrix is wide, and the head reads a narrow copy.
    sums = (wide + (size if size < wide else 0)) * shape.vocab * columns
    copied = size * shape.vocab * beside if size < wide else 0
    states = nodes * (5 * size * hidden + 2 * size * beside + (4 * hidden if size < 4 else 0))
    return 2 * tile + sums + copied + states


def _columns(shape: cost.ModelShape, levers: Levers) -> int:
    """Return the columns of the output head's matrix that get a gradient."""
    return shape.hidden if levers.adapter is None else levers.head_columns


def _gathered(shape: cost.ModelShape, levers: Levers) -> dict[str, int]:
    """Return what is whole of split parameters, and of their gradients on the way to their parts."""
    if levers.num_shards == 1:
        return dict.fromkeys(MOMENTS, 0)
    size, wide = shape.element_bytes, max(shape.element_bytes, 4)
    one = cost.layer_weights(shape)
    rest = shape.parameters - shape.layers * one
    # Messages hold all parts side by side once more.
    layer = rest * size + 2 * one * size + (2 * one * wide if levers.adapter is None else 0)
    beside = rest * size + (2 * rest * wide if levers.adapter is None else 0)
    return {
        "head": rest * size,
        "last layer": layer,
        "first layer": layer,
        "embedding": beside,
        "update": 0,
    }
