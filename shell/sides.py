"""Pairs and labeled answers to samples: both sides of a pair with one prompt, each within `max_length`.

A side is encoded once, prompt and answer together, and trained after its prompt. Where the first token of one
answer takes in the end of the prompt, the prompt of both ends before that token. Where that cannot be (text
whose sides part differently, or at the very first token), answers are encoded apart from the prompt.
"""

import collections
from collections.abc import Sequence

import attrs
import numpy as np

from shell import counts, encode, formats, preferences, truncate

NO_ANSWER = "nothing to train on one side of the pair"
CUT_AWAY = "nothing left to train on one side of the pair after the cut to max_length"

Located = tuple[str, preferences.Pair | preferences.Labeled]


@attrs.frozen(kw_only=True, eq=False)
class Aligned:
    """Both sides of a pair, whose first `start` ids are the same and are not trained."""

    sides: tuple[encode.Draft, encode.Draft]
    start: int


def labeled(rows: Sequence[Located], rules: encode.Rules) -> tuple[list[list[truncate.Piece]], counts.Counts]:
    """Return the sample of each labeled answer, with its column `label`, and the counts.

    Args:
        rows: where each row stands, and the row.
        rules: how they are encoded.
    """
    singles = [(where, row) for where, row in rows if isinstance(row, preferences.Labeled)]
    drafts = _drafts([(where, row.side) for where, row in singles], rules)
    fitting, counted = truncate.fit(drafts, max_length=rules.max_length, truncation=rules.truncation)
    pieces = [
        [attrs.evolve(piece, columns={"label": row.label}) for piece in made]
        for made, (_, row) in zip(fitting, singles, strict=True)
    ]
    return pieces, counted


def pairs(rows: Sequence[Located], rules: encode.Rules) -> tuple[list[list[truncate.Piece]], counts.Counts]:
    """Return the two samples of each pair, chosen first, with their column `margin`, and the counts.

    Args:
        rows: where each row stands, and the row.
        rules: how they are encoded.
    """
    both = [(where, row) for where, row in rows if isinstance(row, preferences.Pair)]
    drafts = _drafts([(where, side) for where, row in both for side in (row.chosen, row.rejected)], rules)
    aligned = [
        _aligned(row, chosen, rejected, rules)
        for (_, row), chosen, rejected in zip(both, drafts[::2], drafts[1::2], strict=True)
    ]
    return cut(aligned, [row.margin for _, row in both], rules)


def cut(
    aligned: Sequence[Aligned], margins: Sequence[float], rules: encode.Rules
) -> tuple[list[list[truncate.Piece]], counts.Counts]:
    """Bring both sides of pairs within `max_length`, their prompts alike.

    `keep_start` cuts the ends of answers. `keep_end` takes tokens from the beginning of both prompts alike,
    as long as one is left to predict the first of the answer; what is still too long is cut at its end. A
    pair one side of which has nothing to train is dropped.

    Args:
        aligned: encoded pairs.
        margins: of the pairs.
        rules: the limit, and which end is cut.

    Returns:
        The samples of each pair (none where it was dropped), and the counts.
    """
    tally: collections.Counter[str] = collections.Counter(read=len(aligned))
    dropped: collections.Counter[str] = collections.Counter()
    result: list[list[truncate.Piece]] = []
    for one, margin in zip(aligned, margins, strict=True):
        spans = _spans(one, rules)
        pieces = [_piece(side, span, margin) for side, span in zip(one.sides, spans, strict=bool(spans))]
        reason = _why_not(one, pieces)
        if reason:
            dropped[reason] += 1
        else:
            _count(tally, one, pieces, spans)
        result.append([] if reason else pieces)
    return result, counts.Counts(**tally, dropped=dict(dropped))


def _why_not(aligned: Aligned, pieces: Sequence[truncate.Piece]) -> str:
    """Say why a pair is dropped, nothing where it is not."""
    if not all(side.trained[1:].any() for side in aligned.sides):
        return NO_ANSWER
    if not pieces:
        return truncate.TOO_LONG
    return "" if all(piece.trained.any() for piece in pieces) else CUT_AWAY


def _drafts(rows: Sequence[tuple[str, preferences.Side]], rules: encode.Rules) -> list[encode.Draft]:
    """Encode sides, trained after their prompts; of several messages in an answer, the assistant's."""
    made: dict[int, encode.Draft] = {}
    several = [number for number, (_, side) in enumerate(rows) if _has_others(side)]
    single = sorted(set(range(len(rows))) - set(several))
    for chosen, masked in ((single, False), (several, True)):
        asked = attrs.evolve(rules, completion_only_loss=None, assistant_only_loss=masked)
        found = encode.drafts([rows[number] for number in chosen], asked) if chosen else []
        made.update(zip(chosen, map(_to_the_end, found), strict=True))
    return [made[number] for number in range(len(rows))]


def _has_others(side: preferences.Side) -> bool:
    """Tell whether an answer holds messages that the assistant did not write."""
    if not isinstance(side, formats.Conversation) or side.num_prompt is None:
        return False
    return any(message["role"] != "assistant" for message in side.messages[side.num_prompt :])


def _to_the_end(draft: encode.Draft) -> encode.Draft:
    """Train what the template prints after the last answer too: a sample is judged at its last token."""
    if not draft.trained.any():
        return draft
    trained = draft.trained.copy()
    trained[np.flatnonzero(trained)[-1] :] = True
    return attrs.evolve(draft, trained=trained)


def _aligned(
    row: preferences.Pair, chosen: encode.Draft, rejected: encode.Draft, rules: encode.Rules
) -> Aligned:
    """Let both sides begin with the same ids, none of them trained, and train all that differs."""
    common = encode.shared(chosen.tokens, rejected.tokens)
    if isinstance(row.chosen, formats.Text):
        start = min(common, len(chosen.tokens) - 1, len(rejected.tokens) - 1)
        return Aligned(sides=(_from(chosen, start, cut=True), _from(rejected, start, cut=True)), start=start)
    first = [
        int(side.trained.argmax()) if side.trained.any() else len(side.tokens) for side in (chosen, rejected)
    ]
    start = min(*first, common)
    if (
        isinstance(row.chosen, formats.Exchange)
        and row.chosen.prompt
        and (start == 0 or first[0] != first[1])
    ):
        return _apart(row, rules)
    return Aligned(sides=(_from(chosen, start), _from(rejected, start)), start=start)


def _from(draft: encode.Draft, start: int, *, cut: bool = False) -> encode.Draft:
    """Train a side from a token on; `cut`: and nothing before it."""
    trained = draft.trained.copy()
    if trained.any():
        trained[start : int(trained.argmax())] = True
    if cut:
        trained[:start] = False
    return attrs.evolve(draft, trained=trained)


def _apart(row: preferences.Pair, rules: encode.Rules) -> Aligned:
    """Encode the prompt by itself and each answer as what follows it."""
    assert isinstance(row.chosen, formats.Exchange)
    assert isinstance(row.rejected, formats.Exchange)
    prompt = encode.prompt_ids(rules.tokenizer, row.chosen.prompt)
    sides = []
    for text in (row.chosen.completion, row.rejected.completion):
        answer = encode.continuation(rules.tokenizer, text)
        tokens = np.concatenate([prompt, answer])
        endless = rules.tokenizer.eos_token_id is None
        sides.append(
            encode.Draft(tokens=tokens, trained=np.arange(len(tokens)) >= len(prompt), endless=endless)
        )
    return Aligned(sides=(sides[0], sides[1]), start=len(prompt))


def _spans(aligned: Aligned, rules: encode.Rules) -> list[tuple[int, int]]:
    """Return what is kept of each side, none where the pair is dropped for its length."""
    lengths = [len(side.tokens) for side in aligned.sides]
    limit = rules.max_length or max(lengths)
    over = max(lengths) - limit
    if over > 0 and rules.truncation == "drop":
        return []
    skip = min(over, max(aligned.start - 1, 0)) if over > 0 and rules.truncation == "keep_end" else 0
    return [(skip, min(length, skip + limit)) for length in lengths]


def _piece(side: encode.Draft, span: tuple[int, int], margin: float) -> truncate.Piece:
    """Take a part of a side; what nothing precedes is no target."""
    trained = side.trained[slice(*span)].copy()
    trained[:1] = False
    return truncate.Piece(tokens=side.tokens[slice(*span)], trained=trained, columns={"margin": margin})


def _count(
    tally: collections.Counter[str],
    aligned: Aligned,
    pieces: Sequence[truncate.Piece],
    spans: Sequence[tuple[int, int]],
) -> None:
    """Count a pair that is used."""
    tokens = sum(len(piece.tokens) for piece in pieces)
    cut = sum(len(side.tokens) for side in aligned.sides) - tokens
    ended = [len(side.tokens) == stop for side, (_, stop) in zip(aligned.sides, spans, strict=True)]
    tally.update(
        used=1,
        samples=len(pieces),
        tokens=tokens,
        trained=sum(int(piece.trained.sum()) for piece in pieces),
        cut_rows=int(cut > 0),
        cut_tokens=cut,
        one_ended=int(ended[0] != ended[1]),
        unclosed=int(not all(side.closed for side in aligned.sides)),
        endless=int(any(side.endless for side in aligned.sides)),
        tools_unseen=int(any(side.tools_unseen for side in aligned.sides)),
    )
