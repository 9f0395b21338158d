"""Counter-based randomness: a key is an integer, and every draw names what it is for.

A key is derived, never advanced, so regrouping samples into other packs, stopping and resuming, or asking
twice changes no draw.
"""

import hashlib
import operator
from typing import SupportsIndex

import numpy as np
from jaxtyping import UInt64

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


def mixed(state: UInt64[np.ndarray, " states"]) -> UInt64[np.ndarray, " states"]:
    """Hash 64-bit numbers, each for itself: one step of SplitMix64, a bijection.

    Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators". Integers alone, so that it is
    the same on every platform and with every version of anything.

    Args:
        state: any 64 bits each; sums of them wrap.
    """
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
