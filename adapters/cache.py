"""Keys and values while completions are drawn: those of prompts once, however many completions follow.

Prompts run once, merged into a forest, in pieces where it is over a budget. In a decoding step a row is one
completion's newest token. The rows whose prompts share a run of nodes are contiguous and attend to it in one
product; each row attends to its own completion in a cache that is written in place; the parts are merged by
log-sum-exp, exactly.

Axes: rows, kv (heads of keys and values), group (heads of queries that share one of these), width.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import attrs
import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from adapters import transformers_lm, tree_attention
from core import head, pack, ports, precision
from core.plan import pieces, prefix_tree, sample

# Merging what is shared costs a product of its own in each layer of each step, so it must save something.
_WORTH = 0.9
_FIRST_ROOM = 128


class Span(NamedTuple):
    """Rows that attend to a run of the prompts' nodes; both are start and stop."""

    rows: slice
    nodes: slice


@attrs.frozen(kw_only=True, eq=False)
class Prompts:
    """Prompts that have run.

    Attributes:
        tree: their forest.
        layers: keys and values of its nodes by layer, `[1, kv, nodes, width]`.
    """

    tree: prefix_tree.PrefixTree
    layers: Mapping[int, tree_attention.KeysValues]


def prefill(
    model: transformers_lm.TransformersLM,
    params: ports.Params,
    prompts: Sequence[Int64[np.ndarray, " length"]],
    *,
    budget: int,
) -> tuple[Prompts, Float[Tensor, "prompts hidden"]]:
    """Run prompts through a model that holds the parameters.

    Args:
        model: runs them.
        params: what is swapped in.
        prompts: token ids; none is empty.
        budget: most nodes in one forward; longer ones attend to the keys and values of those before.

    Returns:
        Keys and values, and the hidden state of each prompt's last token.
    """
    tree = prefix_tree.build(prompts)
    share = len(tree.tokens) <= _WORTH * sum(map(len, prompts))
    if not share:
        tree = prefix_tree.build(prompts, share=False)
    device = next(iter((params or model.frozen).values())).device
    untrained = [sample.Sample(tokens=p, trained=np.zeros(len(p), np.bool_)) for p in prompts]
    each = pack.build(untrained, pack.count(untrained), share=share, budget=budget, device=device)
    layers: dict[int, tree_attention.KeysValues] = {}
    last: list[Tensor] = []
    ends = np.unique(tree.leaves)
    for piece in pieces.cut(tree.ends, each.table.numpy(), each.pieces):
        route = model.piece_route(each, piece, _of(layers, piece.ancestors))
        hidden = model.hidden(route, params)
        for layer, both in (route.fresh or {}).items():
            if layer not in layers:
                shapes = [(1, t.shape[1], len(tree.tokens), t.shape[3]) for t in both]
                layers[layer] = both[0].new_empty(shapes[0]), both[1].new_empty(shapes[1])
            for whole, part in zip(layers[layer], both, strict=True):
                whole[:, :, piece.start : piece.stop] = part
        own = ends[(ends >= piece.start) & (ends < piece.stop)] - piece.start
        last.append(hidden.index_select(0, torch.from_numpy(own).to(device)))
    places = torch.from_numpy(np.searchsorted(ends, tree.leaves)).to(device)
    return Prompts(tree=tree, layers=layers), torch.cat(last).index_select(0, places)


def logits(
    model: transformers_lm.TransformersLM, hidden: Float[Tensor, "rows hidden"]
) -> Float[Tensor, "rows vocab"]:
    """Return logits before the temperature, inside a run of the model."""
    product = model.product(hidden)
    return head.logits(product._replace(shape=attrs.evolve(product.shape, temperature=1.0)))


class Steps:
    """Some groups' completions, step by step; rows are in the order of their prompts' nodes.

    Attributes:
        order: which completion each row is, counted through the groups.
    """

    order: Int64[np.ndarray, " rows"]

    def __init__(
        self,
        model: transformers_lm.TransformersLM,
        params: ports.Params,
        prompts: Sequence[Int64[np.ndarray, " length"]],
        num_samples: int,
        *,
        limit: int,
        budget: int,
    ) -> None:
        """Run the prompts, inside a run of the model.

        Args:
            model: runs them.
            params: what is swapped in.
            prompts: token ids; none is empty.
            num_samples: completions of each.
            limit: most tokens of a completion.
            budget: most nodes in one forward.
        """
        self._model, self._params = model, params
        past, self._hidden = prefill(model, params, prompts, budget=budget)
        leaves = np.repeat(past.tree.leaves, num_samples)
        self.order = np.argsort(leaves, kind="stable")
        self._decode = Decode(past, leaves[self.order], limit=limit)
        self._owners = self.order // num_samples

    def first(self) -> Float[Tensor, "rows vocab"]:
        """Return the logits of every row's first token."""
        owners = torch.from_numpy(self._owners).to(self._hidden.device)
        return logits(self._model, self._hidden).index_select(0, owners)

    def next(self, tokens: Int64[np.ndarray, " rows"]) -> Float[Tensor, "rows vocab"]:
        """Take the rows' newest tokens and return the logits of those after them."""
        self._decode.advance(torch.from_numpy(tokens).to(self._hidden.device))
        return logits(self._model, self._model.hidden(self._decode, self._params))

    def keep(self, rows: Int64[np.ndarray, " kept"]) -> None:
        """Let all rows go but these, ascending."""
        self._decode.keep(rows)


class Decode:
    """What the attention of a decoding step reads and writes; rows are in the order of their prompts' nodes.

    Attributes:
        tokens, depths: the newest token of each row and its position, the queries.
        max_depth: the largest position.
    """

    tokens: Tensor
    depths: Tensor
    max_depth: int

    def __init__(self, prompts: Prompts, leaves: Int64[np.ndarray, " rows"], *, limit: int) -> None:
        """Make room for completions.

        Args:
            prompts: that have run.
            leaves: node of the last token of each row's prompt, ascending.
            limit: most tokens of a completion; room grows up to it by doubling.
        """
        self._prompts, self._leaves, self._limit = prompts, leaves, limit
        self._room = min(_FIRST_ROOM, limit)
        self._length = 0
        self._own: dict[int, tree_attention.KeysValues] = {}
        self._runs: dict[int, list[list[Span]]] = {}

    def advance(self, tokens: Int64[Tensor, " rows"]) -> None:
        """Take the rows' next token; attention of one forward of these must follow."""
        if self._length == self._room:
            self._room = min(2 * self._room, self._limit)
            self._own = {layer: (self._grown(k), self._grown(v)) for layer, (k, v) in self._own.items()}
        self._length += 1
        depths = self._prompts.tree.depths[self._leaves] + self._length
        self.tokens, self.depths = tokens, torch.from_numpy(depths).to(tokens.device)
        self.max_depth = int(depths.max())
        self._runs = {0: self._runs[0]} if 0 in self._runs else {}

    def keep(self, rows: Int64[np.ndarray, " kept"]) -> None:
        """Let all rows go but these, ascending."""
        self._leaves = self._leaves[rows]
        chosen = torch.from_numpy(rows)

        def some(held: Tensor) -> Tensor:
            kept = held.new_empty(len(rows), *held.shape[1:])
            past = held[:, :, : self._length].index_select(0, chosen.to(held.device))
            kept[:, :, : self._length] = past
            return kept

        for layer, (k, v) in self._own.items():  # one layer at a time, so that only one is held twice
            self._own[layer] = (some(k), some(v))
        self._runs = {}

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "one heads rows width"],
        key: Float[Tensor, "one kv rows width"],
        value: Float[Tensor, "one kv rows width"],
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Float[Tensor, " heads"] | None,
    ) -> Float[Tensor, "one rows heads width"]:
        """Attend from every row to its prompt, its completion and itself.

        Args:
            layer: whose keys and values these are.
            query, key, value: of the newest tokens.
            scale: factor of the products.
            window: how many tokens back a query sees, itself among them; 0: all.
            softcap: bound of the scores; 0: none.
            sinks: a learned score a head that takes part in the softmax and has no value.
        """
        kv, rows = key.shape[1:3]
        grouped = query[0].unflatten(0, (kv, -1)).permute(2, 0, 1, 3)
        group = grouped.shape[2]
        first = max(0, self._length - window) if window else 0
        own_key, own_value = (held[:, :, first : self._length] for held in self._written(layer, key, value))
        out, lse = _part(grouped, own_key, own_value, scale, softcap)
        folded = grouped.transpose(0, 1).flatten(1, 2)[None]
        prompt_key, prompt_value = self._prompts.layers[layer]
        for run in self._seen(window):
            parts = [
                _part(
                    folded[:, :, group * span.rows.start : group * span.rows.stop],
                    prompt_key[:, :, span.nodes],
                    prompt_value[:, :, span.nodes],
                    scale,
                    softcap,
                )
                for span in run
            ]
            some, some_lse = (
                parts[0] if len(run) == 1 else (torch.cat(t, 2) for t in zip(*parts, strict=True))
            )
            some, some_lse = (t[0].unflatten(1, (-1, group)).transpose(0, 1) for t in (some, some_lse))
            own = slice(run[0].rows.start, run[-1].rows.stop)
            # exp(b) / (exp(a) + exp(b)) = sigmoid(b - a)
            weight = (some_lse - lse[own]).sigmoid_()[..., None].to(out.dtype)
            out[own] = torch.lerp(out[own], some, weight)
            lse[own] = torch.logaddexp(lse[own], some_lse)
        if sinks is not None:
            out *= (lse - sinks.reshape(kv, -1)).sigmoid_()[..., None].to(out.dtype)
        return out.reshape(1, rows, -1, value.shape[-1])

    def _written(self, layer: int, key: Tensor, value: Tensor) -> tree_attention.KeysValues:
        """Write the newest keys and values behind the others' of their rows; return the caches."""
        if layer not in self._own:
            shapes = [(t.shape[2], t.shape[1], self._room, t.shape[3]) for t in (key, value)]
            self._own[layer] = key.new_empty(shapes[0]), value.new_empty(shapes[1])
        for held, new in zip(self._own[layer], (key, value), strict=True):
            held[:, :, self._length - 1] = new[0].transpose(0, 1)
        return self._own[layer]

    def _grown(self, held: Tensor) -> Tensor:
        """Return a cache with more room and the same contents."""
        wider = held.new_empty(*held.shape[:2], self._room, held.shape[3])
        wider[:, :, : self._length] = held
        return wider

    def _seen(self, window: int) -> list[list[Span]]:
        """Return what rows see of the prompts, made once a step for all layers of a window."""
        window = window if self.max_depth >= window else 0
        if window not in self._runs:
            whole = spans(self._prompts.tree, self._leaves)
            self._runs[window] = runs(self._cut(whole, window) if window else whole, len(self._leaves))
        return self._runs[window]

    def _cut(self, whole: Sequence[Span], window: int) -> list[Span]:
        """Cut spans to a window; rows of one prompt are at one position, those of several are not."""
        starts = np.flatnonzero(np.diff(self._leaves, prepend=-1))
        depths = self._prompts.tree.depths
        found = []
        for rows, nodes in whole:
            inside = starts[(starts >= rows.start) & (starts < rows.stop)]
            for start, stop in zip(inside, np.append(inside[1:], rows.stop), strict=True):
                nearest = int(depths[self._leaves[start]]) + self._length - window + 1
                first = nodes.start + max(0, nearest - int(depths[nodes.start]))
                if first < nodes.stop:
                    found.append(Span(slice(int(start), int(stop)), slice(first, nodes.stop)))
        return found


def spans(tree: prefix_tree.PrefixTree, leaves: Int64[np.ndarray, " rows"]) -> list[Span]:
    """Return the runs of nodes that the same rows descend from, so that each row's make up its prompt.

    Args:
        tree: of the prompts.
        leaves: node of the last token of each row's prompt, ascending.
    """
    nodes = np.arange(len(tree.tokens))
    first, last = (np.searchsorted(leaves, edge) for edge in (nodes, tree.ends))
    new = np.ones(len(nodes), np.bool_)
    new[1:] = (tree.parents[1:] != nodes[:-1]) | (first[1:] != first[:-1]) | (last[1:] != last[:-1])
    starts = np.flatnonzero(new)
    edges = zip(starts.tolist(), [*starts[1:].tolist(), len(nodes)], strict=True)
    whole = [Span(slice(int(first[a]), int(last[a])), slice(a, b)) for a, b in edges]
    return [span for span in whole if span.rows.start < span.rows.stop]


def runs(found: Sequence[Span], num_rows: int) -> list[list[Span]]:
    """Put spans together whose rows follow each other, so that they are merged at once.

    Args:
        found: in the order of their nodes, so that those of one row come from its root down.
        num_rows: of all.
    """
    above = np.zeros(num_rows, np.int64)
    levels: list[tuple[int, int]] = []
    for number, span in enumerate(found):
        levels.append((int(above[span.rows.start]), number))
        above[span.rows] += 1
    made: list[list[Span]] = []
    for _, number in sorted(levels):
        span = found[number]
        if made and made[-1][-1].rows.stop == span.rows.start:
            made[-1].append(span)
        else:
            made.append([span])
    return made


def _part(
    query: Float[Tensor, "batch kv queries width"],
    key: Float[Tensor, "batch kv keys width"],
    value: Float[Tensor, "batch kv keys width"],
    scale: float,
    softcap: float,
) -> tuple[Float[Tensor, "batch kv queries width"], Float[Tensor, "batch kv queries"]]:
    """Attend from every query to every key; the output and its log-sum-exp."""
    if query.device.type == "cpu" and not softcap and query.shape[-1] == value.shape[-1]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, scale=scale
        )
    scores = precision.widened(query @ key.transpose(-1, -2)) * scale
    if softcap:
        scores = (scores / softcap).tanh_() * softcap
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp_().to(value.dtype) @ value, lse


def _of(
    layers: Mapping[int, tree_attention.KeysValues], ancestors: Int64[np.ndarray, " nodes"]
) -> dict[int, tree_attention.KeysValues]:
    """Return keys and values of the nodes that a piece attends to, without a copy where they are one run."""
    if not len(ancestors):
        return {}
    first, stop = int(ancestors[0]), int(ancestors[-1]) + 1
    if stop - first == len(ancestors):
        return {layer: (k[:, :, first:stop], v[:, :, first:stop]) for layer, (k, v) in layers.items()}
    chosen = torch.from_numpy(ancestors)
    return {
        layer: (k.index_select(2, chosen.to(k.device)), v.index_select(2, chosen.to(v.device)))
        for layer, (k, v) in layers.items()
    }
