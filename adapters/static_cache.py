"""Generation in shapes that never change, for devices that compile each new one.

A cache of fixed rows and places is made once a call. A prompt runs alone, in chunks of one size, into the row
of its first completion; one operation then copies it to the rows of the others. A step takes one token of
every row, those that nobody asked for included, so that two graphs serve every prompt and every completion:
a chunk of a prompt, and a step. Which row is where, and how far, is known on the host alone.

The last token of a prompt is the first step's: a chunk needs no logits, and a prompt of one token no chunk.

Axes: rows, kv (heads of keys and values), places (of the cache), width; tokens are those of one forward.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
import transformers
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch._dynamo import exc
from torch._subclasses import fake_tensor

from adapters import cache, compiling, transformers_lm, tree_attention
from core import attention, ports

Held = Mapping[int, tree_attention.KeysValues]


@attrs.frozen(kw_only=True, eq=False)
class Shapes:
    """The shapes that a device sees, whatever is drawn.

    Attributes:
        rows: completions side by side, dummies in the place of those that are missing.
        length: places of a row, its prompt and its completion together; rounded up to whole chunks.
        chunk: tokens of a prompt in one forward.
        on_host: draw on the host, for devices without float64, which draws need.
        compiled: makes a graph of a function; None: each operation runs by itself.
        counts: graphs that were made, where `compiled` counts them there.
        prefill, decode: the two functions, as `compiled` made them.
    """

    rows: int
    length: int
    chunk: int = 128
    on_host: bool = False
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    counts: compiling.Counts = attrs.field(factory=compiling.Counts)
    prefill: Callable[..., None] = attrs.field(
        init=False, default=attrs.Factory(lambda self: self._made(_prefill), takes_self=True)
    )
    decode: Callable[..., Tensor] = attrs.field(
        init=False, default=attrs.Factory(lambda self: self._made(_decode), takes_self=True)
    )

    @property
    def places(self) -> int:
        """Return the places of a row, whole chunks."""
        return -(-self.length // self.chunk) * self.chunk

    def empty(self, model: transformers_lm.TransformersLM, params: ports.Params) -> Held:
        """Return a cache without contents, inside a run of the model.

        Args:
            model: whose layers it is for.
            params: its parameters.
        """
        device = next(iter((params or model.frozen).values())).device
        found = {}
        for layer, both in _seen(model, device).items():
            # Zeros: what is masked is multiplied by 0, which NaN would survive.
            found[layer] = tuple(
                torch.zeros(self.rows, t.shape[1], self.places, t.shape[3], dtype=t.dtype, device=device)
                for t in both
            )
        return found

    def _made(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self.compiled is None else self.compiled(function)


def one_graph(
    counts: compiling.Counts | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes one graph of a function, and lets a second be an error.

    Args:
        counts: graphs are counted there; None: nowhere.
        options: of torch.compile, as a Device has them.
    """
    if counts is not None:
        options["backend"] = compiling.counted(options.get("backend", "inductor"), counts)
    return functools.partial(
        torch.compile, fullgraph=True, isolate_recompiles=True, recompile_limit=1, **options
    )


class Steps:
    """Some groups' completions, step by step.

    Attributes:
        order: which completion each row is, counted through the groups.
    """

    order: Int64[np.ndarray, " rows"]

    def __init__(
        self,
        shapes: Shapes,
        held: Held,
        model: transformers_lm.TransformersLM,
        prompts: Sequence[Int64[np.ndarray, " length"]],
        num_samples: int,
    ) -> None:
        """Run the prompts, inside a run of the model.

        Args:
            shapes: of everything.
            held: the cache; what it held before is written over.
            model: runs the prompts.
            prompts: token ids; none is empty, and there are rows enough for the completions.
            num_samples: completions of each prompt.
        """
        self._shapes, self._held, self._model = shapes, held, model
        self._device = next(iter(held.values()))[0].device
        self.order = np.arange(len(prompts) * num_samples)
        self._live = self.order
        self._tokens, self._depths = (np.zeros(shapes.rows, np.int64) for _ in range(2))
        sources = np.arange(shapes.rows)
        for i, prompt in enumerate(prompts):
            self._run(prompt[:-1], i * num_samples)
            group = slice(i * num_samples, (i + 1) * num_samples)
            sources[group] = i * num_samples
            self._tokens[group], self._depths[group] = prompt[-1], len(prompt) - 1
        if num_samples > 1:
            chosen = self._there(sources)
            for each in (t for both in held.values() for t in both):
                each.copy_(each.index_select(0, chosen))

    def first(self) -> Float[Tensor, "rows vocab"]:
        """Return the logits of every row's first token."""
        tokens, depths = self._there(self._tokens), self._there(self._depths)
        logits = self._call(self._shapes.decode, tokens, depths)
        logits = logits.cpu() if self._shapes.on_host else logits
        return logits.index_select(0, torch.from_numpy(self._live).to(logits.device))

    def next(self, tokens: Int64[np.ndarray, " rows"]) -> Float[Tensor, "rows vocab"]:
        """Take the rows' newest tokens and return the logits of those after them."""
        self._tokens[self._live] = tokens
        self._depths[self._live] += 1
        return self.first()

    def keep(self, rows: Int64[np.ndarray, " kept"]) -> None:
        """Let all rows go but these, ascending; the others stand still from here on."""
        self._live = self._live[rows]

    def _run(self, tokens: Int64[np.ndarray, " length"], row: int) -> None:
        """Run a prompt but its last token into a row."""
        size = self._shapes.chunk
        for start in range(0, len(tokens), size):
            padded, own, places = np.zeros(size, np.int64), tokens[start : start + size], np.arange(size)
            padded[: len(own)] = own
            # Padding repeats the last position, since the model may have no more; it is written behind the
            # prompt, where the completion goes over it.
            depths = start + np.minimum(places, len(own) - 1)
            inputs = (padded, depths, start + places, np.array([row]))
            self._call(self._shapes.prefill, *(self._there(v) for v in inputs))

    def _call(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Call one of the two functions; what stops a compiler is told as what the model is."""
        kind = self._model.module.config.model_type
        try:
            return function(self._model, self._held, *inputs)
        except exc.FailOnRecompileLimitHit as problem:
            raise compiling.Unplanned(
                f"drawing from a {kind} model asked for a third graph, and two are planned: the parameters "
                "are of another kind than before. Take an engine of its own for them."
            ) from problem
        except exc.TorchDynamoException as problem:
            told = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            raise compiling.Unplanned(
                f"drawing from a {kind} model cannot be compiled: {told}; draw without compile."
            ) from problem

    def _there(self, values: np.ndarray) -> Tensor:
        """Copy numbers to the device, out of arrays that will change."""
        return torch.from_numpy(values.copy()).to(self._device)


class _Forward:
    """The attention of one forward; see `adapters.tree_attention.Step`."""

    tokens: Tensor
    depths: Tensor
    max_depth = 0

    def __init__(self, held: Held, tokens: Tensor, depths: Tensor, places: Tensor, rows: Tensor) -> None:
        """Take what a forward runs on.

        Args:
            held: the cache.
            tokens, depths: ids and positions.
            places: of the cache, where each token goes.
            rows: of the cache that the tokens are of, each the same number of tokens.
        """
        self.tokens, self.depths, self._held, self._rows = tokens, depths, held, rows
        self._places = places
        self._masks: dict[int, Tensor] = {}

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "one heads tokens width"],
        key: Float[Tensor, "one kv tokens width"],
        value: Float[Tensor, "one kv tokens width"],
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Float[Tensor, " heads"] | None,
    ) -> Float[Tensor, "one tokens heads width"]:
        """Write keys and values, and attend from every token to what its row holds up to it."""
        num = len(self._rows)
        keys, values = (
            self._written(held, new) for held, new in zip(self._held[layer], (key, value), strict=True)
        )
        # Not `unflatten`: torch.compile cannot see through it under the mode that keeps float64.
        split = query[0].reshape(query.shape[1], num, -1, query.shape[3]).transpose(0, 1)
        out = attention.masked(
            split, keys, values, self._mask(keys.shape[2], window), scale=scale, softcap=softcap, sinks=sinks
        )
        return out.transpose(1, 2).flatten(0, 1)[None]

    def _written(self, held: Tensor, new: Tensor) -> Tensor:
        """Write the tokens' vectors to their places; return what the rows hold."""
        num, kv, size = len(self._rows), held.shape[1], len(self.tokens) // len(self._rows)
        rows = self._rows[:, None].expand(num, size).reshape(-1, 1)
        heads = torch.arange(kv, device=held.device)
        held.index_put_((rows, heads, self._places[:, None]), new[0].transpose(0, 1))
        return held if num == held.shape[0] else held.index_select(0, self._rows)

    def _mask(self, places: int, window: int) -> Bool[Tensor, "rows tokens places"]:
        """Say which places each token sees; those of padding are behind every token that is read."""
        if window not in self._masks:
            back = self._places[:, None] - torch.arange(places, device=self._places.device)
            mask = (back >= 0) & (back < window) if window else back >= 0
            self._masks[window] = mask.reshape(len(self._rows), -1, places)
        return self._masks[window]


def _prefill(
    model: transformers_lm.TransformersLM,
    held: Held,
    tokens: Int64[Tensor, " chunk"],
    depths: Int64[Tensor, " chunk"],
    places: Int64[Tensor, " chunk"],
    row: Int64[Tensor, " one"],
) -> None:
    """Run a chunk of a prompt into its row."""
    # By the module alone: what only training needs would break a graph.
    model.states(_Forward(held, tokens, depths, places, row))


def _decode(
    model: transformers_lm.TransformersLM,
    held: Held,
    tokens: Int64[Tensor, " rows"],
    depths: Int64[Tensor, " rows"],
) -> Float[Tensor, "rows vocab"]:
    """Run one token of every row and return the logits of the next."""
    rows = torch.arange(len(tokens), device=tokens.device)
    return cache.logits(model, model.states(_Forward(held, tokens, depths, depths, rows)))


class _Looking:
    """A forward of one token that notes what keys and values look like."""

    max_depth = 0

    def __init__(self, device: torch.device) -> None:
        self.tokens, self.depths = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self.seen: dict[int, tree_attention.KeysValues] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **_: Any
    ) -> Float[Tensor, "one tokens heads width"]:
        self.seen[layer] = key, value
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


@contextlib.contextmanager
def _batched(module: transformers.PreTrainedModel) -> Iterator[None]:
    """Let experts run by what knows shapes without numbers: a grouped product does in bfloat16 alone."""
    text: Any = module.config.get_text_config()
    kept = text._experts_implementation
    try:
        if kept is not None:
            text._experts_implementation = "batched_mm"
        yield
    finally:
        text._experts_implementation = kept


def _seen(model: transformers_lm.TransformersLM, device: torch.device) -> Held:
    """Return keys and values of every layer, of a forward that computes nothing where the model allows it."""
    try:
        with _batched(model.module), fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
            looking = _Looking(device)
            model.states(looking)
    except (fake_tensor.DynamicOutputShapeException, fake_tensor.DataDependentOutputException):
        # A mixture of experts may look at which expert was chosen.
        looking = _Looking(device)
        model.states(looking)
    return looking.seen
