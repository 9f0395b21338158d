"""Every policy loss is the slow loop that it replaces, in value and gradient, on forests of any shape."""

import math
from functools import partial

import attrs
import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from core import kl, pack, ratios, reduce, reference, segments
from core.losses import composition, policy
from core.plan import sample
from tests.core import policy_loops as loops

CLIPPED = loops.clipped(low=0.2, high=0.2)

# name: (loss, its loop)
LOSSES = {
    "clipped": (policy.clipped, CLIPPED),
    "clip-higher": (partial(policy.clipped, high=0.28), loops.clipped(low=0.2, high=0.28)),
    "two-sided": (partial(policy.clipped, delta=1.5), loops.clipped(low=0.2, high=0.2, delta=1.5)),
    "gspo": (
        partial(policy.sequence_clipped, low=0.1, high=0.15),
        loops.sequence(lambda size: 1 / size, low=0.1, high=0.15),
    ),
    "rloo": (
        partial(policy.sequence_clipped, ratio=ratios.sequence_sum, low=0.2, high=0.2),
        loops.sequence(lambda size: 1.0, low=0.2, high=0.2),
    ),
    "cispo": (partial(policy.cispo, cap=1.3), loops.cispo(1.3)),
    "sapo": (policy.sapo, loops.sapo(1.0, 1.05)),
    "vespo": (policy.vespo, loops.vespo()),
    "vespo, truncated": (partial(policy.vespo, weights=ratios.token_truncate), loops.vespo(loops.truncated)),
    "vespo, masked": (
        partial(policy.vespo, weights=partial(ratios.token_mask, cap=1.1)),
        loops.vespo(partial(loops.masked, cap=1.1)),
    ),
    "gmpo": (policy.gmpo, loops.gmpo(0.4, 0.4)),
    "token_truncate": (
        partial(
            composition.weighted,
            loss=policy.clipped,
            weights=partial(ratios.token_truncate, floor=0.7, cap=1.2),
        ),
        loops.weighted(CLIPPED, partial(loops.truncated, floor=0.7, cap=1.2)),
    ),
    "token_mask": (
        partial(
            composition.weighted, loss=policy.clipped, weights=partial(ratios.token_mask, floor=0.7, cap=1.2)
        ),
        loops.weighted(CLIPPED, partial(loops.masked, floor=0.7, cap=1.2)),
    ),
    "off_policy_masked": (
        partial(composition.off_policy_masked, loss=policy.clipped, threshold=0.1),
        loops.weighted(CLIPPED, loops.off_policy_masked(0.1)),
    ),
    "sequence_mask": (
        partial(composition.weighted, loss=policy.clipped),
        loops.weighted(CLIPPED, loops.sequence_masked),
    ),
    "sequence_truncate": (
        partial(
            composition.weighted,
            loss=policy.clipped,
            weights=partial(ratios.sequence_truncate, fold=segments.sample_means),
        ),
        loops.weighted(CLIPPED, loops.mean_truncated),
    ),
    "k1": (
        partial(composition.with_kl, loss=policy.clipped, beta=0.3, divergence=kl.k1),
        loops.with_kl(CLIPPED, loops.k1, 0.3),
    ),
    "k2": (
        partial(composition.with_kl, loss=policy.clipped, beta=0.3, divergence=kl.k2),
        loops.with_kl(CLIPPED, loops.k2, 0.3),
    ),
    "k3": (
        partial(composition.with_kl, loss=policy.sequence_clipped, beta=0.3),
        loops.with_kl(loops.sequence(lambda size: 1 / size, low=3e-4, high=4e-4), loops.k3, 0.3),
    ),
    "corrected k1": (
        partial(composition.with_corrected_kl, loss=policy.clipped, beta=0.3, divergence=kl.k1),
        loops.with_kl(CLIPPED, loops.times_ratio(loops.k1), 0.3),
    ),
    "corrected k3": (
        partial(composition.with_corrected_kl, loss=policy.clipped, beta=0.3),
        loops.with_kl(CLIPPED, loops.times_ratio(loops.k3), 0.3),
    ),
}

# name: (reduction, weight of a row given its sample's length, its group's length, and the step's counts)
REDUCTIONS = {
    "token_mean": (reduce.token_mean, lambda n, g, terms, samples, groups: 1 / terms),
    "sequence_mean": (reduce.sequence_mean, lambda n, g, terms, samples, groups: 1 / n / samples),
    "sequence_sum": (reduce.sequence_sum, lambda n, g, terms, samples, groups: 1 / samples),
    "constant": (partial(reduce.constant, length=9), lambda n, g, terms, samples, groups: 1 / samples / 9),
    "prompt_mean": (reduce.prompt_mean, lambda n, g, terms, samples, groups: 1 / g / groups),
}


@st.composite
def forests(draw):
    """Draw samples that share prefixes, some of them masked out, and a seed for their numbers."""
    word = st.integers(0, 2)
    stems = draw(st.lists(st.lists(word, min_size=1, max_size=3), min_size=1, max_size=2))
    made = []
    for i in range(draw(st.integers(1, 5))):
        group = draw(st.integers(0, len(stems) - 1))
        tokens = np.array([*stems[group], *draw(st.lists(word, min_size=1, max_size=4))], dtype=np.int64)
        trained = np.array([False] + [draw(st.booleans()) for _ in tokens[1:]])
        trained[-1] = i == 0 or draw(st.booleans())
        made.append(sample.Sample(tokens=tokens, trained=trained, group=group, unit=i))
    return made, draw(st.integers(0, 2**32 - 1))


def told_alone(each, source):
    """Score a sample by itself, and give it columns near its own log-probabilities."""
    whole = attrs.evolve(each, trained=np.arange(len(each.tokens)) > 0)
    scores = reference.Reference().predict(
        reference.params(),
        pack.build([whole], pack.count([whole]), needs=("entropies",), dtype=torch.float64),
        None,
    )
    here = each.trained[1:]
    own, sure = scores.logprobs.numpy(), scores.entropies.numpy()
    columns = {
        name: np.where(
            each.trained, np.concatenate([[np.nan], own + source.normal(0, 0.5, len(own))]), np.nan
        )
        for name in ("old_logprobs", "sampled_logprobs", "reference_logprobs")
    }
    advantage = float(source.choice([0.0, 1.0, -1.0, -0.5, source.normal()]))
    lists = {name: values[each.trained].tolist() for name, values in columns.items()}
    return attrs.evolve(each, columns={**columns, "advantage": advantage}), loops.Told(
        logprobs=own[here].tolist(),
        old=lists["old_logprobs"],
        sampled=lists["sampled_logprobs"],
        reference=lists["reference_logprobs"],
        entropies=sure[here].tolist(),
        advantage=advantage,
    )


def by_loop(samples, tolds, loop, weight):
    """Add the step up in Python numbers: its value and the gradient at each row."""
    pairs = [(s, t) for s, t in zip(samples, tolds, strict=True) if t.logprobs]
    terms = sum(len(t.logprobs) for _, t in pairs)
    groups = {s.group for s, _ in pairs}
    value, gradient = 0.0, []
    for each, told in pairs:
        n, g = len(told.logprobs), sum(len(t.logprobs) for s, t in pairs if s.group == each.group)
        scale = weight(n, g, terms, len(pairs), len(groups))
        values, slopes = loop(told)
        value += scale * math.fsum(values)
        gradient += [scale * math.fsum(row[s] for row in slopes) for s in range(n)]
    return value, gradient


def by_table(batch, scores, loss, reduction):
    """Run the loss and the reduction: the value and the gradient at each row."""
    leaf = scores.logprobs.clone().requires_grad_()
    values, _ = loss(attrs.evolve(scores, logprobs=leaf), batch)
    value = reduction(values, batch)
    value.backward()
    return value.item(), leaf.grad.tolist()


def drawn_table(drawn):
    """Return the samples with columns, what a loop is told of each, and the forest's batch and scores."""
    samples, seed = drawn
    source = np.random.default_rng(seed)
    samples, tolds = zip(*(told_alone(each, source) for each in samples), strict=True)
    packed = pack.build(samples, pack.count(samples), needs=("entropies",), dtype=torch.float64)
    return samples, tolds, packed.batch, reference.Reference().predict(reference.params(), packed, None)


def agree(table, name, loss, loop, reduction, weight):
    samples, tolds, batch, scores = table
    value, gradient = by_table(batch, scores, loss, reduction)
    wanted, slopes = by_loop(samples, tolds, loop, weight)
    assert value == pytest.approx(wanted, rel=1e-10, abs=1e-10), name
    assert gradient == pytest.approx(slopes, rel=1e-10, abs=1e-10), name


@hypothesis.settings(max_examples=40)
@hypothesis.given(drawn=forests())
def test_every_loss_is_its_loop(drawn):
    table = drawn_table(drawn)
    for name, (loss, loop) in LOSSES.items():
        agree(table, name, loss, loop, *REDUCTIONS["sequence_mean"])


@hypothesis.settings(max_examples=40)
@hypothesis.given(drawn=forests())
def test_every_reduction_is_its_loop(drawn):
    table = drawn_table(drawn)
    for name, reduction in REDUCTIONS.items():
        agree(table, name, *LOSSES["clipped"], *reduction)


@hypothesis.settings(max_examples=40)
@hypothesis.given(drawn=forests(), part=st.sampled_from([0.2, 0.5, 1.0]))
def test_leaving_out_the_surest_tokens_is_its_loop(drawn, part):
    table = drawn_table(drawn)
    every = sorted(h for told in table[1] for h in told.entropies)
    place = (1 - part) * (len(every) - 1)
    below = math.floor(place)
    bound = every[below] + (place - below) * (every[math.ceil(place)] - every[below])
    # Copies of a token have one entropy up to rounding, and the bound may be one of theirs.
    hypothesis.assume(part == 1.0 or all(abs(h - bound) > 1e-12 for h in every))
    loop = loops.weighted(CLIPPED, lambda told, t: float(told.entropies[t] >= bound - 1e-12))
    loss = partial(composition.top_entropy, loss=policy.clipped, part=part)
    agree(table, f"part {part}", loss, loop, *REDUCTIONS["token_mean"])
