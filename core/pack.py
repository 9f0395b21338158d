"""Pack, what runs through the model, and Batch, what a loss sees: the bridge from plans to tensors.

Axes: nodes (tokens of the forest), edges (parent node to next token, where someone trains it), terms (trained
tokens of each sample), samples, groups (prompts), pairs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from core import record, whole
from core.plan import prefix_tree, sample, spans


@record.record
class Scores:
    """What the model says at each row of the batch; a gradient can flow into every field but `top1`.

    Attributes:
        logprobs: log-probability (nats) of the row's token.
        entropies: entropy (nats) of the distribution that the token was drawn from.
        log_sum_squares: log of the sum of squared probabilities.
        mean_logits: mean logit over the vocabulary.
        top1: 1.0 where the token is the likeliest, else 0.0.
        divergences: divergence (nats) between the distribution that the token was drawn from and a teacher's.
        values: what a scalar head says of the sequence up to the row's token, that token included.
    """

    logprobs: Float[Tensor, " terms"]
    entropies: Float[Tensor, " terms"] | None = None
    log_sum_squares: Float[Tensor, " terms"] | None = None
    mean_logits: Float[Tensor, " terms"] | None = None
    top1: Float[Tensor, " terms"] | None = None
    divergences: Float[Tensor, " terms"] | None = None
    values: Float[Tensor, " terms"] | None = None


@record.record
class Axis:
    """The columns of one axis; `axis.advantage` is `axis.columns["advantage"]`.

    Attributes:
        columns: tensors of one length, one entry an element of the axis.
    """

    columns: Mapping[str, Tensor]

    def __getattr__(self, name: str) -> Tensor:
        """Return a column by its name."""
        return _column(name, {} if name == "columns" else self.columns)


@record.record
class Totals:
    """How much there is in the whole optimizer step, over all packs and ranks, counted before it starts.

    Mismatched samples (per-sample column `mismatched` of 1) are looked at, not trained: only `mismatched`
    counts them.

    Attributes:
        terms: trained tokens.
        samples: samples with a trained token.
        groups: groups with a trained token.
        pairs: pairs.
        chosen_terms: trained tokens of the chosen sides of pairs.
        mismatched: samples that pair a prompt with the completion of another.
    """

    terms: Float[Tensor, ""]
    samples: Float[Tensor, ""]
    groups: Float[Tensor, ""]
    pairs: Float[Tensor, ""]
    chosen_terms: Float[Tensor, ""]
    mismatched: Float[Tensor, ""]


@record.record
class Batch:
    """A flat table with one row for each trained token of each sample.

    `batch.NAME` gives a column at the rows: a column of `terms` as it is, one of `samples` or `groups` spread
    over their rows. `batch.samples.NAME` gives it on its own axis.

    Attributes:
        terms: the rows; `terms.sample` is the sample each belongs to.
        samples: `samples.group` is its group, `samples.num_terms` its trained tokens.
        groups: `groups.num_terms` its trained tokens in the whole step, `groups.num_samples` its samples.
        pairs: `pairs.chosen` and `pairs.rejected` index samples.
        totals: counts of the whole step.
    """

    terms: Axis
    samples: Axis
    groups: Axis
    pairs: Axis
    totals: Totals

    def __getattr__(self, name: str) -> Tensor:
        """Return a column at the rows."""
        if name in ("terms", "samples", "groups"):
            return _column(name, {})  # a batch that is only half built, by copy or pickle, has no columns
        terms, samples, groups = self.terms, self.samples, self.groups
        if name in terms.columns:
            return terms.columns[name]
        if name in samples.columns:
            return samples.columns[name].index_select(0, terms.columns["sample"])
        if name in groups.columns:
            return groups.columns[name].index_select(0, self.group)
        return _column(name, {**terms.columns, **samples.columns, **groups.columns})


@record.record
class Pack:
    """A forest as tensors, and the table that its rows fill.

    Attributes:
        tokens: token id of each node.
        depths: position of each node in its sequences.
        ends: one past the last descendant: node j is an ancestor of i, or i itself, exactly when `j <= i <
            ends[j]`.
        table: attention as blocks, on the host, `[blocks, 5]`: (kind, query start, stop, key start, stop),
            with the kinds of `core.plan.spans`.
        edge_nodes: the node that predicts, in ascending order.
        edge_tokens: the token that it predicts.
        edge_targets: the node of that token.
        term_edges: the edge of each row; rows that share a token share an edge.
        batch: what the loss sees.
        slopes: the gradient by each edge's log-probability where the loss is linear in them; None: not known.
        taught: a teacher's last hidden state at each edge, for `divergences`; None: not known.
        needs: fields of Scores that are asked for beside `logprobs`.
        padded: the same forest, or parts of it, at planned sizes: what runs in its place. The rest is then on
            the host, and scores come back to it; see `core.padded`.
        pieces: contiguous spans of nodes that run through the model one at a time; one span when all fits.
        max_depth: the largest of `depths`.
    """

    tokens: Int[Tensor, " nodes"]
    depths: Int[Tensor, " nodes"]
    ends: Int[Tensor, " nodes"]
    table: Int[Tensor, "blocks five"]
    edge_nodes: Int[Tensor, " edges"]
    edge_tokens: Int[Tensor, " edges"]
    edge_targets: Int[Tensor, " edges"]
    term_edges: Int[Tensor, " terms"]
    batch: Batch
    slopes: Float[Tensor, " edges"] | None = None
    taught: Float[Tensor, "edges teacher_hidden"] | None = None
    padded: "tuple[Pack, ...]" = ()
    needs: tuple[str, ...] = record.static(default=())
    pieces: tuple[tuple[int, int], ...] = record.static(default=())
    max_depth: int = record.static(default=0)


def field(scores: Scores, name: str) -> Float[Tensor, " terms"]:
    """Return a field of the scores that a loss cannot do without.

    Raises:
        ValueError: it was not asked for.
    """
    values = getattr(scores, name)
    if values is None:
        raise ValueError(
            f"the loss reads scores.{name}, which nobody asked for; add {name!r} to the algorithm's needs."
        )
    return values


@attrs.frozen(kw_only=True, eq=False)
class Counts:
    """Counts of a whole step on the host; every pack of the step is given the same ones.

    Attributes:
        terms, samples, groups, pairs, chosen_terms, mismatched: as in `Totals`.
        group_terms, group_samples: trained tokens and samples of each group.
        columns: names of the samples' columns, and whether each has a number a token: those of a pack with
            nothing in it, which a rank without work runs.
    """

    terms: int
    samples: int
    groups: int
    pairs: int
    chosen_terms: int
    mismatched: int
    group_terms: Mapping[int, int]
    group_samples: Mapping[int, int]
    columns: Mapping[str, bool] = attrs.field(factory=dict)


def count(samples: Sequence[sample.Sample]) -> Counts:
    """Count what the totals of a step need, over all its samples, whatever rank or pack they go to."""
    marks = [s.columns.get("mismatched", 0.0) for s in samples]
    odd = next((i for i, mark in enumerate(marks) if np.ndim(mark) or mark not in (0, 1)), None)
    if odd is not None:
        told = f"sample {odd} of the step has mismatched {marks[odd]}"
        raise ValueError(f"{told}; 1 (yes) or 0 (no) is wanted.")
    mismatched = [bool(mark) for mark in marks]
    trained = np.array([int(s.trained.sum()) for s in samples], dtype=np.int64)
    terms = np.where(mismatched, 0, trained)
    pairs = _pairs(samples)
    group_terms: dict[int, int] = {}
    group_samples: dict[int, int] = {}
    for s, n in zip(samples, terms.tolist(), strict=True):
        if n:
            group_terms[s.group] = group_terms.get(s.group, 0) + n
            group_samples[s.group] = group_samples.get(s.group, 0) + 1
    return Counts(
        terms=int(terms.sum()),
        samples=int((terms > 0).sum()),
        groups=len(group_terms),
        pairs=len(pairs),
        chosen_terms=int(sum(terms[chosen] for chosen, _ in pairs)),
        mismatched=sum(mismatched),
        group_terms=group_terms,
        group_samples=group_samples,
        columns={n: isinstance(v, np.ndarray) for s in samples[:1] for n, v in s.columns.items()},
    )


def build(
    samples: Sequence[sample.Sample],
    counts: Counts,
    *,
    needs: Sequence[str] = (),
    share: bool = True,
    budget: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Pack:
    """Merge samples into a forest and lay out the table that its rows fill.

    Args:
        samples: those that go into this pack; a unit is never split over packs.
        counts: of the whole step.
        needs: what the loss reads: fields of Scores; columns among them are the samples' own.
        share: merge what begins alike; False keeps every sample a chain of its own.
        budget: most nodes in one forward, at least 1; a larger forest is cut into pieces. None: no limit.
        dtype: of the columns that are not integers.
        device: where the tensors live; the attention table stays on the host.

    Raises:
        ValueError: the budget is no whole number from 1 up, the dtype holds no fractions, samples have other
            columns than each other, or there is more in the pack than was counted in the step.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"columns of {dtype} were asked for; a floating point dtype is wanted.")
    sample.check_columns(samples)
    tree = prefix_tree.build([s.tokens for s in samples], keys=[s.share for s in samples], share=share)
    nodes, offsets = prefix_tree.paths(tree)
    trained = np.concatenate([s.trained for s in samples]) if samples else np.zeros(0, np.bool_)
    _check_counts(samples, counts)
    rows = nodes[trained]
    targets, term_targets = np.unique(rows, return_inverse=True)
    order = np.argsort(tree.parents[targets], kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    targets = targets[order]

    def move(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)

    return Pack(
        tokens=move(tree.tokens),
        depths=move(tree.depths),
        ends=move(tree.ends),
        table=torch.from_numpy(_blocks(tree)),
        edge_nodes=move(tree.parents[targets]),
        edge_tokens=move(tree.tokens[targets]),
        edge_targets=move(targets),
        term_edges=move(rank[term_targets]),
        batch=_batch(samples, counts, trained, np.diff(offsets), dtype, device),
        needs=tuple(sorted(_FIELDS.intersection(needs))),
        pieces=_pieces(tree, budget),
        max_depth=int(tree.depths.max(initial=0)),
    )


def with_column(each: Pack, name: str, values: Float[Tensor, " terms"]) -> Pack:
    """Return a pack whose batch has one more column at the rows.

    Args:
        each: the pack.
        name: of the column; one that is there is exchanged.
        values: one a row.
    """
    terms = Axis(columns={**each.batch.terms.columns, name: values})
    return attrs.evolve(each, batch=attrs.evolve(each.batch, terms=terms))


def _batch(
    samples: Sequence[sample.Sample],
    counts: Counts,
    trained: np.ndarray,
    lengths: np.ndarray,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Batch:
    """Make the table of the samples of one pack."""
    names = {n: isinstance(v, np.ndarray) for s in samples for n, v in s.columns.items()}
    names = names if samples else counts.columns
    per_term = {n for n, is_row in names.items() if is_row}
    groups = list(dict.fromkeys(s.group for s in samples))
    place = {g: i for i, g in enumerate(groups)}
    owner = np.repeat(np.arange(len(samples)), lengths)[trained]
    pairs = _pairs(samples)

    def ints(values: Any) -> Tensor:
        return torch.tensor(np.asarray(values, dtype=np.int64), device=device)

    def floats(values: Any) -> Tensor:
        return torch.tensor(np.asarray(values, dtype=np.float64), dtype=dtype, device=device)

    def term_column(name: str) -> Tensor:
        return floats(np.concatenate([s.columns[name] for s in samples])[trained] if samples else [])

    return Batch(
        terms=Axis(columns={"sample": ints(owner), **{n: term_column(n) for n in sorted(per_term)}}),
        samples=Axis(
            columns={
                "group": ints([place[s.group] for s in samples]),
                "num_terms": floats([s.trained.sum() for s in samples]),
                **{n: floats([s.columns[n] for s in samples]) for n in sorted(names.keys() - per_term)},
            }
        ),
        groups=Axis(
            columns={
                "num_terms": floats([counts.group_terms.get(g, 0) for g in groups]),
                "num_samples": floats([counts.group_samples.get(g, 0) for g in groups]),
            }
        ),
        pairs=Axis(columns={"chosen": ints([c for c, _ in pairs]), "rejected": ints([r for _, r in pairs])}),
        totals=Totals(
            **{n: torch.tensor(float(getattr(counts, n)), dtype=dtype, device=device) for n in _TOTALS},
        ),
    )


def _check_counts(samples: Sequence[sample.Sample], counts: Counts) -> None:
    """Refuse counts of another step, by which a loss would be divided."""
    terms = sum(int(s.trained.sum()) for s in samples if not s.columns.get("mismatched", 0.0))
    if terms > counts.terms:
        raise ValueError(
            f"counts tell of {counts.terms} trained tokens in the whole step, and this pack alone has "
            f"{terms}; count all samples of the step: pack.count(samples)."
        )


def _blocks(tree: prefix_tree.PrefixTree) -> np.ndarray:
    """Write chains and rectangles into one table, the chains first: they start every query's softmax."""
    chains = np.concatenate([np.full((len(tree.chains), 1), spans.CAUSAL), tree.chains, tree.chains], axis=1)
    rectangles = np.concatenate([np.full((len(tree.rectangles), 1), spans.DENSE), tree.rectangles], axis=1)
    return np.ascontiguousarray(np.concatenate([chains, rectangles]), dtype=np.int64)


def _pieces(tree: prefix_tree.PrefixTree, budget: int | None) -> tuple[tuple[int, int], ...]:
    """Cut a forest over the budget; one span where all fits."""
    size = len(tree.tokens)
    if budget is None:
        return ((0, size),)
    budget = whole.number("a budget (None: no limit)", budget, least=1)
    return ((0, size),) if size <= budget else prefix_tree.pieces(tree, budget)


def _pairs(samples: Sequence[sample.Sample]) -> list[tuple[int, int]]:
    """List (chosen, rejected): the two samples of a unit, in the order they came."""
    units: dict[int, list[int]] = {}
    for i, s in enumerate(samples):
        units.setdefault(s.unit, []).append(i)
    return [(u[0], u[1]) for u in units.values() if len(u) == 2]


def _column(name: str, columns: Mapping[str, Tensor]) -> Tensor:
    """Return a column, or say which there are."""
    if name.startswith("__") or name not in columns:
        raise AttributeError(
            f"the batch has no column {name!r}; it has {', '.join(sorted(columns)) or 'none'}."
        )
    return columns[name]


_TOTALS = tuple(field.name for field in attrs.fields(Totals))
_FIELDS = frozenset(field.name for field in attrs.fields(Scores)) - {"logprobs"}
