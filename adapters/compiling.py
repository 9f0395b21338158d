"""The decoder of a model, from tokens to the hidden states that edges lead from, as compiled graphs.

The parameters that are swapped in are inputs of a graph: an update makes no new one. Passes that no gradient
is wanted of run through the same forward, so that a size has one graph a direction, whatever runs at it.

Compilers are counted where they are called. Dynamo's frames are not graphs: a backward is compiled apart, and
later.
"""

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import attrs
import torch
from jaxtyping import Float
from torch import Tensor
from torch._dynamo import callback, exc
from torch.fx.experimental import _config as symbolic

from core import pack

Decode = Callable[[pack.Pack], Float[Tensor, "edges hidden"]]
Beyond = Literal["stop", "eager"]
FREE_GRAPHS = 8
"""Graphs a mode where shapes are symbols: sizes of 0 and 1 have graphs of their own."""
_DEEP = 1 << 30
_ALONE = 2


@attrs.define(kw_only=True)
class Counts:
    """What was compiled so far, in this process.

    Attributes:
        forward, backward: calls of the compiler.
        seconds: that tracing and compiling took.
        fallbacks: forwards that ran without a graph: pieces, and what came beyond the limit.
    """

    forward: int = 0
    backward: int = 0
    seconds: float = 0.0
    fallbacks: int = 0


class Unplanned(ValueError):
    """More graphs were asked for than were planned, or the model is none."""


class Decoder:
    """A decoder that is compiled as its shapes come.

    Attributes:
        counts: what was compiled.
        limit: most forward graphs.
    """

    def __init__(
        self,
        decode: Decode,
        *,
        backend: str,
        static: bool,
        limit: int,
        beyond: Beyond = "stop",
    ) -> None:
        """Compile nothing yet.

        Args:
            decode: from a pack of one piece; reads tensors and `max_depth` alone.
            backend: of torch.compile.
            static: every shape has its graph; otherwise sizes are symbols.
            limit: most forward graphs.
            beyond: what becomes of a shape for which there is no graph left: `stop` raises, `eager` runs it
                as it is, and counts.
        """
        self.counts, self.limit = Counts(), limit
        self._static, self._beyond, self._decode = static, beyond, decode
        self._counts_backwards = backend != "inductor"
        # Recompilations are counted apart: the limit is this model's own.
        asked: dict[str, Any] = {"dynamic": not static, "fullgraph": True, "isolate_recompiles": True}
        self._compiled = torch.compile(decode, backend=counted(backend, self.counts), **asked)

    def __call__(self, each: pack.Pack) -> Float[Tensor, "edges hidden"]:
        """Return the hidden states that the edges lead from.

        Raises:
            Unplanned: there is no graph left, or the model cannot be one.
        """
        # One graph a size, however deep its trees are.
        given = attrs.evolve(each, max_depth=len(each.tokens) - 1 if self._static else _DEEP)
        if not self._static:
            # A table of one row would have a graph of its own; empty rows change nothing.
            given = attrs.evolve(given, table=torch.cat([each.table, each.table.new_zeros(_ALONE, 5)]))
        wanted = torch.is_grad_enabled()
        try:
            with torch.enable_grad(), self._limited():
                hidden = self._compiled(given)
        except exc.FailOnRecompileLimitHit as problem:
            if self._beyond == "stop":
                raise Unplanned(
                    f"graph {self.limit + 1} was asked for by a forward of {len(each.tokens)} tokens, and "
                    f"{self.limit} are planned; let what comes beyond run as it is (--compile_beyond eager)"
                ) from problem
            self.counts.fallbacks += 1
            hidden = self._decode(each)
        except exc.TorchDynamoException as problem:
            told = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            raise Unplanned(
                f"the model cannot be compiled as one graph ({told}); leave compile out"
            ) from problem
        return hidden if wanted else hidden.detach()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Take the time of what is compiled meanwhile, and count the backwards that come late."""
        began = 0.0

        def start(told: callback.CallbackArgs) -> None:
            nonlocal began
            began = time.perf_counter()
            late = told.callback_trigger is callback.CallbackTrigger.LAZY_BACKWARD
            self.counts.backward += int(late and self._counts_backwards)

        def end(_: callback.CallbackArgs) -> None:
            self.counts.seconds += time.perf_counter() - began

        callback.callback_handler.register_start_callback(start)
        callback.callback_handler.register_end_callback(end)
        try:
            yield
        finally:
            callback.callback_handler.remove_start_callback(start)
            callback.callback_handler.remove_end_callback(end)

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """Let the compiler make as many graphs as are planned, and fail beyond."""
        limits = {"fail_on_recompile_limit_hit": True, "recompile_limit": self.limit}
        # Without it sizes that happen to agree once would be one size.
        apart = symbolic.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        with torch._dynamo.config.patch(limits), apart:
            yield


def counted(backend: Any, counts: Counts) -> Callable[..., Any]:
    """Return a backend that counts forwards; of Inductor the backwards too, which others compile unseen.

    Args:
        backend: of torch.compile, by its name or itself.
        counts: are added to.
    """
    if backend != "inductor":
        found = torch._dynamo.lookup_backend(backend)

        def forwards(graph: Any, examples: Any, **options: Any) -> Any:
            made = found(graph, examples, **options)
            counts.forward += 1  # not before: a trace that begins anew has made none
            return made

        return forwards

    # Loading Inductor takes a second or two, which a run that compiles nothing should not wait for.
    compile_fx = importlib.import_module("torch._inductor.compile_fx")

    def inner(graph: Any, examples: Any, **options: Any) -> Any:
        if options.get("is_backward"):
            counts.backward += 1
        else:
            counts.forward += 1
        return compile_fx.compile_fx_inner(graph, examples, **options)

    def both(graph: Any, examples: Any, **options: Any) -> Any:
        before = attrs.evolve(counts)
        made = compile_fx.compile_fx(graph, examples, inner_compile=inner, **options)
        if counts == before:  # an earlier process had compiled it: it was loaded, both directions at once
            counts.forward += 1
            counts.backward += any(isinstance(e, Tensor) and e.requires_grad for e in examples)
        return made

    return both
