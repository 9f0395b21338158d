"""Samples within `max_length`: cut, drop or split what is longer, and count what became of every row."""

import collections
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from shell import counts, encode

TOO_LONG = "longer than max_length"
CUT_AWAY = "nothing left to train after the cut to max_length"
UNTRAINED = "nothing to train"


@attrs.frozen(kw_only=True, eq=False)
class Piece:
    """What makes a sample.

    Attributes:
        tokens: ids, int64 `[length]`.
        trained: targets, bool `[length]`; the first is never one.
        columns: numbers of the sample by name.
    """

    tokens: np.ndarray
    trained: np.ndarray
    columns: Mapping[str, float] = attrs.field(factory=dict)


def fit(
    drafts: Sequence[encode.Draft], *, max_length: int | None, truncation: str
) -> tuple[list[list[Piece]], counts.Counts]:
    """Bring rows within `max_length` tokens.

    `keep_start` and `keep_end` cut the other end away. `drop` leaves longer rows out. `split` takes the next
    `max_length` tokens as a further sample, until none are left; the first token of each sample is never a
    target, since nothing precedes it. A piece without a target is dropped: as cut tokens when its row has
    others, else as a dropped row.

    Args:
        drafts: encoded rows.
        max_length: most tokens of a sample; None for no limit.
        truncation: `keep_start`, `keep_end`, `drop` or `split`.

    Returns:
        The samples of each row (none where it was dropped), and the counts.
    """
    tally: collections.Counter[str] = collections.Counter(read=len(drafts))
    dropped: collections.Counter[str] = collections.Counter()
    result = []
    for draft in drafts:
        long = max_length is not None and len(draft.tokens) > max_length
        parts = _parts(draft, max_length if long else None, truncation)
        pieces = [piece for piece in parts if piece.trained.any()]
        result.append(pieces)
        if not pieces:
            whole = draft.trained[1:].any()
            dropped[UNTRAINED if not whole else TOO_LONG if truncation == "drop" else CUT_AWAY] += 1
            continue
        _count(tally, draft, pieces)
    return result, counts.Counts(**tally, dropped=dict(dropped))


def _parts(draft: encode.Draft, limit: int | None, truncation: str) -> list[Piece]:
    """Return the parts of one row; a limit is given only where the row is longer."""
    if limit is None:
        limit = max(len(draft.tokens), 1)
    elif truncation == "drop":
        return []
    if truncation == "split":
        return [_piece(draft, start, start + limit) for start in range(0, len(draft.tokens), limit)]
    start = max(len(draft.tokens) - limit, 0) if truncation == "keep_end" else 0
    return [_piece(draft, start, start + limit)]


def _piece(draft: encode.Draft, start: int, stop: int) -> Piece:
    """Take a part of a row; what nothing precedes is no target."""
    trained = draft.trained[start:stop].copy()
    trained[:1] = False
    return Piece(tokens=draft.tokens[start:stop], trained=trained)


def _count(tally: collections.Counter[str], draft: encode.Draft, pieces: Sequence[Piece]) -> None:
    """Count a row that is used."""
    tokens = sum(len(piece.tokens) for piece in pieces)
    cut = len(draft.tokens) - tokens
    tally.update(
        used=1,
        samples=len(pieces),
        tokens=tokens,
        trained=sum(int(piece.trained.sum()) for piece in pieces),
        cut_rows=int(cut > 0),
        cut_tokens=cut,
        split_rows=int(len(pieces) > 1),
        unclosed=int(not draft.closed),
        endless=int(draft.endless),
        tools_unseen=int(draft.tools_unseen),
    )
