"""Pairs by hand and pairs drawn, and what a step over them must give by a loop over one sample at a time."""

import attrs
import numpy as np
import torch
from hypothesis import strategies as st

from core import pack, reference, steps
from core.plan import sample
from tests.properties import slow

seeds = st.integers(0, 2**31)


def side(logprobs, reference, *, unit=0, **columns):
    """Return a sample of a prompt of two tokens and one trained token for each log-probability."""
    size = len(logprobs)
    trained = np.arange(size + 2) >= 2
    return sample.Sample(
        tokens=np.arange(size + 2) + 1_000 * unit,
        trained=trained,
        columns={
            "policy_logprobs": np.array([0.0, 0.0, *logprobs]),
            "reference_logprobs": np.array([0.0, 0.0, *reference]),
            **columns,
        },
        unit=unit,
    )


def by_hand(*pairs, dtype=torch.float64, **fields):
    """Return scores and the batch of pairs given as log-ratios: ((chosen a token), (rejected a token)).

    The reference gives every token -1.
    """
    samples = [
        side([x - 1.0 for x in ratios], [-1.0] * len(ratios), unit=unit)
        for unit, both in enumerate(pairs)
        for ratios in both
    ]
    return scored(samples, dtype=dtype, **fields)


def scored(samples, *, dtype=torch.float64, **fields):
    """Return scores that read the samples' column `policy_logprobs`, and the batch."""
    batch = pack.build(samples, pack.count(samples), share=False, dtype=dtype).batch
    logprobs = batch.policy_logprobs.clone().requires_grad_()
    return pack.Scores(logprobs=logprobs, **fields), batch


def drawn(seed, *, empty=True):
    """Draw pairs that share prefixes, repeat, and have gaps; `empty`: some sides train nothing."""
    source = np.random.default_rng(seed)
    samples = []
    stems = [source.integers(0, reference.VOCAB, source.integers(1, 5)) for _ in range(2)]
    for unit in range(source.integers(1, 5)):
        for _ in range(2):
            tail = source.integers(0, 3, source.integers(0 if empty else 1, 5))
            tokens = np.concatenate([stems[source.integers(2)], tail]).astype(np.int64)
            trained = source.random(len(tokens)) < 0.7
            trained[-1] |= not empty
            trained[0] = False
            columns = {
                "reference_logprobs": -3.0 * source.random(len(tokens)),
                "margin": float(source.random()),
            }
            samples.append(
                sample.Sample(tokens=tokens, trained=trained, columns=columns, group=unit, unit=unit)
            )
    if not any(s.trained.any() for s in samples):
        return drawn(seed + 1)
    return samples


def places(one):
    """Return the places of the trained tokens of a sample."""
    return [j for j in range(len(one.tokens)) if one.trained[j]]


def alone(params, one):
    """Return the log-probabilities of one sample's trained tokens, in a model that sees it alone."""
    logits = slow.chain(params, one.tokens)
    return [logits[j - 1].log_softmax(0)[one.tokens[j]] for j in places(one)]


def total(values):
    """Add numbers up, nothing to 0."""
    return sum(values, start=torch.zeros((), dtype=torch.float64))


@attrs.frozen
class Side:
    """What a loop over the tokens of one sample finds: log-probabilities, token by token, and their sums."""

    policy: list
    reference: list
    moved: torch.Tensor | None = None

    @property
    def n(self):
        """How many tokens are trained."""
        return len(self.policy)

    @property
    def logp(self):
        """The policy's sum."""
        return total(self.policy)

    @property
    def ref(self):
        """The reference's sum."""
        return float(sum(self.reference))

    @property
    def mean(self):
        """The policy's average."""
        return self.logp / max(self.n, 1)

    @property
    def ratio(self):
        """Policy minus reference, or what an f-divergence made of it."""
        return self.logp - self.ref if self.moved is None else self.moved

    @property
    def mean_ratio(self):
        """The same a token."""
        return self.ratio / max(self.n, 1)


def sides(params, samples):
    """Return the sides of each pair, chosen first."""
    found = [
        Side(alone(params, one), [float(one.columns["reference_logprobs"][j]) for j in places(one)])
        for one in samples
    ]
    return list(zip(found[::2], found[1::2], strict=True))


def step(algorithm, samples, *, beta=0.5):
    """Return loss, metrics and gradients of a step over all samples in one forest."""
    needs = algorithm.reads
    whole = pack.build(samples, pack.count(samples), needs=needs, dtype=torch.float64)
    model = reference.Reference(beta=beta)
    return steps.loss_and_grad(model, algorithm, reference.params(), [whole], 0)


def assert_steps_equal(cases, samples, **options):
    """Compare steps with loops over pairs alone, loss and every gradient to 1e-10.

    `cases`: name -> (algorithm, function of the pairs' sides).
    """
    leaves = {n: p.clone().requires_grad_() for n, p in reference.params().items()}
    both = sides(leaves, samples)
    for name, (algorithm, loop) in cases.items():
        assert_same(name, step(algorithm, samples, **options), loop(both), leaves)


def assert_step_equals(algorithm, samples, loop, **options):
    """Compare a step with `loop(params) -> loss`, loss and every gradient to 1e-10."""
    leaves = {n: p.clone().requires_grad_() for n, p in reference.params().items()}
    assert_same("step", step(algorithm, samples, **options), loop(leaves), leaves)


def assert_same(name, got, want, leaves):
    """Compare (loss, metrics, gradients) with a loss that has a graph to the leaves."""
    value, _, grads = got
    found = [torch.zeros_like(p) for p in leaves.values()]
    if want.requires_grad:
        found = torch.autograd.grad(
            want, list(leaves.values()), allow_unused=True, materialize_grads=True, retain_graph=True
        )
    scale = max(abs(want.item()), *(g.abs().max().item() for g in found), 1e-12)
    assert abs(value.item() - want.item()) <= 1e-10 * scale, name
    for leaf, wanted in zip(leaves, found, strict=True):
        assert (grads[leaf] - wanted).abs().max().item() <= 1e-10 * scale, (name, leaf)
