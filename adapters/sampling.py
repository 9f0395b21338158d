"""Completions drawn from a bound model in this process: the engine that needs nothing but the model.

A draw is named by (key, prompt number, sample, position), whatever else is in the call. A prompt runs once.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from adapters import cache, draws, endings, packing, transformers_lm
from core import head, ports

# Packing takes as long as ten to twenty steps save by it.
_WORTH_PACKING = 24


@attrs.frozen(eq=False)
class Sampler:
    """An Engine on a TransformersLM.

    Attributes:
        model: what is drawn from. The temperature of its head is not read: that of the sampling is.
        decode: token ids to text; read only where there are stop strings.
        max_samples: most completions that are drawn at a time, but for a larger group, which stays together.
        prefill_budget: most tokens of prompts in one forward.
        packing_bytes: most memory for a second copy of weights in a layout that makes steps faster; see
            `adapters.packing`. 0: none.
    """

    model: transformers_lm.TransformersLM
    decode: endings.Decoder | None = None
    max_samples: int = attrs.field(default=256, kw_only=True)
    prefill_budget: int = attrs.field(default=4096, kw_only=True)
    packing_bytes: int = attrs.field(default=1 << 32, kw_only=True)

    def generate(
        self,
        params: ports.Params,
        prompts: Sequence[np.ndarray],
        numbers: Sequence[int],
        *,
        num_samples: int,
        sampling: ports.Sampling,
        key: int,
    ) -> list[list[ports.Completion]]:
        """Draw completions of prompts; see `core.ports.Engine`.

        A completion that reaches what the model holds is cut off there.

        Raises:
            ValueError: a prompt is empty or leaves no room in what the model holds, the sampling's numbers
                make no sense, or the model's logits are not finite.
        """
        _check(sampling, self.decode)
        limit = _limit(self.model)
        for prompt, number in zip(prompts, numbers, strict=True):
            _check_prompt(prompt, number, limit)
        if num_samples < 1 or sampling.max_tokens == 0:
            return [[_nothing() for _ in range(num_samples)] for _ in prompts]
        found: list[list[ports.Completion]] = []
        with torch.no_grad(), self.model.running(params, None):
            waves = list(_waves(len(prompts), max(1, self.max_samples // num_samples)))
            stepping = self._packed(params, len(waves) * sampling.max_tokens, num_samples * len(prompts))
            for wave in waves:
                drawing = _Drawing(self, params, prompts[wave], numbers[wave], num_samples, sampling, key)
                with self.model.swap(stepping):
                    found += drawing.completions(limit)
        return found

    def _packed(self, params: ports.Params, num_steps: int, num_rows: int) -> ports.Params:
        """Return the parameters that steps run with, packed where there are enough of them."""
        if num_steps < _WORTH_PACKING:
            return params
        rows = min(num_rows, self.max_samples)
        return packing.packed(self.model, params, rows=rows, max_bytes=self.packing_bytes)


class _Drawing:
    """Some groups, drawn side by side; inside a run of the model.

    A row is a completion, in the order of the prompts' nodes; `live` are the rows that the cache still holds,
    `active` says which of these have not ended.
    """

    def __init__(
        self,
        sampler: Sampler,
        params: ports.Params,
        prompts: Sequence[np.ndarray],
        numbers: Sequence[int],
        num_samples: int,
        sampling: ports.Sampling,
        key: int,
    ) -> None:
        self._model, self._params, self._sampling, self._key = sampler.model, params, sampling, key
        self._stops = (frozenset(sampling.stop_ids), sampling.stop_strings, sampler.decode)
        self._prompts, self._num_samples = prompts, num_samples
        self._past, self._hidden = cache.prefill(
            sampler.model, params, prompts, budget=sampler.prefill_budget
        )
        leaves = np.repeat(self._past.tree.leaves, num_samples)
        self._order = np.argsort(leaves, kind="stable")
        self._leaves = leaves[self._order]
        self._owners, self._samples = np.divmod(self._order, num_samples)
        self._numbers = np.asarray(numbers, np.int64)[self._owners]
        self._tokens: list[list[int]] = [[] for _ in self._order]
        self._logprobs: list[list[float]] = [[] for _ in self._order]
        self._kept: list[list[float]] = [[] for _ in self._order]
        self._ended = np.zeros(len(self._order), np.bool_)

    def completions(self, limit: int | None) -> list[list[ports.Completion]]:
        """Draw until all have ended or are cut off; in the order of the prompts.

        Args:
            limit: most tokens that the model holds.
        """
        lengths = np.array([len(p) for p in self._prompts], np.int64)[self._owners]
        room = np.full(len(lengths), self._sampling.max_tokens, np.int64)
        if limit is not None:
            room = np.minimum(room, limit - lengths)
        step = cache.Decode(self._past, self._leaves, limit=int(room.max()))
        live, active = np.arange(len(lengths)), np.ones(len(lengths), np.bool_)
        owners = torch.from_numpy(self._owners).to(self._hidden.device)
        logits = self._logits(self._hidden).index_select(0, owners)
        for position in range(int(room.max())):
            tokens = self._take(logits, live, active, position)
            active &= ~self._ended[live] & (room[live] > position + 1)
            if not active.any():
                break
            if 4 * active.sum() <= 3 * len(active):
                kept = np.flatnonzero(active)
                step.keep(kept)
                live, active = live[kept], active[kept]
                tokens = tokens.index_select(0, torch.from_numpy(kept).to(tokens.device))
            step.advance(tokens)
            logits = self._logits(self._model.hidden(step, self._params))
        return self._grouped()

    def _take(self, logits: Tensor, live: np.ndarray, active: np.ndarray, position: int) -> Tensor:
        """Draw a token of each live row and note it for those that are active."""
        numbers = draws.uniforms(self._key, self._numbers[live], self._samples[live], position)
        drawn = draws.draw(logits, numbers, self._sampling)
        noted = (drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.kept.tolist())
        for row, going, token, logprob, kept in zip(live.tolist(), active.tolist(), *noted, strict=True):
            if not going:
                continue
            if not logprob > -np.inf:
                raise ValueError(
                    f"prompt {self._numbers[row]}: the model's logits are not finite after {position} drawn "
                    "tokens; its parameters are broken. Take an earlier checkpoint, or lower learning_rate."
                )
            self._tokens[row].append(token)
            self._logprobs[row].append(logprob)
            self._kept[row].append(kept)
            self._ended[row] = endings.ends(self._tokens[row], *self._stops)
        return drawn.tokens

    def _logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Return logits before the temperature."""
        output: Any = self._model.module.get_output_embeddings()
        shape = attrs.evolve(self._model.shape, temperature=1.0)
        return head.logits(hidden, output.weight, getattr(output, "bias", None), shape)

    def _grouped(self) -> list[list[ports.Completion]]:
        """Return the completions by prompt and sample."""
        place = np.argsort(self._order).reshape(-1, self._num_samples)
        return [[self._completion(row) for row in group] for group in place.tolist()]

    def _completion(self, row: int) -> ports.Completion:
        return ports.Completion(
            tokens=np.array(self._tokens[row], np.int64),
            logprobs=np.array(self._logprobs[row], np.float32),
            kept=np.array(self._kept[row], np.float32),
            ended=bool(self._ended[row]),
        )


def _waves(num_prompts: int, size: int) -> Iterator[slice]:
    """Cut the prompts into runs that are drawn at a time."""
    return (slice(start, start + size) for start in range(0, num_prompts, size))


def _limit(model: transformers_lm.TransformersLM) -> int | None:
    """Return how many tokens the model holds; None: nothing says."""
    held = getattr(model.module.config.get_text_config(), "max_position_embeddings", None)
    return min((n for n in (held, model.max_length) if n), default=None)


def _check_prompt(prompt: np.ndarray, number: int, limit: int | None) -> None:
    """Refuse a prompt after which nothing can be drawn."""
    if not len(prompt):
        raise ValueError(f"prompt {number} has no tokens; a completion needs one at least. Drop the prompt.")
    if limit is not None and len(prompt) >= limit:
        raise ValueError(
            f"prompt {number} has {len(prompt)} tokens; the model holds {limit}, the completion included. "
            "Drop the prompt or cut it."
        )


def _check(sampling: ports.Sampling, decode: endings.Decoder | None) -> None:
    """Refuse numbers that name no distribution, and strings that nobody can read."""
    wanted: Mapping[str, tuple[Any, bool, str]] = {
        "temperature": (sampling.temperature, 0.0 <= sampling.temperature < np.inf, "0 or more"),
        "top_k": (sampling.top_k, sampling.top_k >= 0, "0 (all) or more"),
        "top_p": (sampling.top_p, 0.0 < sampling.top_p <= 1.0, "more than 0 and at most 1"),
        "min_p": (sampling.min_p, 0.0 <= sampling.min_p <= 1.0, "from 0 (all) to 1"),
        "max_tokens": (sampling.max_tokens, sampling.max_tokens >= 0, "0 or more"),
    }
    for name, (came, good, want) in wanted.items():
        if not good:
            raise ValueError(f"sampling: {name} is {came}; it must be {want}.")
    if "" in sampling.stop_strings:
        raise ValueError("sampling: a stop string is empty, and every text holds it. Take it out.")
    if sampling.stop_strings and decode is None:
        raise ValueError(
            "sampling: there are stop strings and nothing to decode tokens with; give the engine decode=."
        )


def _nothing() -> ports.Completion:
    """Return a completion of no tokens, cut off."""
    none = np.zeros(0, np.float32)
    return ports.Completion(tokens=np.zeros(0, np.int64), logprobs=none, kept=none, ended=False)
