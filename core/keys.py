"""Counter-based randomness: a key is an integer, and every draw names what it is for.

A key is derived, never advanced, so regrouping samples into other packs, stopping and resuming, or asking
twice changes no draw.
"""

import hashlib
import operator
from typing import SupportsIndex

MASK = (1 << 63) - 1


def key(seed: int) -> int:
    """Make the root key of a run from its seed."""
    return fold_in(0, seed)


def fold_in(parent: int, *data: SupportsIndex | str) -> int:
    """Derive a key from `parent` and the words or numbers that name its use.

    >>> fold_in(key(1), "dropout", 3) == fold_in(key(1), "dropout", 3)
    True
    >>> fold_in(key(1), "dropout", 3) == fold_in(key(1), "dropout", 4)
    False

    Args:
        parent: a key, in `[0, 2^63)`.
        data: what the draw is for: a step, a pack, a sample, a position, a word.

    Returns:
        A key in `[0, 2^63)`, spread uniformly (BLAKE2b).
    """
    words = (d if isinstance(d, str) else operator.index(d) for d in data)
    text = repr((parent, *words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & MASK
