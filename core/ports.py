"""The types that an adapter fills in: what the core asks of a device, a model and a generator.

Protocols and records only. Where PyTorch and a functional core meet, these rules hold:

* Differentiation belongs to the adapter (`Model.pull_back`): sharded modules ignore swapped parameters and
  answer only to `.backward()`, so the core never calls autograd on parameters.
* `params` is a mapping from names to tensors. A plain model reads exactly these tensors; a sharded or wrapped
  one may take it as a handle to its own.
* Forward and backward run inside one swap of the parameters; whatever is recomputed re-enters the swap.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from core import metrics, pack
from core.plan import padding, spans

Params = Mapping[str, Tensor]
Loss = Callable[[pack.Scores], tuple[Float[Tensor, ""], metrics.Metrics]]


@attrs.frozen(kw_only=True)
class Check:
    """What was found out about a device.

    Attributes:
        name: what was looked at.
        passed: whether it is as it should be.
        told: what was found, in a phrase.
    """

    name: str
    passed: bool
    told: str


@attrs.frozen(kw_only=True)
class Device:
    """An accelerator as data: what differs between devices stands here and nowhere else.

    Attributes:
        name: `cpu`, `cuda`, `rocm` or `neuron`.
        type: torch's name for it; ROCm says `cuda`.
        static_shapes: every new shape costs a compilation, so planned sizes are asked for.
        multiple: what planned sizes are multiples of, as in `padding.plan`.
        dtypes: what parameters may be.
        dtype: what parameters are when nobody says.
        attention: the kinds of attention over trees that it can run, the preferred one first.
        price: what blocks of attention cost, so that small ones are run together; None: each runs by itself.
        compile: arguments of `torch.compile`.
        generation: how completions are drawn: `static` (in shapes that never change), and with it `chunk`
            (tokens of a prompt in one forward) and `on_host` (draw on the host).
        start_method: how child processes are started, since an accelerator does not survive a fork; None: as
            the platform does.
        hide: environment variables that keep a child process off the device.
        memory: bytes that this process may use when it starts, less what others hold where the device tells
            that; None where nothing can be asked.
        start: makes it ready: takes the device, and returns what it is on this machine. Raises ValueError
            where it cannot be used, saying what to do.
        checks: looks at it, after `start`.
    """

    name: str
    type: str
    static_shapes: bool
    multiple: padding.Multiple
    dtypes: tuple[torch.dtype, ...]
    dtype: torch.dtype
    attention: tuple[str, ...]
    compile: Mapping[str, Any]
    generation: Mapping[str, Any]
    start_method: str | None
    hide: Mapping[str, str]
    memory: Callable[[], int | None]
    start: Callable[["Device"], "Device"]
    checks: Callable[[], tuple[Check, ...]]
    price: spans.Price | None = None


@attrs.frozen(kw_only=True)
class Ranks:
    """The processes that share a step, as data.

    Attributes:
        index: which of them this is.
        num: how many there are.
        sum: adds a tree of tensors up over all, the same result to the bit on each.
        merge: merges metrics over all.
        split: parameters are split over them: each has its part of gradients that are summed up already.
    """

    index: int
    num: int
    sum: Callable[[Any], Any]
    merge: Callable[[metrics.Metrics], metrics.Metrics]
    split: bool = False


ALONE = Ranks(index=0, num=1, sum=lambda tree: tree, merge=lambda means: means)
"""One process."""


@runtime_checkable
class Model(Protocol):
    """A language model as two pure functions of its parameters."""

    def predict(self, params: Params, pack: pack.Pack, key: int | None) -> pack.Scores:
        """Score every row of the pack, without gradients.

        Args:
            params: the trained parameters by name.
            pack: the forest and its table.
            key: names the draws of dropout; the same key draws the same mask. None: nothing is drawn.
        """
        ...

    def pull_back(
        self, params: Params, pack: pack.Pack, key: int, loss: Loss
    ) -> tuple[Float[Tensor, ""], metrics.Metrics, dict[str, Tensor]]:
        """Run forward, `loss` and backward inside one swap of the parameters.

        Args:
            params: the trained parameters by name.
            pack: the forest and its table.
            key: as in `predict`; both passes of a step are given the same one.
            loss: scores to a scalar and metrics.

        Returns:
            The scalar, the metrics, and a gradient for every parameter, zeros where none flowed.
        """
        ...


@attrs.frozen(kw_only=True)
class Sampling:
    """How completions are drawn.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: keep this many of the likeliest tokens; 0: all.
        top_p: keep the likeliest tokens up to this sum of probabilities.
        min_p: keep tokens of at least this part of the likeliest one's probability; 0: all.
        max_tokens: most tokens of a completion.
        stop_ids: tokens that end a completion; they are part of it.
        stop_strings: texts that end a completion once its decoded text holds one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 512
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@attrs.frozen(kw_only=True, eq=False)
class Completion:
    """What was drawn after a prompt.

    Attributes:
        tokens: int64 `[drawn]`, the token that ended it included.
        logprobs: log-probability (nats) of each under the full tempered distribution, float32 `[drawn]`.
        kept: probability mass that top-k, top-p and min-p kept at each draw, float32 `[drawn]`.
        ended: a stop token or string came; False: cut off at `max_tokens`.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    kept: np.ndarray
    ended: bool


@runtime_checkable
class Engine(Protocol):
    """Something that completes prompts."""

    def generate(
        self,
        params: Params,
        prompts: Sequence[np.ndarray],
        numbers: Sequence[int],
        *,
        num_samples: int,
        sampling: Sampling,
        key: int,
    ) -> list[list[Completion]]:
        """Draw completions of prompts.

        Args:
            params: the parameters to draw with.
            prompts: token ids, int64 `[length]` each.
            numbers: of the prompts; a draw is named by (key, number, sample, position), so what else is in
                the call changes none.
            num_samples: completions of each prompt.
            sampling: how they are drawn.
            key: names the draws.

        Returns:
            `num_samples` completions of each prompt.
        """
        ...
