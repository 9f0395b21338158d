"""Prompts with the completions of others: what tells how far a policy has moved from its reference."""

from collections.abc import Sequence

import attrs
import numpy as np

from core.plan import sample as samples_


def rotated(samples: Sequence[samples_.Sample]) -> list[samples_.Sample]:
    """Return the samples of a step, then each prompt once more with the completion of the next sample.

    A completion begins at the first trained token. The next sample is one place on, the first for the last;
    samples that begin with the same prompt are passed over as long as there is another prompt, so that no
    prompt meets its own completion even where rows repeat.

    Args:
        samples: of the whole step, in its order, each a prompt and a completion.

    Returns:
        Twice as many: first those that came, with a per-sample column `mismatched` of 0, then the others,
        with 1, units of their own, the group of the prompt and no columns per token, which are for whoever
        scores them to fill.

    Raises:
        ValueError: there is one sample alone.
    """
    if len(samples) == 1:
        raise ValueError(
            "a step of one sample came; a prompt is paired with the completion of another, so at least 2 are "
            "wanted: raise batch_size."
        )
    starts = [int(s.trained.argmax()) if s.trained.any() else len(s.tokens) for s in samples]
    prompts = [s.tokens[:start].tobytes() for s, start in zip(samples, starts, strict=True)]
    unit = 1 + max((s.unit for s in samples), default=0)
    return [
        *(attrs.evolve(s, columns={**s.columns, "mismatched": 0.0}) for s in samples),
        *(
            _joined(samples[i], starts[i], samples[j], starts[j], unit + i)
            for i, j in enumerate(_partners(prompts))
        ),
    ]


def _partners(prompts: Sequence[bytes]) -> list[int]:
    """Return the place of the next other prompt after each, the next place where all are alike."""
    size = len(prompts)
    partners = [(i + 1) % size for i in range(size)]
    # From the back, twice around: where the next prompt is the same, its partner is mine too.
    for i in reversed(range(2 * size)):
        here, after = i % size, (i + 1) % size
        if prompts[here] == prompts[after] and prompts[partners[after]] != prompts[here]:
            partners[here] = partners[after]
    return partners


def _joined(
    prompt: samples_.Sample, stop: int, other: samples_.Sample, start: int, unit: int
) -> samples_.Sample:
    """Put the prompt of one sample before the completion of another."""
    share = None
    if prompt.share is not None or other.share is not None:
        share = np.concatenate([_share(prompt)[:stop], _share(other)[start:]])
    columns = {n: v for n, v in prompt.columns.items() if not isinstance(v, np.ndarray)}
    return samples_.Sample(
        tokens=np.concatenate([prompt.tokens[:stop], other.tokens[start:]]),
        trained=np.concatenate([np.zeros(stop, np.bool_), other.trained[start:]]),
        columns={**columns, "mismatched": 1.0},
        group=prompt.group,
        unit=unit,
        share=share,
    )


def _share(one: samples_.Sample) -> np.ndarray:
    """Return the share keys of a sample, zeros where it has none."""
    return np.zeros(len(one.tokens), np.int64) if one.share is None else one.share
