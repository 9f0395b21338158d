"""Attention over a forest as blocks: one operator over an integer table, on kernels that know log-sum-exps.

Each block is one call of a kernel that returns its softmax and the log-sum-exp of it; what a query gets from
several blocks is merged by these, exactly. Backward runs each block with the *merged* output and log-sum-exp:
the parts then add up. A sink is one more score in the softmax, so it is merged like a block without values.

Two kernels serve it, chosen by where the tensors are: the CPU's takes a mask, that of CUDA and ROCm takes
windows and runs of lengths. What a block is stands in `rectangles` of `core.attention`.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core import places, precision
from core.plan import spans

# Of the largest number: a row that sees nothing of a block gets a weight of exactly 0, where -inf gives NaN.
FAR = -0.25
# The kernel of CUDA and ROCm reads rows of so many numbers.
ALIGNED = 8


class Tables(NamedTuple):
    """Where blocks lie, all on the host.

    Attributes:
        blocks: (kind, query start, stop, key start, stop), kinds as in `spans`.
        query_depths, key_depths: positions in the sequences.
        sizes: nodes of each key's subtree; read by masked blocks.
        window: how many tokens back a query sees; 0: all.
    """

    blocks: Tensor
    query_depths: Tensor
    key_depths: Tensor
    sizes: Tensor | None
    window: int


class Cuts(NamedTuple):
    """Runs that one call takes, counted from the first.

    Attributes:
        queries, keys: where runs begin, and where the last ends, int32 `[runs + 1]` beside the heads.
        most_queries, most_keys: of the longest run.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


class Block(NamedTuple):
    """One call of a kernel.

    Attributes:
        first: it starts the softmax of its queries; the others are merged into it.
        causal: query i of it sees keys up to i.
        queries, keys: what it covers; of a batch, several runs each.
        mask: added to the scores; None: nothing is.
        left: as flash kernels count windows: query i sees keys from i + keys - queries - left; -1: all.
        cuts: the runs it is made of; None: the kernel does not ask.
    """

    first: bool
    causal: bool
    queries: places.Place
    keys: places.Place
    mask: Tensor | None = None
    left: int = -1
    cuts: Cuts | None = None


class Kernel(NamedTuple):
    """What runs blocks.

    Attributes:
        dtypes: what queries, keys and values may be.
        walk: tables and queries to blocks.
        forward: (query, key, value, block, scale) to (output, log-sum-exp).
        backward: (gradient, query, output, log-sum-exp, key, value, block, scale) to three gradients.
        aligned: widths of heads are padded to a multiple of this.
    """

    dtypes: tuple[torch.dtype, ...]
    walk: Callable[[Tables, Tensor], Iterator[Block]]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    aligned: int = 1


def takes(device: str, dtype: torch.dtype) -> bool:
    """Say whether the kernel of a device runs blocks of a dtype.

    Args:
        device: torch's name of it.
        dtype: of queries, keys and values.

    Raises:
        ValueError: the device has no kernel.
    """
    return dtype in _kernel(device).dtypes


def _kernel(device: str) -> Kernel:
    """Return what runs blocks on a device."""
    if device not in KERNELS:
        raise ValueError(
            f"attention in blocks came on the device {device}; kernels of it are there for "
            f"{' and '.join(KERNELS)}: take the dense mask."
        )
    return KERNELS[device]


@torch.library.custom_op("espalier::attention_blocks", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    blocks: Tensor,
    query_depths: Tensor,
    key_depths: Tensor,
    sizes: Tensor | None,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Run the blocks; the output and its log-sum-exp."""
    kernel = _kernel(query.device.type)
    wide = precision.wide(query.dtype)
    tables = Tables(blocks, query_depths, key_depths, sizes, window)
    q, k, v = (_aligned(t, kernel.aligned) for t in (query, key, value))
    out, lse = torch.empty_like(q, dtype=wide), query.new_empty(query.shape[:3], dtype=wide)
    for block in kernel.walk(tables, query):
        rows, seen = block.queries, block.keys
        part, part_lse = kernel.forward(
            places.taken(q, rows), places.taken(k, seen), places.taken(v, seen), block, scale
        )
        if block.first:
            places.put(out, rows, part)
            places.put(lse, rows, part_lse)
        else:
            earlier = lse[:, :, rows]
            out[:, :, rows].lerp_(part.to(wide), (part_lse - earlier).sigmoid()[..., None])
            lse[:, :, rows] = torch.logaddexp(earlier, part_lse)
    if sinks is not None:
        merged = torch.logaddexp(lse, sinks.to(wide)[None, :, None])
        out, lse = out * (lse - merged).exp()[..., None], merged
    return _like(out, query), lse


@torch.library.custom_op("espalier::attention_blocks_backward", mutates_args=())
def pull_back(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    blocks: Tensor,
    query_depths: Tensor,
    key_depths: Tensor,
    sizes: Tensor | None,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run each block's backward; gradients by query, key, value and sinks (empty where there are none)."""
    kernel = _kernel(query.device.type)
    wide = precision.wide(query.dtype)
    tables = Tables(blocks, query_depths, key_depths, sizes, window)
    g, q, k, v, o = (_aligned(t, kernel.aligned) for t in (grad, query, key, value, out))
    by_query = torch.empty_like(q, dtype=wide)
    by_key, by_value = (torch.zeros_like(t, dtype=wide) for t in (k, v))
    for block in kernel.walk(tables, query):
        rows, seen = block.queries, block.keys
        felt = places.without_filling(places.taken(g, rows), rows)
        of_queries = [places.taken(t, rows) for t in (q, o, lse)]
        parts = kernel.backward(felt, *of_queries, places.taken(k, seen), places.taken(v, seen), block, scale)
        (places.put if block.first else places.add)(by_query, rows, parts[0])
        places.add(by_key, seen, parts[1])
        places.add(by_value, seen, parts[2])
    by_sinks = query.new_empty(0)
    if sinks is not None:
        # It has no value, so by its score: -p_sink (gradient . output), summed over the queries.
        felt = (grad.to(wide) * out).sum(-1)
        by_sinks = -((sinks.to(wide)[None, :, None] - lse).exp() * felt).sum((0, 2)).to(sinks.dtype)
    return _like(by_query, query), _like(by_key, key), _like(by_value, value), by_sinks


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    wide = precision.wide(query.dtype)
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=wide)


@pull_back.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    by_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), by_sinks


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, blocks, query_depths, key_depths, sizes, scale, window = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, blocks, query_depths, key_depths, sizes)
    ctx.numbers = (scale, window)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *grads, by_sinks = pull_back(grad, *ctx.saved_tensors, *ctx.numbers)
    return (*grads, by_sinks if ctx.needs_input_grad[3] else None, *(None,) * 6)


attend.register_autograd(_differentiate, setup_context=_remember)

OPERATOR = torch.ops.espalier.attention_blocks.default
"""By this name whoever decides what is kept for the backward knows it."""


def _aligned(heads: Tensor, multiple: int) -> Tensor:
    """Fill up the width of heads with zeros, which change no product."""
    missing = -heads.shape[-1] % multiple
    return torch.nn.functional.pad(heads, (0, missing)) if missing else heads


def _like(wide: Tensor, given: Tensor) -> Tensor:
    """Return sums in the width, dtype and layout of what they belong to."""
    if wide.shape == given.shape:
        return wide.to(given.dtype)
    made = torch.empty_like(given)
    made[:] = wide[..., : given.shape[-1]]
    return made


def _rows(tables: Tables) -> list[list[int]]:
    """Return the blocks; rows of padding, which planned sizes have many of, never become Python's numbers."""
    rows = tables.blocks.numpy()
    return rows[rows[:, 1] < rows[:, 2]].tolist()


def _tiles(tables: Tables, query: Tensor) -> Iterator[Block]:
    """Yield batches, then blocks with masks; under a window, the tiles of each that see anything."""
    batches: dict[int, list[list[int]]] = {}
    rest = []
    for kind, *span in _rows(tables):
        causal = kind == spans.CAUSAL or kind >= spans.BATCH
        # A run that is no longer than the window sees all of itself.
        if kind >= spans.BATCH and not _cut(tables, span):
            batches.setdefault(kind, []).append(span)
        else:
            rest.append((spans.CAUSAL if causal else kind, *span))
    for spread in batches.values():
        a, b, x, y = torch.tensor(spread).T
        queries = places.runs(a, b)
        yield Block(True, True, queries, queries if torch.equal(a, x) else places.runs(x, y))
    for kind, *span in rest:
        yield from _alone(tables, query.dtype, kind, *span)


def _cut(tables: Tables, span: Sequence[int]) -> bool:
    """Say whether a window hides anything inside a run of one path."""
    return 0 < tables.window < span[1] - span[0]


def _alone(tables: Tables, dtype: torch.dtype, kind: int, a: int, b: int, x: int, y: int) -> Iterator[Block]:
    """Yield a block that is in no batch."""
    window, far = tables.window, FAR * torch.finfo(dtype).max
    q, k, causal = slice(a, b), slice(x, y), kind == spans.CAUSAL
    if kind == spans.MASKED:
        seen = _inside(tables, q, k)
        yield Block(True, False, q, k, torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, far))
    elif not window or (causal and not _cut(tables, (a, b))):
        yield Block(causal, causal, q, k)
    else:
        for q, k in _near(tables, causal, a, b, x, y):
            back = tables.query_depths[q, None] - tables.key_depths[None, k]
            hidden = (back < 0) | (back >= window) if causal else back >= window
            mask = torch.zeros(back.shape, dtype=dtype).masked_fill_(hidden, far)
            yield Block(causal, False, q, k, mask)


def _inside(tables: Tables, q: slice, k: slice) -> Tensor:
    """Say who sees whom in a masked block, whose queries are its keys."""
    if tables.sizes is None:
        raise ValueError("the table has a masked block; sizes of the keys' subtrees are wanted with it.")
    place = torch.arange(q.stop - q.start)
    seen = (place[:, None] >= place) & (place[:, None] < place + tables.sizes[k])
    if tables.window:
        seen &= tables.query_depths[q, None] - tables.key_depths[None, k] < tables.window
    return seen


def _near(tables: Tables, causal: bool, a: int, b: int, x: int, y: int) -> Iterator[tuple[slice, slice]]:
    """Cut a block into tiles of queries as tall as the window, and their keys to those that are in reach."""
    for start in range(a, b, tables.window):
        q = slice(start, min(b, start + tables.window))
        reach = tables.query_depths[q].amin() - tables.window + 1
        first = x + int((reach - tables.key_depths[x]).clamp(min=0))
        k = slice(first, x + q.stop - a if causal else y)
        if k.start < k.stop:
            yield q, k


def _host_forward(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, block.causal, attn_mask=block.mask, scale=scale
    )


def _host_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out.to(q.dtype), lse, 0.0, block.causal, attn_mask=block.mask, scale=scale
    )


def _bands(tables: Tables, query: Tensor) -> Iterator[Block]:
    """Yield all causal blocks as one call over runs, then the rest; under a window, in runs of one path each.

    Along a path depths rise by one, so a window is a band, which the kernel knows.
    """
    rows = _rows(tables)
    if any(kind == spans.MASKED for kind, *_ in rows):
        raise ValueError("the table has a masked block; the kernel of this device takes no mask.")
    causal = sorted(row[1:] for row in rows if row[0] == spans.CAUSAL or row[0] >= spans.BATCH)
    found: list[tuple[Block, list[int], list[int]]] = []
    if causal:
        starts = [a for a, *_ in causal]
        stop, shift = causal[-1][1], causal[0][2] - causal[0][0]
        q = slice(starts[0], stop)
        ends = [*(a - q.start for a in starts), stop - q.start]
        keys = slice(q.start + shift, q.stop + shift)
        found.append((Block(True, True, q, keys, left=tables.window - 1), ends, ends))
    dense: Any = [row[1:] for row in rows if row[0] == spans.DENSE]
    if tables.window:
        dense = spans.within(dense, tables.query_depths.numpy(), tables.key_depths.numpy(), tables.window)
    for a, b, x, y, *left in dense:
        block = Block(False, False, slice(a, b), slice(x, y), left=left[0] if left else -1)
        found.append((block, [0, b - a], [0, y - x]))
    yield from _sent(found, query.device)


def _sent(found: Sequence[tuple[Block, list[int], list[int]]], device: torch.device) -> Iterator[Block]:
    """Give blocks the ends of their runs of queries and of keys, which go to the device in one copy."""
    ends = [each for _, *both in found for each in both]
    numbers = torch.tensor([n for each in ends for n in each], dtype=torch.int32).to(device)
    sent = zip(ends, numbers.split([len(each) for each in ends]), strict=True)
    for block, *_ in found:
        (queries, there), (keys, keys_there) = next(sent), next(sent)
        most = (max(b - a for a, b in itertools.pairwise(each)) for each in (queries, keys))
        yield block._replace(cuts=Cuts(there, keys_there, *most))


def _flat(heads: Tensor) -> Tensor:
    """Lay `[1, heads, nodes, width]` out as `[nodes, heads, width]`, as the kernel reads it."""
    if len(heads) != 1:
        raise ValueError(f"{len(heads)} forests came at once; one was wanted.")
    return heads[0].transpose(0, 1)


def _device_forward(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    assert block.cuts is not None
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *map(_flat, (q, k, v)), *block.cuts, 0.0, block.causal, False, scale=scale,
        window_size_left=block.left, window_size_right=0 if block.causal else -1,
    )  # fmt: skip
    return out.transpose(0, 1)[None], lse[None]


def _device_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    assert block.cuts is not None
    # Only dropout would read the state of a random generator, and there is none.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    parts = torch.ops.aten._flash_attention_backward(
        *map(_flat, (grad, q, k, v, out.to(q.dtype))), lse[0].contiguous(), *block.cuts, 0.0,
        block.causal, state, state[:0], scale=scale,
        window_size_left=block.left, window_size_right=0 if block.causal else -1,
    )  # fmt: skip
    by_query, by_key, by_value = (part.transpose(0, 1)[None] for part in parts)
    return by_query, by_key, by_value


_HALVES = (torch.bfloat16, torch.float16)
HOST = Kernel((*_HALVES, torch.float32, torch.float64), _tiles, _host_forward, _host_backward)
FLASH = Kernel(_HALVES, _bands, _device_forward, _device_backward, aligned=ALIGNED)
KERNELS: Mapping[str, Kernel] = {"cpu": HOST, "cuda": FLASH}
"""By torch's name of a device; ROCm calls itself cuda."""
