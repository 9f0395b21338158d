"""Sequences in lexicographic order, and how many leading tokens neighbors share: plans start here."""

import itertools
from collections.abc import Sequence

import attrs
import numpy as np
from jaxtyping import Int64, Integer

# Words of one vector comparison: long enough that a call's overhead does not show, short enough to stop
# early.
STRIDE = 8192
# Rows of fewer words on average are cheaper to copy and sort whole than to compare with a pivot first.
SHORT = 256


@attrs.frozen(kw_only=True, eq=False)
class PrefixOrder:
    """Sequences in lexicographic order (a prefix before what extends it, equal ones side by side).

    Attributes:
        order: index of the sequence at each place, int64 `[sequences]`.
        shared: leading tokens that the sequence at each place shares with the one before it, int64
            `[sequences]`; 0 at place 0.
        lengths: tokens of the sequence at each place, int64 `[sequences]`.
    """

    order: Int64[np.ndarray, " sequences"]
    shared: Int64[np.ndarray, " sequences"]
    lengths: Int64[np.ndarray, " sequences"]


def sort(
    sequences: Sequence[Integer[np.ndarray, " _"]],
    *,
    keys: Sequence[Integer[np.ndarray, " _"] | None] | None = None,
) -> PrefixOrder:
    """Sort sequences so that those with a long common prefix adjoin.

    Token ids compare as unsigned numbers; where keys are given, a token and its key compare together.

    Args:
        sequences: integer arrays of one axis, one a sample.
        keys: an integer array a sequence, as long as it, or None for all zeros.

    Returns:
        The order, the common prefix of neighbors, and the lengths.

    Raises:
        ValueError: a sequence is not an integer array of one axis, or a key does not line up with it.
    """
    rows, width = words(sequences, keys)
    order, shared = places(rows)
    lengths = np.array([len(rows[i]) for i in order], np.int64)
    return PrefixOrder(
        order=np.array(order, np.int64), shared=np.array(shared, np.int64) // width, lengths=lengths // width
    )


def words(
    sequences: Sequence[np.ndarray], keys: Sequence[np.ndarray | None] | None
) -> tuple[list[np.ndarray], int]:
    """Return what is compared, one int64 row a sequence, and how many words of it make up a token.

    Raises:
        ValueError: a sequence is not an integer array of one axis, or a key does not line up with it.
    """
    rows = [row if type(row) is np.ndarray and row.dtype == np.int64 else _integers(row) for row in sequences]
    for i, row in enumerate(rows):
        if row.ndim != 1:
            raise ValueError(f"sequence {i} has {row.ndim} axes; one axis of token ids is wanted.")
    if keys is None or all(key is None for key in keys):
        return rows, 1
    if len(keys) != len(rows):
        raise ValueError(
            f"{len(keys)} keys came with {len(rows)} sequences; one a sequence is wanted (None for none)."
        )
    pairs = []
    for i, (row, key) in enumerate(zip(rows, keys, strict=True)):
        pair = np.zeros((len(row), 2), np.int64)
        pair[:, 0] = row
        if key is not None:
            if np.shape(key) != row.shape:
                raise ValueError(f"the key of sequence {i} has shape {np.shape(key)}; {row.shape} is wanted.")
            pair[:, 1] = _integers(key)
        pairs.append(pair.reshape(-1))
    return pairs, 2


def places(rows: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """Return the rows' order and the words that each shares with the one before it.

    A group of rows is compared with its longest one, each word once: where a row leaves the longest gives
    its place, and rows that leave together form the next group. A group that this hardly divided, or whose
    rows are short, is sorted by bytes, so no row is compared with more than log2(rows) pivots however the
    rows branch.
    """
    order: list[int] = []
    shared: list[int] = []
    groups = [(list(range(len(rows))), 0, 0, True)] if rows else []
    while groups:
        members, common, first, divisible = groups.pop()
        if len(members) == 1:
            order.append(members[0])
            shared.append(first)
        elif divisible and sum([len(rows[i]) for i in members]) - common * len(members) >= SHORT * len(
            members
        ):
            groups.extend(reversed(_by_pivot(rows, members, common, first)))
        else:
            ordered, alike = _by_bytes(rows, members, common)
            order.extend(ordered)
            shared.extend([first, *alike])
    return order, shared


def _by_pivot(
    rows: Sequence[np.ndarray], members: list[int], common: int, first: int
) -> list[tuple[list[int], int, int, bool]]:
    """Divide rows by where they leave the longest of them, and with which word; groups come in order."""
    pivot = rows[max(members, key=lambda i: len(rows[i]))]
    leaving: dict[tuple[int, int, int], list[int]] = {}
    for i in members:
        row = rows[i]
        depth = common_prefix(pivot, row, common, STRIDE) if row is not pivot else len(pivot)
        if depth == len(row):
            side = (0, depth, -1)
        else:
            word, other = int(row[depth]) % 2**64, int(pivot[depth]) % 2**64
            side = (0, depth, word) if word < other else (1, -depth, word)
        leaving.setdefault(side, []).append(i)
    groups = []
    before = first
    for after, signed, word in sorted(leaving):
        depth = abs(signed)
        group = leaving[after, signed, word]
        lead = min(before, depth) if groups else first
        groups.append((group, depth + (word >= 0), lead, 2 * len(group) <= len(members)))
        before = depth
    return groups


def _by_bytes(rows: Sequence[np.ndarray], members: list[int], common: int) -> tuple[list[int], list[int]]:
    """Return rows in order of their big-endian bytes (memcmp), and what neighbors share."""
    tails = {i: rows[i][common:].astype(">i8").tobytes() for i in members}
    ordered = sorted(members, key=tails.__getitem__)
    pairs = itertools.pairwise(ordered)
    return ordered, [common_prefix(rows[i], rows[j], common, SHORT) for i, j in pairs]


def common_prefix(one: Int64[np.ndarray, " _"], two: Int64[np.ndarray, " _"], start: int, stride: int) -> int:
    """Return how many leading words two rows share, given that the first `start` are equal."""
    stop = min(len(one), len(two))
    while start < stop:
        end = min(start + stride, stop)
        differ = one[start:end] != two[start:end]
        at = int(differ.argmax())
        if differ[at]:
            return start + at
        start, stride = end, 4 * stride
    return stop


def _integers(row: np.ndarray) -> np.ndarray:
    """Return a row as int64; anything that is no integer is refused rather than cut."""
    array = np.asarray(row)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"a sequence holds {array.dtype}; integers are wanted.")
    if array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max:
        raise ValueError(f"a sequence holds {array.max()}; int64 is wanted, which ends at 2^63 - 1.")
    return array.astype(np.int64)
