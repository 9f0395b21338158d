"""Sequences that share prefixes, for properties, and what is true of them by brute force."""

import numpy as np
from hypothesis import strategies as st

from core.plan import sample


@st.composite
def sequences(draw, max_sequences=10, max_length=12, min_length=0):
    """Draw token lists, most of which continue a cut piece of an earlier one."""
    vocab = draw(st.sampled_from([1, 2, 3, 2**32]))
    tokens = st.lists(st.integers(0, vocab - 1), min_size=min_length, max_size=max_length)
    rows = []
    for _ in range(draw(st.integers(0, max_sequences))):
        tail = draw(tokens)
        if rows and draw(st.booleans()):
            base = draw(st.sampled_from(rows))
            tail = base[: draw(st.integers(0, len(base)))] + tail
        rows.append(tail)
    return rows


@st.composite
def samples(draw, max_samples=10, max_length=12):
    """Draw samples of a few groups and units, at least a token each."""
    rows = draw(sequences(max_sequences=max_samples, max_length=max_length, min_length=1))
    return [
        of(row, group=draw(st.integers(0, 3)), unit=draw(st.integers(0, 5)), first=draw(st.integers(1, 5)))
        for row in rows
    ]


def arrays(rows):
    """Return int64 arrays of lists."""
    return [np.array(row, np.int64) for row in rows]


def of(tokens, *, group=0, unit=0, first=1, share=None):
    """Return a sample that is trained from its token number `first` on."""
    tokens = np.array(tokens, np.int64)
    trained = np.arange(len(tokens)) >= max(first, 1)
    return sample.Sample(tokens=tokens, trained=trained, group=group, unit=unit, share=share)


def trie(rows):
    """Return every prefix of every row: the nodes of a trie."""
    return {tuple(row[:stop]) for row in rows for stop in range(1, len(row) + 1)}


def prefixes(tree):
    """Return the tokens from its root to each node of a tree, walking up parents."""
    found = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return found


def ancestors(tree):
    """Return the mask of ancestors and selves, [nodes, nodes], walking up parents."""
    mask = np.zeros((len(tree.tokens),) * 2, int)
    for node in range(len(mask)):
        above = node
        while above >= 0:
            mask[node, above] = 1
            above = tree.parents[above]
    return mask
