"""A Hugging Face causal language model as a Model: two pure functions of its parameters.

The bound module holds no weights of its own: its parameters are on the meta device and every pass swaps in
those it was given, forward, backward and recomputation alike.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
import transformers
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from adapters import (
    chunks,
    compiling,
    in_pieces,
    lora,
    offload,
    padded,
    recompute,
    scalar_head,
    shards,
    tree_attention,
)
from adapters import teacher as teachers
from core import head, keys, metrics, pack, ports
from core.plan import pieces, spans


@attrs.frozen(kw_only=True, eq=False)
class TransformersLM:
    """A bound module and what was found out about it.

    Attributes:
        module: the causal language model, its parameters on meta.
        slots: every place of the module that holds a parameter: (submodule, attribute, name of the leaf).
            Tied weights are several places of one leaf.
        frozen: tensors by leaf name that are swapped in and not trained.
        chunked: the feed-forward parts that run in chunks; empty: all positions at once.
        offloaded: what the forward saves for the backward waits in host memory.
        teacher: what `divergences` are measured to.
        adapter: what is trained in the place of the weights; None: these are.
        autocast: the dtype that the decoder's and the head's products run in, whatever the parameters are;
            None: theirs.
        shape: how logits follow from the head's product.
        attention: the kind that runs, of those that `tree_attention.route` knows.
        compiled: the decoder as graphs; None: it runs operator by operator.
        sharding: parameters are this process's parts; None: they are whole.
        keep_attention: where layers are made again in backward, what their attention gave is kept.
        rates: what blocks of attention cost; None: each runs as it is.
        max_length: longest sequence; beyond it the positions of all would hang on the longest. 0: no limit.
    """

    module: transformers.PreTrainedModel
    slots: tuple[tuple[torch.nn.Module, str, str], ...]
    shape: head.Shape
    attention: str
    max_length: int = 0
    frozen: Mapping[str, Tensor] = attrs.field(factory=dict)
    chunked: tuple[chunks.Chunked, ...] = ()
    offloaded: bool = False
    teacher: teachers.Teacher | None = None
    adapter: lora.Adapter | None = None
    autocast: torch.dtype | None = None
    compiled: compiling.Decoder | None = None
    sharding: shards.Sharding | None = None
    keep_attention: bool = False
    rates: spans.Rates | None = None

    @property
    def scalar(self) -> bool:
        """Say whether it gives `values` in the place of log-probabilities."""
        return scalar_head.has(self.module)

    def predict(self, params: ports.Params, pack: pack.Pack, key: int | None) -> pack.Scores:
        """Score every row of the pack, without gradients; see `core.ports.Model`."""
        if self._is_idle(pack):
            return rows(pack, in_pieces.nothing(pack, pack.batch.totals.terms))
        # A graph is made for parameters that train; frozen ones would have another.
        params = params if self.compiled is None else _leaves(params)
        if pack.padded:
            with torch.no_grad(), self.running(params, key):
                return rows(pack, padded.fields(pack, self._forest(pack, params, key)))
        pack = self._told(scalar_head.at_targets(pack) if self.scalar else pack)
        with torch.no_grad(), self.running(params, key):
            if (runs := self._runs(pack)) > 1:
                return rows(pack, in_pieces.Walk(self, params, pack, key or 0, runs=runs).fields())
            return self._score(pack, params)

    def pull_back(
        self, params: ports.Params, pack: pack.Pack, key: int, loss: ports.Loss
    ) -> tuple[Float[Tensor, ""], metrics.Metrics, dict[str, Tensor]]:
        """Run forward, loss and backward inside one swap; see `core.ports.Model`."""
        if self._is_idle(pack):
            value, means = loss(rows(pack, in_pieces.nothing(pack, pack.batch.totals.terms)))
            return value, means, {n: torch.zeros_like(p) for n, p in params.items()}
        leaves = _leaves(params)
        if pack.padded:
            with torch.enable_grad(), self.running(leaves, key):
                run = self._forest(pack, leaves, key)
                return padded.pull_back(pack, run, leaves, lambda f: loss(rows(pack, f)))
        pack = self._told(scalar_head.at_targets(pack) if self.scalar else pack)
        with torch.enable_grad(), self.running(leaves, key):
            if (runs := self._runs(pack)) > 1:
                walk = in_pieces.Walk(self, leaves, pack, key, runs=runs)
                return walk.pull_back(lambda f: loss(rows(pack, f)))
            value, means = loss(self._score(pack, leaves))
            found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        grads = {
            n: torch.zeros_like(p) if g is None else g
            for (n, p), g in zip(params.items(), found, strict=True)
        }
        return value.detach(), means, grads

    def save(self, params: ports.Params, folder: str) -> None:
        """Write a Hugging Face folder: weights (tied ones once) and config; an adapter's base without any."""
        assert self.adapter is None or not params, "an adapter is written by adapters.peft_files, or merged"
        with self.swap(params):
            self.module.save_pretrained(folder)

    @contextlib.contextmanager
    def swap(self, params: ports.Params) -> Iterator[None]:
        """Put tensors where the module looks for its parameters, and take them out again.

        Args:
            params: by name; of an adapter all or none: without them the base stands alone.
        """
        if self.sharding is not None:
            with self.sharding.swapped({**self.frozen, **params}):
                yield
            return
        off = frozenset() if self.adapter is None else self.adapter.leaves
        off = off if off.isdisjoint(params) else frozenset()
        held = [submodule._parameters[attribute] for submodule, attribute, _ in self.slots]
        try:
            for submodule, attribute, name in self.slots:
                leaf = params[name] if name in params else None if name in off else self.frozen[name]
                submodule._parameters[attribute] = leaf  # type: ignore[assignment]
            yield
        finally:
            for (submodule, attribute, _), before in zip(self.slots, held, strict=True):
                submodule._parameters[attribute] = before

    @contextlib.contextmanager
    def running(self, params: ports.Params, key: int | None) -> Iterator[None]:
        """Open everything that a pass needs: the swap, the precision rule, the draws of dropout."""
        device = self._first(params).device
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.swap(params))
            stack.enter_context(self._precise(params))
            stack.callback(self._forget)
            if self.offloaded or self.sharding is not None:
                stack.enter_context(self._saving({**self.frozen, **params}))
            if self.compiled is not None:
                stack.enter_context(self.compiled.watched())
            # Where nothing is dropped the mode changes no number, and a graph would be made anew for it.
            if key is None and (self.compiled is None or self.module.training):
                stack.enter_context(self.still())
            elif key is not None and self.module.training:
                devices = [] if device.type == "cpu" else [device]
                stack.enter_context(torch.random.fork_rng(devices))
                torch.manual_seed(key)
            yield

    def _forget(self) -> None:
        """Let go of the parameters, which what runs again in the backward has held until here."""
        for part in self.chunked:
            part.recompute = checkpoint.noop_context_fn
        if self.module.is_activation_checkpointing:
            self.module._set_gradient_checkpointing(True)

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Leave the mode of training, in which dropout draws, for one pass or a part of one."""
        # One by one: where layers are recomputed and nothing is dropped, they alone are in this mode.
        trained = [m for m in self.module.modules() if m.training]
        self.module.train(False)
        try:
            yield
        finally:
            for each in trained:
                each.training = True

    def _score(self, each: pack.Pack, params: ports.Params) -> pack.Scores:
        """Run the whole forest through the decoder and the head over its trained edges."""
        if not len(each.edge_nodes):
            return pack.Scores(**in_pieces.nothing(each, shards.idle(self, params)))
        return rows(each, self.edges(each, self.route(each), params))

    def route(self, each: pack.Pack) -> tree_attention.Route:
        """Return the route of a forward over a whole forest."""
        return tree_attention.route(each, kind=self.attention, rates=self.rates)

    def piece_route(
        self, each: pack.Pack, piece: pieces.Piece, past: Mapping[int, tree_attention.KeysValues]
    ) -> tree_attention.Route:
        """Return the route of a forward over a piece of a forest; Args as of `tree_attention.piece_route`."""
        return tree_attention.piece_route(each, piece, past, kind=self.attention, rates=self.rates)

    def edges(
        self, each: pack.Pack, route: tree_attention.Route, params: ports.Params
    ) -> dict[str, Float[Tensor, " edges"]]:
        """Return the fields of Scores at the edges that the nodes of a route predict.

        Args:
            each: the forest.
            route: which of its nodes run.
            params: what is swapped in.
        """
        parents = self.parents(each, route, params)
        if self.scalar:
            return scalar_head.score(self.module, parents)
        product = self.product(parents)
        fields = head.score(
            product.hidden,
            product.weight,
            each.edge_tokens[route.edges],
            bias=product.bias,
            low_rank=product.low_rank,
            shape=product.shape,
            needs=each.needs,
            # Without gradients nothing is pulled back, and the head would form what nobody reads.
            slopes=each.slopes[route.edges] if each.slopes is not None and torch.is_grad_enabled() else None,
        )
        if self.teacher is not None and each.taught is not None:
            fields["divergences"] = self.teacher.divergences(product, each.taught[route.edges])
        return fields

    def product(self, hidden: Float[Tensor, "edges hidden"]) -> head.Product:
        """Return what logits are made of, an adapter of the head beside its weight.

        Args:
            hidden: last hidden states, inside a run of the model.
        """
        output: Any = self.module.get_output_embeddings()
        weight, bias = output.weight, getattr(output, "bias", None)
        if self.autocast is not None:
            hidden, weight = hidden.to(self.autocast), weight.to(self.autocast)
        if not lora.is_on(output):
            return head.Product(self.shape, hidden, weight, bias)
        low, up = lora.narrowed(output, hidden), lora.up(output, hidden)
        return head.Product(self.shape, hidden, weight, bias, low, up)

    def parents(
        self, each: pack.Pack, route: tree_attention.Route, params: ports.Params
    ) -> Float[Tensor, "edges hidden"]:
        """Return the last hidden states that the edges of a route lead from; Args as of `edges`."""
        if self.compiled is not None and route.fresh is None:
            self._check_depth(route.max_depth)
            return self.compiled(each)
        if self.compiled is not None:
            self.compiled.counts.fallbacks += 1
        hidden = self.hidden(route, params)
        return hidden.index_select(0, each.edge_nodes[route.edges] - route.nodes[0])

    def decode(self, each: pack.Pack) -> Float[Tensor, "edges hidden"]:
        """Return what `parents` does of a whole pack, inside a run and with nothing that a graph cannot hold.

        What is recomputed has its parameters as inputs here: no swap has to be entered again.
        """
        if self.module.is_activation_checkpointing:
            again = functools.partial(checkpoint.checkpoint, use_reentrant=False)
            self.module._set_gradient_checkpointing(True, again)
        states = self.states(tree_attention.route(each, kind=self.attention))
        return states.index_select(0, each.edge_nodes)

    def _forest(self, each: pack.Pack, params: ports.Params, key: int | None) -> padded.Run:
        """Return what runs the padded forests of a pack; the same one draws the same each time."""
        slopes = padded.sloped(each)

        def run(number: int) -> dict[str, Tensor]:
            part = attrs.evolve(each.padded[number], slopes=slopes)
            if self.scalar:
                part = attrs.evolve(part, edge_nodes=part.edge_targets)
            if key is not None and self.module.training:
                torch.manual_seed(keys.fold_in(key, "forest", number))
            part = self._told(part)
            return self.edges(part, self.route(part), params)

        return run

    def _told(self, each: pack.Pack) -> pack.Pack:
        """Let the teacher read a pack whose divergences are asked for."""
        if "divergences" not in each.needs:
            return each
        if self.teacher is None:
            raise ValueError("divergences are asked for, and the model has no teacher: give it one.")
        return attrs.evolve(each, taught=self.teacher.hidden(each)) if len(each.edge_nodes) else each

    def hidden(
        self, route: tree_attention.Route | tree_attention.Step, params: ports.Params
    ) -> Float[Tensor, "nodes hidden"]:
        """Return the last hidden state of every node that runs."""
        self._check_depth(route.max_depth)

        def again(module: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
            return recompute.both(self._again(params, module), self._precise(params))

        if torch.is_grad_enabled():  # else nothing runs again, and this would hold the parameters
            recompute.arm(self.module, self.chunked, again, keep_attention=self.keep_attention)
        return self.states(route)

    def states(self, route: tree_attention.Route | tree_attention.Step) -> Float[Tensor, "nodes hidden"]:
        """Return what `hidden` does, by the module as it stands: what only training needs is not set up."""
        with self.casting(route.tokens.device):
            outputs = self.module.base_model(
                input_ids=route.tokens[None], position_ids=route.depths[None], use_cache=False, tree=route
            )
        return outputs.last_hidden_state[0]

    def _is_idle(self, each: pack.Pack) -> bool:
        """Say whether a pack runs nothing: nobody trains, and no other process waits for this one's parts."""
        return not len(each.edge_nodes) and self.sharding is None

    def _runs(self, each: pack.Pack) -> int:
        """Return how often a pack runs; where parameters are split, as often as any process' does."""
        own = len(each.pieces) if len(each.edge_nodes) else 0
        return own if self.sharding is None else self.sharding.num_runs(own)

    def _again(self, params: ports.Params, module: torch.nn.Module) -> Any:
        """Put the parameters in once more, for a second run of a layer, or of a module inside of one."""
        if self.sharding is None:
            return self.swap(params)
        return self.sharding.within(module, {**self.frozen, **params})

    def _saving(self, present: ports.Params) -> contextlib.AbstractContextManager[Any]:
        """Return the hooks that decide where what is saved for the backward waits."""
        if self.sharding is None:
            return offload.to_host(present)
        return self.sharding.saving(*offload.ways(present, moved=self.offloaded))

    def _check_depth(self, max_depth: int) -> None:
        """Refuse a sequence at which the positions of all would change."""
        if self.max_length and max_depth >= self.max_length:
            raise ValueError(
                f"a sequence has {max_depth + 1} tokens; beyond {self.max_length} this "
                f"{self.module.config.model_type} model turns positions by the longest sequence of a pack. "
                f"Set max_length to {self.max_length} or less."
            )

    def casting(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return what the decoder runs in, and nothing after it: losses and sums are never cast."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)

    def _precise(self, params: ports.Params) -> contextlib.AbstractContextManager[Any]:
        """Return the mode that float64 needs, nothing otherwise."""
        double = self._first(params).dtype == torch.float64
        return KeepDouble() if double else contextlib.nullcontext()

    def _first(self, params: ports.Params) -> Tensor:
        """Return any of the tensors that are swapped in."""
        return next(iter((params or self.frozen).values()))


def rows(each: pack.Pack, fields: Mapping[str, Tensor]) -> pack.Scores:
    """Spread fields at the edges over the rows of the batch."""
    return pack.Scores(**{n: v.index_select(0, each.term_edges) for n, v in fields.items()})


def _leaves(params: ports.Params) -> dict[str, Tensor]:
    """Return tensors that share the parameters' memory and are differentiated by."""
    return {n: p.detach().requires_grad_() for n, p in params.items()}


class KeepDouble(TorchFunctionMode):
    """Keep float64 where a model casts to float32 for half precision: norms, rotary tables, softmax."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        if any(a is torch.float32 for a in (*args[1:], *kwargs.values())):
            first = args[0] if args else None
            if isinstance(first, Tensor) and first.dtype == torch.float64:
                args = (first, *(torch.float64 if a is torch.float32 else a for a in args[1:]))
                kwargs = {n: torch.float64 if v is torch.float32 else v for n, v in kwargs.items()}
        return func(*args, **kwargs)
