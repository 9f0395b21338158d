"""One trained sequence, on the host."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

OWN = frozenset({"sample", "group", "num_terms", "num_samples", "chosen", "rejected"})
"""Columns that the table of a batch makes itself."""


@attrs.frozen(kw_only=True, eq=False)
class Sample:
    """One sequence that is trained, before anything is shared, packed or moved to a device.

    Attributes:
        tokens: token ids, int64 `[length]`.
        trained: True where the token is a target, bool `[length]`. Nothing predicts the first token: it is
            never one.
        columns: what an algorithm asked for: an array `[length]` holds a number a token, a plain number one a
            sample.
        group: which prompt the sample belongs to.
        unit: what must be seen together; both sides of a pair bear one number.
        share: optional int64 `[length]`; two tokens are merged only where these keys agree too. None: tokens
            alone decide.
    """

    tokens: np.ndarray
    trained: np.ndarray
    columns: Mapping[str, np.ndarray | float] = attrs.field(factory=dict)
    group: int = 0
    unit: int = 0
    share: np.ndarray | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse fields that do not line up."""
        for name, array in (("tokens", self.tokens), ("trained", self.trained), ("share", self.share)):
            _check_array(name, array)
        length = len(self.tokens)
        if self.tokens.dtype != np.int64 or self.tokens.ndim != 1:
            raise ValueError(
                f"Sample.tokens is {self.tokens.dtype} of {self.tokens.ndim} axes; int64 [length] is wanted."
            )
        if length and self.tokens.min() < 0:
            raise ValueError(f"Sample.tokens holds {self.tokens.min()}; ids of 0 and more are wanted.")
        if self.trained.shape != (length,) or self.trained.dtype != np.bool_:
            raise ValueError(
                f"Sample.trained is {self.trained.dtype} {self.trained.shape}; bool ({length},) is wanted."
            )
        _check_share(self.share, length)
        if length and self.trained[0]:
            raise ValueError("Sample.trained[0] is True; nothing predicts a first token, so set it to False.")
        taken = sorted(OWN & self.columns.keys())
        if taken:
            raise ValueError(
                f"Sample column {taken[0]!r} is one that the table makes itself; name it otherwise."
            )
        for name, column in self.columns.items():
            _check_column(name, column, length)


def check_columns(samples: Sequence[Sample]) -> None:
    """Refuse samples of one pack whose columns are not the same: its table has each for all or none.

    Args:
        samples: those that go into the pack.

    Raises:
        ValueError: names the column and two samples.
    """
    kinds = [{n: isinstance(v, np.ndarray) for n, v in s.columns.items()} for s in samples]
    place, odd = next(((i, kind) for i, kind in enumerate(kinds) if kind != kinds[0]), (0, None))
    if odd is None:
        return
    name = min(n for n in {*odd, *kinds[0]} if odd.get(n) != kinds[0].get(n))
    told = {None: "has none", True: "has a number a token", False: "has one number"}
    raise ValueError(
        f"column {name!r}: sample 0 {told[kinds[0].get(name)]} and sample {place} {told[odd.get(name)]}; the "
        "same columns of the same kind are wanted of every sample."
    )


def _check_array(name: str, array: Any) -> None:
    """Refuse what is no array, or one that hides some of its numbers."""
    if not isinstance(array, np.ndarray | None) or isinstance(array, np.ma.MaskedArray):
        kind = type(array).__name__
        raise ValueError(f"Sample.{name} is a {kind}; an array is wanted: numpy.asarray({name}).")


def _check_share(share: np.ndarray | None, length: int) -> None:
    """Refuse keys that are not an integer a token."""
    if share is not None and (share.shape != (length,) or share.dtype.kind not in "iu"):
        raise ValueError(f"Sample.share is {share.dtype} {share.shape}; int64 ({length},) is wanted.")


def _check_column(name: str, column: Any, length: int) -> None:
    """Refuse a column that is neither a number a token nor one a sample."""
    if not isinstance(column, np.ndarray):
        if not isinstance(column, numbers.Real | np.bool_):
            raise ValueError(
                f"Sample column {name!r} is a {type(column).__name__}; an array [length], with a number a "
                "token, or a plain number is wanted."
            )
    elif column.shape != (length,):
        raise ValueError(
            f"Sample column {name!r} has shape {column.shape}; ({length},) or a number is wanted."
        )
    elif column.dtype.kind not in "biuf" or isinstance(column, np.ma.MaskedArray):
        kind = column.dtype if type(column) is np.ndarray else type(column).__name__
        raise ValueError(f"Sample column {name!r} is {kind}; an array of real numbers is wanted.")
