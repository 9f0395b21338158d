"""Every preference loss equals its formula written as a loop over pairs, each sample in a model alone."""

import math
from functools import partial

import attrs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core import algorithms
from core.losses import anchored, margins, pair_composition, preference, reference_free, transport
from tests.core import pair_rows
from tests.properties import slow

B, E = 0.4, 0.2
FEW = settings(max_examples=12)
NAMED = algorithms.preferences


def minus_log_sig(x):
    """-log(sig(x))."""
    return torch.logaddexp(torch.zeros_like(x), -x)


def sig(x):
    """The logistic function, by its logarithm: written as it stands, exp(-x) overflows."""
    return torch.exp(-minus_log_sig(x))


def logistic(x, e=0.0):
    """The logistic loss, its label wrong with probability e."""
    return (1 - e) * minus_log_sig(x) + e * minus_log_sig(-x)


def discopop(x, tau):
    """Eq. 5 of its paper; the product of weight and exponential as the exponential of a sum."""
    return sig(-x / tau) * minus_log_sig(x) + torch.exp(-minus_log_sig(x / tau) - x)


def exo(x, e):
    """Eq. 16 of its paper."""
    return -sig(x) * (minus_log_sig(x) + math.log(1 - e)) - sig(-x) * (minus_log_sig(-x) + math.log(e))


def log_odds(side):
    """Of the length-normalized probability."""
    return side.mean - torch.log(1 - torch.exp(side.mean))


# name: the loss, and its formula for one pair, chosen side first.
PER_PAIR = {
    "sigmoid": (
        partial(preference.sigmoid, label_smoothing=E),
        lambda c, r: logistic(B * (c.ratio - r.ratio), E),
    ),
    "hinge": (preference.hinge, lambda c, r: torch.clamp(1 - B * (c.ratio - r.ratio), min=0.0)),
    "ipo": (preference.ipo, lambda c, r: (c.mean_ratio - r.mean_ratio - 1 / (2 * B)) ** 2),
    "sigmoid_norm": (
        partial(preference.sigmoid_norm, label_smoothing=E),
        lambda c, r: logistic(B * (c.mean_ratio - r.mean_ratio), E),
    ),
    "robust": (
        partial(preference.robust, label_smoothing=E),
        lambda c, r: (
            ((1 - E) * minus_log_sig(B * (c.ratio - r.ratio)) - E * minus_log_sig(B * (r.ratio - c.ratio)))
            / (1 - 2 * E)
        ),
    ),
    "exo_pair": (
        partial(preference.exo_pair, label_smoothing=E),
        lambda c, r: exo(B * (c.ratio - r.ratio), E),
    ),
    "discopop": (
        partial(preference.discopop, discopop_tau=0.3),
        lambda c, r: discopop(B * (c.ratio - r.ratio), 0.3),
    ),
    "nca_pair": (
        anchored.nca_pair,
        lambda c, r: logistic(B * c.ratio) + 0.5 * logistic(-B * c.ratio) + 0.5 * logistic(-B * r.ratio),
    ),
    "bco_pair": (anchored.bco_pair, lambda c, r: logistic(B * c.ratio) + logistic(-B * r.ratio)),
    "sppo_hard": (anchored.sppo_hard, lambda c, r: (c.ratio - 0.5 / B) ** 2 + (r.ratio + 0.5 / B) ** 2),
    "apo_zero": (anchored.apo_zero, lambda c, r: 1 - sig(B * c.ratio) + sig(B * r.ratio)),
    "apo_down": (anchored.apo_down, lambda c, r: sig(B * c.ratio) + 1 - sig(B * (c.ratio - r.ratio))),
}
DIVERGING = ("sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "exo_pair", "discopop")
DIVERGENCES = {
    "forward_kl": (margins.forward_kl, lambda x: 1 - torch.exp(-x)),
    "js_divergence": (margins.js_divergence, lambda x: math.log(2) - minus_log_sig(x)),
    "alpha_divergence": (
        partial(margins.alpha_divergence, f_alpha_divergence_coef=0.3),
        lambda x: (torch.exp(-0.7 * x) - 1) / -0.7,
    ),
}


def mean(values):
    """Average numbers that carry gradients."""
    return pair_rows.total(values) / len(values)


def over_pairs(formula):
    """Return the loop that averages a formula over pairs."""
    return lambda pairs: mean([formula(c, r) for c, r in pairs])


def mean_nll(pairs):
    """The mean over all chosen tokens of the step."""
    return -pair_rows.total(c.logp for c, _ in pairs) / max(sum(c.n for c, _ in pairs), 1)


def sort(values):
    """Sort numbers that carry gradients."""
    return sorted(values, key=lambda x: x.item() if isinstance(x, torch.Tensor) else x)


def ranked(left, right):
    """Average the smoothed logistic loss of two sorted lists, rank by rank."""
    return mean([logistic(B * (x - y), E) for x, y in zip(sort(left), sort(right), strict=True)])


def aot(pairs):
    """Sorted margins of the policy against sorted margins of the reference."""
    return ranked([c.logp - r.logp for c, r in pairs], [c.ref - r.ref for c, r in pairs])


def aot_unpaired(pairs):
    """Sorted log-ratios of chosen sides against those of rejected sides."""
    return ranked([c.ratio for c, _ in pairs], [r.ratio for _, r in pairs])


def cpo(pairs):
    """A margin under a uniform reference, and imitation."""
    return mean([logistic(B * (c.logp - r.logp), E) for c, r in pairs]) + 0.7 * mean_nll(pairs)


def orpo(pairs):
    """Imitation, and odds of one side against those of the other."""
    return mean_nll(pairs) + 0.3 * mean([logistic(log_odds(c) - log_odds(r)) for c, r in pairs])


def mpo(pairs):
    """Three losses with weights."""
    sides = mean([logistic(0.1 * c.ratio) + logistic(-0.1 * r.ratio) for c, r in pairs])
    return 0.8 * mean([logistic(0.1 * (c.ratio - r.ratio)) for c, r in pairs]) + 0.2 * sides + mean_nll(pairs)


SMOOTHED = {"beta": B, "label_smoothing": E}
LOOPS = {
    **{
        name: (NAMED[name].evolve(loss=partial(loss, beta=B)), over_pairs(formula))
        for name, (loss, formula) in PER_PAIR.items()
    },
    "aot": (NAMED["aot"].evolve(loss=partial(transport.aot, **SMOOTHED)), aot),
    "aot_unpaired": (
        NAMED["aot_unpaired"].evolve(loss=partial(transport.aot_unpaired, **SMOOTHED)),
        aot_unpaired,
    ),
    "sft": (NAMED["sft"], mean_nll),
    "cpo": (
        algorithms.cpo.evolve(loss=partial(reference_free.cpo, cpo_alpha=0.7, **SMOOTHED)),
        cpo,
    ),
    "simpo": (
        algorithms.simpo.evolve(loss=partial(reference_free.simpo, beta=2.0, label_smoothing=E)),
        over_pairs(lambda c, r: logistic(2.0 * (c.mean - r.mean) - 0.5, E)),
    ),
    "mpo": (
        algorithms.preference_mixture(
            [(NAMED["sigmoid"], 0.8), (NAMED["bco_pair"], 0.2), (NAMED["sft"], 1.0)]
        ),
        mpo,
    ),
}


def test_no_named_loss_is_without_its_loop():
    assert set(NAMED) <= {*LOOPS, "orpo"}  # of orpo no side may be empty: it has a test of its own


@FEW
@given(seed=pair_rows.seeds)
def test_every_loss_is_its_formula_over_pairs_alone(seed):
    pair_rows.assert_steps_equal(LOOPS, pair_rows.drawn(seed))


@FEW
@given(seed=pair_rows.seeds)
def test_orpo_is_imitation_and_the_mean_of_odds_ratios(seed):
    mine = algorithms.orpo.evolve(loss=partial(reference_free.orpo, beta=0.3))
    pair_rows.assert_steps_equal({"orpo": (mine, orpo)}, pair_rows.drawn(seed, empty=False))


def through(formula, g):
    """Return the loop over pairs whose log-ratios go through an f-divergence."""

    def moved(side):
        return attrs.evolve(side, moved=g(side.ratio))

    return over_pairs(lambda c, r: formula(moved(c), moved(r)))


DIVERGED = {
    f"{name} of {divergence}": (
        NAMED[name].evolve(loss=pair_composition.diverging(partial(PER_PAIR[name][0], beta=B), ours)),
        through(PER_PAIR[name][1], g),
    )
    for name in DIVERGING
    for divergence, (ours, g) in DIVERGENCES.items()
}


@FEW
@given(seed=pair_rows.seeds)
def test_an_f_divergence_stands_in_for_the_log_ratio(seed):
    pair_rows.assert_steps_equal(DIVERGED, pair_rows.drawn(seed))


def scaled(side, n, alpha):
    """Scale what a side has beyond n tokens, under policy and reference."""
    factors = [1.0] * n + [alpha] * (side.n - n)
    return pair_rows.Side(
        [f * x for f, x in zip(factors, side.policy, strict=True)],
        [f * x for f, x in zip(factors, side.reference, strict=True)],
    )


@FEW
@given(seed=pair_rows.seeds, alpha=st.sampled_from([0.0, 0.3, 1.0]))
def test_length_desensitized_losses_scale_what_the_longer_side_has_more(seed, alpha):
    cases = {}
    for name in ("sigmoid", "ipo", "aot", "simpo"):
        algorithm, loop = LOOPS[name]
        loss = partial(pair_composition.length_desensitized, loss=algorithm.loss, ld_alpha=alpha)
        cases[name] = (
            algorithm.evolve(loss=loss),
            lambda pairs, loop=loop: loop(
                [tuple(scaled(side, min(c.n, r.n), alpha) for side in (c, r)) for c, r in pairs]
            ),
        )
    pair_rows.assert_steps_equal(cases, pair_rows.drawn(seed))


def weight(params, one):
    """How likely the policy is to give an answer, against what its own draw would get."""
    logits = slow.chain(params, one.tokens).log_softmax(-1).detach()
    aligned = [
        logits[j - 1, one.tokens[j]] - logits[j - 1].exp().square().sum().log() for j in pair_rows.places(one)
    ]
    return math.exp(sum(aligned) / max(len(aligned), 1))


@FEW
@given(seed=pair_rows.seeds)
def test_weights_of_the_policy_multiply_over_both_sides_and_carry_no_gradient(seed):
    samples = pair_rows.drawn(seed)

    def loop(params):
        weights = [weight(params, one) for one in samples]
        pairs = zip(pair_rows.sides(params, samples), weights[::2], weights[1::2], strict=True)
        return mean([u * v * logistic(B * (c.ratio - r.ratio)) for (c, r), u, v in pairs])

    loss = partial(pair_composition.policy_weighted, loss=partial(preference.sigmoid, beta=B))
    mine = algorithms.dpo.evolve(loss=loss, needs=(*algorithms.dpo.needs, "log_sum_squares"))
    pair_rows.assert_step_equals(mine, samples, loop)
