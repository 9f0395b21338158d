"""One trained sequence, on the host."""

from collections.abc import Mapping

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
        length = len(self.tokens)
        if self.tokens.dtype != np.int64 or self.tokens.ndim != 1:
            raise ValueError(
                f"Sample.tokens is {self.tokens.dtype} of {self.tokens.ndim} axes; int64 [length] is wanted."
            )
        if self.trained.shape != (length,) or self.trained.dtype != np.bool_:
            raise ValueError(
                f"Sample.trained is {self.trained.dtype} {self.trained.shape}; bool ({length},) is wanted."
            )
        if length and self.trained[0]:
            raise ValueError("Sample.trained[0] is True; nothing predicts a first token, so set it to False.")
        taken = sorted(OWN & self.columns.keys())
        if taken:
            raise ValueError(
                f"Sample column {taken[0]!r} is one that the table makes itself; name it otherwise."
            )
        for name, column in self.columns.items():
            if isinstance(column, np.ndarray) and column.shape != (length,):
                raise ValueError(
                    f"Sample column {name!r} has shape {column.shape}; ({length},) or a number is wanted."
                )
