"""What became of the rows: read, used, dropped and why, cut, split."""

from collections.abc import Mapping

import attrs


@attrs.frozen(kw_only=True)
class Counts:
    """Everything that happened to rows on their way to samples. Two records add up with `merge`.

    Attributes:
        read: rows that the sources gave.
        used: rows that gave at least one sample.
        dropped: rows that gave none, by reason.
        cut_rows: used rows that lost tokens to `max_length`.
        cut_tokens: tokens that these rows lost.
        split_rows: rows longer than `max_length` that became several samples.
        samples: sequences that came out.
        tokens: their tokens.
        trained: their targets.
        one_ended: used pairs of which the cut took the end of one side alone.
        unclosed: used rows whose template closes the last target with no token that a generator stops at.
        endless: used rows that end without a stop token since the tokenizer has none.
        tools_unseen: used rows with a `tools` column that the chat template does not print.
    """

    read: int = 0
    used: int = 0
    dropped: Mapping[str, int] = attrs.field(factory=dict)
    cut_rows: int = 0
    cut_tokens: int = 0
    split_rows: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    one_ended: int = 0
    unclosed: int = 0
    endless: int = 0
    tools_unseen: int = 0


def merge(first: Counts, second: Counts) -> Counts:
    """Add two records field by field."""
    reasons = sorted({*first.dropped, *second.dropped})
    dropped = {reason: first.dropped.get(reason, 0) + second.dropped.get(reason, 0) for reason in reasons}
    numbers = {
        field.name: getattr(first, field.name) + getattr(second, field.name)
        for field in attrs.fields(Counts)
        if field.name != "dropped"
    }
    return Counts(**numbers, dropped=dropped)


def notes(counts: Counts) -> tuple[str, ...]:
    """Return one line for each thing that a person should hear about; none when all went through."""
    lines = [f"{number} of {counts.read} rows dropped: {reason}" for reason, number in counts.dropped.items()]
    if counts.cut_tokens:
        lines.append(f"{counts.cut_tokens} tokens cut from {counts.cut_rows} rows longer than max_length")
    if counts.split_rows:
        lines.append(f"{counts.split_rows} rows longer than max_length split into several samples")
    if counts.one_ended:
        lines.append(
            f"{counts.one_ended} of {counts.used} pairs lost the end of one side alone to max_length: "
            "whether an answer ends tells their sides apart. Raise max_length, or drop them (truncation drop)"
        )
    if counts.unclosed:
        lines.append(
            f"{counts.unclosed} of {counts.used} rows end without a stop token: the model will not learn "
            "from them when to stop. Close assistant turns in the chat template with a special token"
        )
    if counts.endless:
        lines.append(
            f"{counts.endless} of {counts.used} rows end without a stop token: the tokenizer has no eos, "
            "so the model will not learn when to stop. Give the tokenizer one"
        )
    if counts.tools_unseen:
        lines.append(
            f"{counts.tools_unseen} of {counts.used} rows bring tools that the chat template does not print"
        )
    return tuple(lines)
