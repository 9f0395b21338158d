"""A Hugging Face causal language model as a Model: two pure functions of its parameters.

The bound module holds no weights of its own: its parameters are on the meta device and every pass swaps in
those it was given, forward, backward and recomputation alike.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
import transformers
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from adapters import in_pieces, scalar_head, tree_attention
from core import head, metrics, pack, ports


@attrs.frozen(kw_only=True, eq=False)
class TransformersLM:
    """A bound module and what was found out about it.

    Attributes:
        module: the causal language model, its parameters on meta.
        slots: every place of the module that holds a parameter: (submodule, attribute, name of the leaf).
            Tied weights are several places of one leaf.
        frozen: tensors by leaf name that are swapped in and not trained.
        shape: how logits follow from the head's product.
        attention: `rectangles` or `mask`.
        max_length: longest sequence; beyond it the positions of all would hang on the longest. 0: no limit.
    """

    module: transformers.PreTrainedModel
    slots: tuple[tuple[torch.nn.Module, str, str], ...]
    shape: head.Shape
    attention: str
    max_length: int = 0
    frozen: Mapping[str, Tensor] = attrs.field(factory=dict)

    @property
    def scalar(self) -> bool:
        """Say whether it gives `values` in the place of log-probabilities."""
        return scalar_head.has(self.module)

    def predict(self, params: ports.Params, pack: pack.Pack, key: int | None) -> pack.Scores:
        """Score every row of the pack, without gradients; see `core.ports.Model`."""
        pack = scalar_head.at_targets(pack) if self.scalar else pack
        with torch.no_grad(), self.running(params, key):
            if len(pack.pieces) > 1:
                return rows(pack, in_pieces.Walk(self, params, pack, key or 0).fields())
            return self._score(pack, params)

    def pull_back(
        self, params: ports.Params, pack: pack.Pack, key: int, loss: ports.Loss
    ) -> tuple[Float[Tensor, ""], metrics.Metrics, dict[str, Tensor]]:
        """Run forward, loss and backward inside one swap; see `core.ports.Model`."""
        pack = scalar_head.at_targets(pack) if self.scalar else pack
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        with torch.enable_grad(), self.running(leaves, key):
            if len(pack.pieces) > 1:
                return in_pieces.Walk(self, leaves, pack, key).pull_back(lambda f: loss(rows(pack, f)))
            value, means = loss(self._score(pack, leaves))
            found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        grads = {
            n: torch.zeros_like(p) if g is None else g
            for (n, p), g in zip(params.items(), found, strict=True)
        }
        return value.detach(), means, grads

    def save(self, params: ports.Params, folder: str) -> None:
        """Write a Hugging Face folder: weights (tied ones once) and config."""
        with self.swap(params):
            self.module.save_pretrained(folder)

    @contextlib.contextmanager
    def swap(self, params: ports.Params) -> Iterator[None]:
        """Put tensors where the module looks for its parameters, and take them out again."""
        held = [submodule._parameters[attribute] for submodule, attribute, _ in self.slots]
        try:
            for submodule, attribute, name in self.slots:
                leaf = params[name] if name in params else self.frozen[name]
                submodule._parameters[attribute] = leaf  # type: ignore[assignment]
            yield
        finally:
            for (submodule, attribute, _), before in zip(self.slots, held, strict=True):
                submodule._parameters[attribute] = before

    @contextlib.contextmanager
    def running(self, params: ports.Params, key: int | None) -> Iterator[None]:
        """Open everything that a pass needs: the swap, the precision rule, the draws of dropout."""
        device = next(iter(params.values())).device
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.swap(params))
            stack.enter_context(_precise(params))
            if key is None:
                stack.enter_context(self._still())
            elif self.module.training:
                devices = [] if device.type == "cpu" else [device]
                stack.enter_context(torch.random.fork_rng(devices))
                torch.manual_seed(key)
            yield

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """Leave the mode of training, in which dropout draws, for one pass."""
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
            return _nothing(each, params)
        return rows(each, self.edges(each, tree_attention.route(each, kind=self.attention), params))

    def edges(
        self, each: pack.Pack, route: tree_attention.Route, params: ports.Params
    ) -> dict[str, Float[Tensor, " edges"]]:
        """Return the fields of Scores at the edges that the nodes of a route predict.

        Args:
            each: the forest.
            route: which of its nodes run.
            params: what is swapped in.
        """
        hidden = self.hidden(route, params)
        parents = hidden.index_select(0, each.edge_nodes[route.edges] - route.nodes[0])
        if self.scalar:
            return scalar_head.score(self.module, parents)
        output: Any = self.module.get_output_embeddings()
        return head.score(
            parents,
            output.weight,
            each.edge_tokens[route.edges],
            bias=getattr(output, "bias", None),
            shape=self.shape,
            needs=each.needs,
            slopes=None if each.slopes is None else each.slopes[route.edges],
        )

    def hidden(
        self, route: tree_attention.Route | tree_attention.Step, params: ports.Params
    ) -> Float[Tensor, "nodes hidden"]:
        """Return the last hidden state of every node that runs."""
        if self.max_length and route.max_depth >= self.max_length:
            raise ValueError(
                f"a sequence has {route.max_depth + 1} tokens; beyond {self.max_length} this "
                f"{self.module.config.model_type} model turns positions by the longest sequence of a pack. "
                f"Set max_length to {self.max_length} or less."
            )

        def recompute() -> tuple[Any, Any]:
            return contextlib.nullcontext(), _both(self.swap(params), _precise(params))

        def layer_by_layer(function: Any, *args: Any, **kwargs: Any) -> Any:
            return checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=recompute, **kwargs)

        if self.module.is_activation_checkpointing:
            self.module._set_gradient_checkpointing(True, layer_by_layer)
        outputs = self.module.base_model(
            input_ids=route.tokens[None], position_ids=route.depths[None], use_cache=False, tree=route
        )
        return outputs.last_hidden_state[0]


def rows(each: pack.Pack, fields: Mapping[str, Tensor]) -> pack.Scores:
    """Spread fields at the edges over the rows of the batch."""
    return pack.Scores(**{n: v.index_select(0, each.term_edges) for n, v in fields.items()})


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


def _precise(params: ports.Params) -> contextlib.AbstractContextManager[Any]:
    """Return the mode that float64 needs, nothing otherwise."""
    double = any(p.dtype == torch.float64 for p in params.values())
    return KeepDouble() if double else contextlib.nullcontext()


@contextlib.contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


def _nothing(each: pack.Pack, params: ports.Params) -> pack.Scores:
    """Score a pack in which nobody trains; the empty table still has a graph to the parameters."""
    first = next(iter(params.values()))
    empty = first.flatten()[:0].to(torch.promote_types(first.dtype, torch.float32))
    return pack.Scores(logprobs=empty, **dict.fromkeys(each.needs, empty))
