"""Preference losses: right values, slow loops over pairs, extremes, and what is put around them."""

import itertools
import math
from functools import partial

import attrs
import pytest
import torch

from core import algorithms, check, metrics, pack, reduce
from core.losses import anchored, margins, pair_composition, preference, reference_free
from tests.core import pair_rows

NAMED = dict(algorithms.preferences)
EVERY = {**NAMED, "orpo": algorithms.orpo, "cpo": algorithms.cpo, "simpo": algorithms.simpo}
DIVERGING = ("sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "exo_pair", "discopop")
LOG_RATIO = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "aot", "aot_unpaired")


def value(loss, *pairs, **numbers):
    """Reduce a loss over pairs given as log-ratios a token."""
    scores, batch = pair_rows.by_hand(*pairs)
    return reduce.pair_mean(loss(scores, batch, **numbers)[0], batch).item()


def near(number):
    """To six decimals."""
    return pytest.approx(number, abs=5e-7)


# Right values.


def test_at_the_first_step_every_pair_costs_log_two_and_no_margin_is_made():
    for dtype in (torch.float32, torch.float64):
        scores, batch = pair_rows.by_hand(((0.0, 0.0), (0.0,)), ((0.0,), (0.0, 0.0, 0.0)), dtype=dtype)
        values, watched = preference.sigmoid(scores, batch)
        assert values.tolist() == pytest.approx([0.693147, 0.693147], abs=5e-7)
        assert (watched["rewards/margins"] == 0.0).all()
        assert (watched["rewards/accuracies"] == 0.0).all()


def test_the_same_logits_give_margins_of_exactly_zero_in_every_type():
    for dtype in (torch.bfloat16, torch.float32):
        draw = torch.Generator().manual_seed(0)
        logits = torch.randn(8, 50, generator=draw).to(dtype).float().log_softmax(-1)[:, 0]
        samples = [pair_rows.side(logits[4 * i : 4 * i + 4].tolist(), [0.0] * 4) for i in range(2)]
        samples = [
            attrs.evolve(s, columns={n: s.columns["policy_logprobs"] for n in s.columns}) for s in samples
        ]
        _, watched = preference.sigmoid(*pair_rows.scored(samples, dtype=torch.float32))
        assert watched["rewards/margins"].abs().max() == 0.0


def test_a_log_ratio_difference_of_two_and_what_label_smoothing_makes_of_it():
    pair = ((1.5,), (-0.5,))
    assert value(preference.sigmoid, pair) == near(0.598139)
    assert value(preference.sigmoid, pair, label_smoothing=0.1) == near(0.618139)


def test_plain_dpo_sums_over_tokens_and_only_the_normalized_loss_averages():
    pair = ((0.5, 0.5), (0.25, 0.25, 0.25, 0.25))
    assert value(preference.sigmoid, pair) == near(0.693147)
    assert value(preference.sigmoid_norm, pair) == near(0.680725)


def test_ipo_averages_over_tokens():
    pair = ((1.0,) * 4, (-2.0,) * 3)
    assert value(preference.ipo, pair) == pytest.approx(4.0, abs=1e-12)
    one_token = ((4.0,), (-6.0,))
    assert value(preference.ipo, one_token) == pytest.approx(25.0, abs=1e-12)


def test_label_smoothing_is_refused_where_it_would_have_no_effect():
    for loss in (preference.ipo, preference.hinge, preference.discopop, anchored.nca_pair):
        with pytest.raises(TypeError, match="label_smoothing"):
            value(loss, ((1.0,), (0.0,)), label_smoothing=0.1)


@pytest.mark.parametrize("smoothing", [0.0, -0.1, 1.0])
def test_exo_refuses_a_smoothing_at_which_it_is_infinite(smoothing):
    with pytest.raises(ValueError, match=f"label_smoothing is {smoothing}"):
        value(preference.exo_pair, ((1.0,), (0.0,)), label_smoothing=smoothing)


@pytest.mark.parametrize("smoothing", [0.5, 0.7, -0.1])
def test_the_robust_loss_refuses_labels_that_are_wrong_as_often_as_right(smoothing):
    with pytest.raises(ValueError, match=f"label_smoothing is {smoothing}"):
        value(preference.robust, ((1.0,), (0.0,)), label_smoothing=smoothing)


def test_identical_sides_cost_log_two_have_no_gradient_and_count_as_a_miss():
    samples = [pair_rows.side([-1.0, -2.0], [-1.5, -1.5]) for _ in range(2)]
    scores, batch = pair_rows.scored(samples)
    values, watched = preference.sigmoid(scores, batch)
    assert values.item() == near(0.693147)
    assert watched["rewards/accuracies"].item() == 0.0
    # Both sides are rows of one token: what the model sees is the sum over its two rows.
    (grad,) = torch.autograd.grad(values.sum(), scores.logprobs)
    assert (grad[:2] + grad[2:]).abs().max() == 0.0
    _, _, grads = pair_rows.step(algorithms.dpo, [attrs.evolve(s, tokens=s.tokens % 11) for s in samples])
    assert max(g.abs().max().item() for g in grads.values()) == 0.0


def test_the_negative_log_likelihood_of_chosen_sides_counts_tokens_alike():
    samples = [
        pair_rows.side([-4.0], [0.0], unit=0),
        pair_rows.side([-7.0], [0.0], unit=0),
        pair_rows.side([-1.0] * 9, [0.0] * 9, unit=1),
        pair_rows.side([-7.0], [0.0], unit=1),
    ]
    scores, batch = pair_rows.scored(samples)
    assert reduce.pair_mean(preference.sft(scores, batch)[0], batch).item() == pytest.approx(1.3, abs=1e-12)
    counts = pack.count(samples)
    halves = []
    for half in (samples[:2], samples[2:]):
        part = pack.build(half, counts, dtype=torch.float64).batch
        values, _ = preference.sft(pack.Scores(logprobs=part.policy_logprobs), part)
        halves.append(reduce.pair_mean(values, part).item())
    assert sum(halves) == pytest.approx(1.3, abs=1e-12)


def test_counts_of_a_step_know_the_tokens_of_chosen_sides():
    samples = pair_rows.drawn(3)
    chosen = sum(int(s.trained.sum()) for s in samples[::2])
    assert pack.count(samples).chosen_terms == chosen
    whole = pack.build(samples[:2], pack.count(samples), dtype=torch.float64)
    assert whole.batch.totals.chosen_terms.item() == chosen


def test_simpo_asks_for_a_margin_of_average_log_probabilities():
    scores, batch = pair_rows.scored(
        [pair_rows.side([-1.0, -2.0], [9.0, 9.0]), pair_rows.side([-3.0], [9.0])]
    )
    values, _ = reference_free.simpo(scores, batch, beta=2.0, simpo_gamma=0.5)
    assert values.item() == near(-math.log(1 / (1 + math.exp(-(2.0 * 1.5 - 0.5)))))


def test_orpo_compares_odds_of_length_normalized_probabilities():
    half, quarter = math.log(0.5), math.log(0.25)
    scores, batch = pair_rows.scored(
        [pair_rows.side([half, half], [9.0, 9.0]), pair_rows.side([quarter], [9.0])]
    )
    values, watched = reference_free.orpo(scores, batch, beta=0.1)
    odds_ratio = (0.5 / 0.5) / (0.25 / 0.75)
    assert values.item() == near(-half + 0.1 * -math.log(odds_ratio / (1 + odds_ratio)))
    assert watched["log_odds_chosen"].item() == near(math.log(odds_ratio))


@pytest.mark.parametrize(
    ("name", "x", "number"),
    [
        ("reverse_kl", 0.7, 0.7),
        ("forward_kl", 0.7, 1 - math.exp(-0.7)),
        ("js_divergence", 0.0, 0.0),
        ("js_divergence", 0.7, math.log(2) - math.log(1 + math.exp(-0.7))),
        ("alpha_divergence", 0.7, (math.exp(-0.35) - 1) / -0.5),
    ],
)
def test_divergences_of_a_log_ratio_have_their_values(name, x, number):
    assert getattr(margins, name)(torch.tensor([x], dtype=torch.float64)).item() == near(number)


def test_an_alpha_of_one_is_the_reverse_kl():
    x = torch.linspace(-3.0, 3.0, 7, dtype=torch.float64)
    assert torch.equal(margins.alpha_divergence(x, f_alpha_divergence_coef=1.0), x)
    close = margins.alpha_divergence(x, f_alpha_divergence_coef=1.0001)
    assert (close - x).abs().max() < 1e-3


DIVERGENCES = {n: getattr(margins, n) for n in ("forward_kl", "js_divergence", "alpha_divergence")}


@pytest.mark.parametrize("name", LOG_RATIO)
def test_an_f_divergence_is_refused_by_losses_that_are_defined_for_the_log_ratio(name):
    with pytest.raises(ValueError, match=f"{name} is defined for the log-ratio alone"):
        pair_composition.diverging(NAMED[name].loss, margins.forward_kl)


def test_imitation_takes_any_divergence_and_stays_what_it_is():
    assert pair_composition.diverging(preference.sft, margins.forward_kl) is preference.sft


def test_weights_of_the_policy_name_the_field_that_they_miss():
    with pytest.raises(ValueError, match="add 'log_sum_squares'"):
        value(partial(pair_composition.policy_weighted, loss=preference.sigmoid), ((1.0,), (0.0,)))


def mpo():
    """Mixed preference optimization with its weights."""
    names = {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}
    return algorithms.preference_mixture([(NAMED[n], w) for n, w in names.items()])


def test_a_mixture_needs_what_its_parts_need_and_couples_as_far_as_any():
    assert mpo().needs == ("reference_logprobs",)
    assert mpo().couples == "pair"
    assert algorithms.preference_mixture([(NAMED["sft"], 1.0)]).needs == ()
    assert algorithms.preference_mixture([(NAMED["sft"], 1.0), (NAMED["aot"], 0.1)]).couples == "step"


@pytest.mark.parametrize("parts", [[], [(algorithms.sft, 1.0)]])
def test_a_mixture_of_nothing_or_of_other_axes_is_refused(parts):
    with pytest.raises(ValueError, match="each with one value a pair"):
        algorithms.preference_mixture(parts)


# Properties and extremes.


COMPOSED = {
    "mixture": mpo(),
    "weighted": algorithms.dpo.evolve(
        loss=partial(pair_composition.policy_weighted, loss=preference.sigmoid),
        needs=(*algorithms.dpo.needs, "log_sum_squares"),
    ),
    "desensitized": algorithms.dpo.evolve(
        loss=partial(pair_composition.length_desensitized, loss=preference.sigmoid, ld_alpha=0.5)
    ),
    **{
        f"{name} of {divergence}": NAMED[name].evolve(loss=pair_composition.diverging(NAMED[name].loss, ours))
        for name in DIVERGING
        for divergence, ours in DIVERGENCES.items()
    },
}


@pytest.mark.parametrize("name", [*EVERY, "mixture", "weighted", "desensitized"])
def test_the_properties_of_every_algorithm_hold(name):
    check.check({**EVERY, **COMPOSED}[name], seeds=range(3))


EXTREME = [
    ((x,) * n, (y,) * m)
    for x in (-1e4, -100.0, -1e-12, 0.0, 100.0)
    for y in (-100.0, 0.0, 1e4)
    for n, m in ((1, 1), (3, 1), (0, 2), (2, 0), (0, 0))
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*EVERY, *(n for n in COMPOSED if n != "weighted")])
def test_extreme_log_ratios_empty_sides_and_single_tokens_stay_finite_in_value_and_gradient(name, dtype):
    for pair in EXTREME:
        scores, batch = pair_rows.by_hand(pair, ((0.1,), (-0.1, 0.2)), dtype=dtype)
        values, watched = {**EVERY, **COMPOSED}[name].loss(scores, batch)
        (grad,) = torch.autograd.grad(values.sum(), scores.logprobs)
        assert values.isfinite().all(), pair
        assert grad.isfinite().all(), pair
        assert all(x.isfinite().all() for x in watched.values()), pair


@pytest.mark.parametrize("name", EVERY)
def test_certain_sides_have_finite_odds(name):
    for first, second in ((0.0, 0.0), (0.0, -1.0), (-1.0, 0.0), (-1e-9, -1e-30)):
        for dtype in (torch.float32, torch.float64):
            samples = [pair_rows.side([x] * 2, [-1.0] * 2) for x in (first, second)]
            scores, batch = pair_rows.scored(samples, dtype=dtype)
            values, _ = EVERY[name].loss(scores, batch)
            (grad,) = torch.autograd.grad(values.sum(), scores.logprobs)
            assert values.isfinite().all()
            assert grad.isfinite().all()


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "sppo_hard", "apo_zero", "nca_pair", "bco_pair"])
def test_a_loss_pushes_the_chosen_side_up_and_the_rejected_side_down(name):
    scores, batch = pair_rows.by_hand(((0.1, -0.2), (0.2,)))
    values, _ = EVERY[name].loss(scores, batch)
    (grad,) = torch.autograd.grad(values.sum(), scores.logprobs)
    assert (grad[:2] < 0).all()
    assert (grad[2:] > 0).all()


def test_the_weight_of_a_discovered_loss_times_its_exponential_never_overflows():
    # At b D = -1000 the weight is exp(-20000) and the exponential exp(1000): the product is 0.
    assert value(preference.discopop, ((-1e4,), (0.0,))) == pytest.approx(1000.0, rel=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_metrics_bear_the_names_that_dashboards_use(name):
    samples = pair_rows.drawn(1, empty=False)
    _, means, _ = pair_rows.step(EVERY[name], samples)
    found = set(metrics.values(means))
    assert {"logps/chosen", "logps/rejected", "entropy"} <= found
    rewards = {f"rewards/{what}" for what in ("chosen", "rejected", "margins", "accuracies")}
    assert (rewards <= found) == (name != "sft")


def test_rewards_are_beta_times_log_ratios_and_accuracy_is_strict():
    scores, batch = pair_rows.by_hand(((1.0, 2.0), (0.5,)), ((0.0,), (0.0,)), ((-1.0,), (1.0,)))
    _, watched = preference.sigmoid(scores, batch, beta=0.5)
    assert watched["rewards/chosen"].tolist() == pytest.approx([1.5, 0.0, -0.5])
    assert watched["rewards/rejected"].tolist() == pytest.approx([0.25, 0.0, 0.5])
    assert watched["rewards/margins"].tolist() == pytest.approx([1.25, 0.0, -1.0])
    assert watched["rewards/accuracies"].tolist() == [1.0, 0.0, 0.0]
    assert watched["logps/chosen"].tolist() == pytest.approx([1.0, -1.0, -2.0])


def test_columns_among_the_needs_are_not_asked_of_the_model():
    samples = pair_rows.drawn(0)
    needs = ("reference_logprobs", "entropies", "mismatched")
    assert pack.build(samples, pack.count(samples), needs=needs).needs == ("entropies",)


# Losses that stand alone are compiled with all algorithms; here each takes a divergence, and each divergence.
COMPILED = (
    *("mixture", "weighted", "desensitized"),
    *(f"{name} of {one}" for name, one in zip(DIVERGING, itertools.cycle(DIVERGENCES), strict=False)),
)


@pytest.mark.plain
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_loss_equals_the_eager_one(name):
    torch._dynamo.reset()
    algorithm = COMPOSED[name]
    squares = torch.tensor([-1.0, -0.5, -2.0, -0.1, -0.3], dtype=torch.float64)
    scores, batch = pair_rows.by_hand(((0.1, 0.3), (0.2,)), ((-0.5,), (0.4,)), log_sum_squares=squares)

    def loss(logprobs, scores, batch):
        return algorithm.reduce(algorithm.loss(attrs.evolve(scores, logprobs=logprobs), batch)[0], batch)

    found = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        leaf = scores.logprobs.detach().clone().requires_grad_()
        value = function(leaf, scores, batch)
        found.append((value.detach(), *torch.autograd.grad(value, leaf)))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)
