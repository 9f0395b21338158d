"""Completions drawn from a bound model in this process: the engine that needs nothing but the model.

A draw is named by (key, prompt number, sample, position), whatever else is in the call. A prompt runs once.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from adapters import cache, draws, endings, packing, shards, static_cache, transformers_lm
from core import ports

WORTH_PACKING = 24
"""Steps from which weights are packed: packing takes as long as ten to twenty save by it."""
PACKING_BYTES = 1 << 32
"""Most memory of packed weights when nobody says."""


@attrs.frozen(eq=False)
class Sampler:
    """An Engine on a TransformersLM.

    Attributes:
        model: what is drawn from. The temperature of its head is not read: that of the sampling is.
        decode: token ids to text; read only where there are stop strings.
        static: the shapes of everything, for devices that compile each new one. None: shapes follow what is
            drawn, and what prompts share runs once.
        max_samples: most completions that are drawn at a time, but for a larger group, which stays together;
            where shapes are static, their rows are.
        prefill_budget: most tokens of prompts in one forward; static shapes have a chunk of their own for it.
        packing_bytes: most memory for a second copy of weights in a layout that makes steps faster; see
            `adapters.packing`. 0: none.
    """

    model: transformers_lm.TransformersLM
    decode: endings.Decoder | None = None
    static: static_cache.Shapes | None = attrs.field(default=None, kw_only=True)
    max_samples: int = attrs.field(default=256, kw_only=True)
    prefill_budget: int = attrs.field(default=4096, kw_only=True)
    packing_bytes: int = attrs.field(default=PACKING_BYTES, kw_only=True)

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

        A completion that reaches what the model, or a row of static shapes, holds is cut off there.

        Raises:
            ValueError: a prompt is empty or leaves no room in what the model holds, a group is larger than
                the rows of static shapes, the sampling's numbers make no sense, or the model's logits are not
                finite.
        """
        if self.model.sharding is not None:  # how often a process steps hangs on what it draws
            model, whole = shards.joined(self.model, params, device=None)
            asked = {"num_samples": num_samples, "sampling": sampling, "key": key}
            return attrs.evolve(self, model=model).generate(whole, prompts, numbers, **asked)
        _check(sampling, self.decode)
        limit, holder = _limit(self.model, self.static)
        for prompt, number in zip(prompts, numbers, strict=True):
            _check_prompt(prompt, number, limit, holder)
        if num_samples < 1 or sampling.max_tokens == 0 or not prompts:
            return [[_nothing() for _ in range(num_samples)] for _ in prompts]
        found: list[list[ports.Completion]] = []
        with torch.no_grad(), self.model.running(params, None):
            waves = list(_waves(len(prompts), max(1, self._rows(num_samples) // num_samples)))
            stepping = self._packed(params, len(waves) * sampling.max_tokens, num_samples * len(prompts))
            held = None if self.static is None else self.static.empty(self.model, params)
            for wave in waves:
                room = np.array([min(sampling.max_tokens, limit - len(p)) for p in prompts[wave]], np.int64)
                steps = self._steps(params, prompts[wave], num_samples, held, int(room.max()))
                drawing = _Drawing(steps.order, numbers[wave], num_samples, sampling, self.decode, key)
                with self.model.swap(stepping):
                    found += drawing.completions(steps, room)
        return found

    def _rows(self, num_samples: int) -> int:
        """Return how many completions are drawn side by side."""
        if self.static is None:
            return self.max_samples
        if num_samples > self.static.rows:
            raise ValueError(
                f"{num_samples} completions of a prompt came; the static cache has {self.static.rows} rows, "
                "and a group stays together. Make it larger."
            )
        return self.static.rows

    def _steps(
        self,
        params: ports.Params,
        prompts: Sequence[np.ndarray],
        num_samples: int,
        held: static_cache.Held | None,
        limit: int,
    ) -> cache.Steps | static_cache.Steps:
        """Run the prompts of a wave."""
        if self.static is None or held is None:
            return cache.Steps(
                self.model, params, prompts, num_samples, limit=limit, budget=self.prefill_budget
            )
        return static_cache.Steps(self.static, held, self.model, prompts, num_samples)

    def _packed(self, params: ports.Params, num_steps: int, num_rows: int) -> ports.Params:
        """Return the parameters that steps run with, packed where there are enough of them."""
        compiled = self.static is not None and self.static.compiled is not None
        if num_steps < WORTH_PACKING or compiled or self.model.autocast is not None:
            return params
        rows = min(num_rows, self.max_samples)
        return packing.packed(self.model, params, rows=rows, max_bytes=self.packing_bytes)


class _Drawing:
    """Some groups, drawn side by side; inside a run of the model.

    A row is a completion, in the order of the steps; `live` are the rows that these still hold, `active` says
    which of these have not ended.
    """

    def __init__(
        self,
        order: np.ndarray,
        numbers: Sequence[int],
        num_samples: int,
        sampling: ports.Sampling,
        decode: endings.Decoder | None,
        key: int,
    ) -> None:
        self._sampling, self._key = sampling, key
        self._stops = (frozenset(sampling.stop_ids), sampling.stop_strings, decode)
        self._order, self._num_samples = order, num_samples
        self._owners, self._samples = np.divmod(order, num_samples)
        self._numbers = np.asarray(numbers, np.int64)[self._owners]
        self._tokens: list[list[int]] = [[] for _ in order]
        self._logprobs: list[list[float]] = [[] for _ in order]
        self._kept: list[list[float]] = [[] for _ in order]
        self._ended = np.zeros(len(order), np.bool_)

    def completions(
        self, steps: cache.Steps | static_cache.Steps, room: np.ndarray
    ) -> list[list[ports.Completion]]:
        """Draw until all have ended or are cut off; in the order of the prompts.

        Args:
            steps: give logits.
            room: most tokens of the completions of each prompt.
        """
        room = room[self._owners]
        live, active = np.arange(len(room)), np.ones(len(room), np.bool_)
        logits = steps.first()
        for position in range(int(room.max())):
            tokens = self._take(logits, live, active, position)
            full = room[live] == position + 1
            active &= ~self._ended[live] & ~full
            if not active.any():
                break
            # Few that ended cost less than letting them go; one that is full has no position to go on at.
            if full.any() or 4 * active.sum() <= 3 * len(active):
                kept = np.flatnonzero(active)
                steps.keep(kept)
                live, active, tokens = live[kept], active[kept], tokens[kept]
            logits = steps.next(tokens)
        return self._grouped()

    def _take(self, logits: Tensor, live: np.ndarray, active: np.ndarray, position: int) -> np.ndarray:
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
        return np.array(noted[0], np.int64)

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


def _limit(model: transformers_lm.TransformersLM, static: static_cache.Shapes | None) -> tuple[int, str]:
    """Return how many tokens there is room for, and what has no more."""
    held = getattr(model.module.config.get_text_config(), "max_position_embeddings", None)
    own = min((n for n in (held, model.max_length) if n), default=sys.maxsize)
    if static is None or own <= static.length:
        return own, "the model"
    return static.length, "a row of the static cache"


def _check_prompt(prompt: np.ndarray, number: int, limit: int, holder: str) -> None:
    """Refuse a prompt after which nothing can be drawn."""
    if not len(prompt):
        raise ValueError(f"prompt {number} has no tokens; a completion needs one at least. Drop the prompt.")
    if len(prompt) >= limit:
        raise ValueError(
            f"prompt {number} has {len(prompt)} tokens; {holder} holds {limit}, the completion included. "
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
