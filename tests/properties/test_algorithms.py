"""What every algorithm must have; a new one is covered by standing in core.algorithms."""

import attrs
import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from core import algorithms, check, pack, record, reference, steps
from core.plan import sample
from tests.properties import slow

ALL = {n: a for n, a in vars(algorithms).items() if isinstance(a, algorithms.Algorithm)}
ALL |= {f"preferences {n}": a for n, a in algorithms.preferences.items() if a not in ALL.values()}
PARAMS = reference.params()
FEW = hypothesis.settings(max_examples=4, suppress_health_check=[hypothesis.HealthCheck.too_slow])


EACH = pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL)


STEMS = st.lists(st.integers(0, 10), min_size=1, max_size=4)
TAILS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=2, max_size=6)


def batch(algorithm, data):
    """Draw samples with every column that a run has; they share prefixes, repeat, and end in each other."""
    stem, tails = data.draw(STEMS, label="stem"), data.draw(TAILS, label="tails")
    seed = data.draw(st.integers(0, 2**31), label="seed")
    template = check.draw(algorithm, seed)
    if len(tails) % 2:
        tails = [*tails, tails[0]]  # pairs want an even number
    return [fitted(template[i], np.array([*stem, *end]), seed + i) for i, end in enumerate(tails)]


def fitted(template, tokens, seed):
    """Give a drawn sample other tokens, a mask that trains at least the last, and columns of that length."""
    source = np.random.default_rng(seed)
    trained = source.random(len(tokens)) < 0.7
    trained[0], trained[-1] = False, True
    columns = {
        n: -3.0 * source.random(len(tokens)) if isinstance(v, np.ndarray) else v
        for n, v in template.columns.items()
    }
    return attrs.evolve(template, tokens=tokens, trained=trained, columns=columns)


def parts(algorithm, samples, data):
    """Deal out what must stay together over up to three packs, in any order."""
    units = data.draw(st.permutations(check.units(algorithm, samples)), label="order")
    dealt = [[], [], []]
    for unit in units:
        dealt[data.draw(st.integers(0, 2), label="pack")].extend(unit)
    return [part for part in dealt if part]


def run(algorithm, dealt, **options):
    """Loss and gradients of a step over packs of these parts."""
    counts = pack.count([s for part in dealt for s in part])
    needs = algorithm.reads
    packs = [pack.build(p, counts, needs=needs, dtype=torch.float64, **options) for p in dealt]
    value, _, grads = steps.loss_and_grad(reference.Reference(), algorithm, PARAMS, packs, 0)
    return value, grads


def assert_same(got, want):
    """Loss and every gradient within 1e-10, relative to the gradient as a whole."""
    scale = max(abs(want[0].item()), *(g.norm().item() for g in want[1].values()), 1e-12)
    assert abs(got[0] - want[0]) <= 1e-10 * scale
    for n, g in want[1].items():
        assert (got[1][n] - g).norm() <= 1e-10 * max(g.norm().item(), 1e-3 * scale), n


@EACH
def test_the_properties_that_users_can_check_hold(algorithm):
    check.check(algorithm, seeds=range(2))


@EACH
@FEW
@hypothesis.given(data=st.data())
def test_packs_of_trees_in_any_order_equal_a_loop_over_plain_rows(algorithm, data):
    samples = batch(algorithm, data)
    assert_same(run(algorithm, parts(algorithm, samples, data)), slow.step(algorithm, PARAMS, samples))


@pytest.mark.plain
@EACH
def test_a_compiled_loss_equals_the_eager_one(algorithm):
    torch._dynamo.reset()
    samples = check.draw(algorithm, 0)
    needs = algorithm.reads
    whole = pack.build(samples, pack.count(samples), needs=needs, dtype=torch.float64)
    scores = reference.Reference().predict(PARAMS, whole, 0)

    def value(scores, batch):
        values, _ = algorithm.loss(scores, batch, **algorithm.carry)
        return algorithm.reduce(values, batch)

    compiled = torch.compile(value, backend="aot_eager", fullgraph=True)
    found = []
    for function in (value, compiled):
        given = record.tree.map(lambda field: field.clone().requires_grad_(), scores)
        loss = function(given, whole.batch)
        leaves = record.tree.leaves(given)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        found.append((loss.detach(), *grads))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


@EACH
def test_a_sample_that_trains_nothing_changes_nothing(algorithm):
    if algorithm.rows == "pairs" or algorithm.couples == "step":
        pytest.skip("a side without a trained token takes part in its pair, and in the step")
    samples = check.draw(algorithm, 1)
    nothing = attrs.evolve(samples[0], trained=np.zeros(len(samples[0].tokens), np.bool_), unit=99)
    assert_same(run(algorithm, [[*samples, nothing]]), run(algorithm, [samples]))


def mean_of_rows(values, batch):
    """A planted fault: divides by what happens to be in the pack."""
    return values.mean()


def neighborly(scores, batch):
    """A planted fault: a row reads the row above."""
    return -scores.logprobs * scores.logprobs.detach().roll(1), {}


def position_in_pack(scores, batch):
    """A planted fault: a row's weight hangs on its place in the table."""
    return -scores.logprobs * (1 + torch.arange(len(scores.logprobs))), {}


def not_a_number(scores, batch):
    """A planted fault: the logarithm of 0 at a log-probability of 0."""
    return scores.logprobs.exp().neg().log1p(), {}


def infinite(scores, batch):
    """A planted fault: a ratio that overflows."""
    return (-scores.logprobs).exp(), {}


def by_sample(scores, batch):
    """A planted fault, while its algorithm says that tokens stand alone: a product over each sample."""
    sums = torch.zeros(len(batch.samples.group), dtype=scores.logprobs.dtype)
    whole = sums.index_add(0, batch.terms.sample, scores.logprobs)
    return -whole.index_select(0, batch.terms.sample).exp(), {}


def detached(scores, batch):
    """Likelihood of scores that are taken as numbers."""
    return -scores.logprobs.detach(), {}


def detached_sum(values, batch):
    """A sum that is taken as a number."""
    return values.sum().detach()


def overwriting(scores, batch):
    """A planted fault: scales the scores that it was given."""
    scores.logprobs.data.mul_(0.5)
    return -scores.logprobs, {}


def remembering(seen=[]):  # noqa: B006
    """A planted fault: a loss that counts its calls."""

    def loss(scores, batch):
        seen.append(1)
        return -scores.logprobs * len(seen), {}

    return loss


class Unscaled(torch.autograd.Function):
    """A planted fault: half the loss, whose backward forgets the half."""

    @staticmethod
    def forward(ctx, x):
        return x * 0.5

    @staticmethod
    def backward(ctx, grad):
        return grad


def wrong_slope(scores, batch):
    """A planted fault in a backward of its own."""
    return -Unscaled.apply(scores.logprobs), {}


def squared(scores, batch):
    """A planted fault: bad answers are pulled up as good ones are."""
    return -(batch.advantage**2) * scores.logprobs, {}


def pushed(scores, batch):
    """A planted fault: the sign is lost."""
    return batch.advantage * scores.logprobs, {}


def blind(scores, batch):
    """A planted fault: the advantage is not read."""
    return -scores.logprobs, {}


def by_likelihood(scores, batch):
    """A planted fault: a ratio whose denominator follows, so that likely tokens are pulled more."""
    return -batch.advantage * scores.logprobs.exp(), {}


def of_generator(scores, batch):
    """The old policy taken for the generator's: the same where both are the policy itself."""
    return -(scores.logprobs - batch.sampled_logprobs).exp() * batch.advantage, {}


def undeclared(scores, batch):
    """A planted fault: reads what is there at logged steps alone."""
    return -scores.logprobs - 0.1 * scores.entropies, {}


def entropies_alone(scores, batch):
    """A planted fault: the same, and no gradient flows where nobody declared it."""
    return -scores.entropies, {}


def where_it_is(scores, batch):
    """A planted fault: another loss at logged steps."""
    return -scores.logprobs if scores.entropies is None else -scores.logprobs - scores.entropies, {}


def metric_undeclared(scores, batch):
    """A planted fault: a metric of what nobody asked for."""
    return -scores.logprobs, {"mean_logits": scores.mean_logits}


UNLOGGED = "the loss is the same at steps that are not logged does not hold.*"
REINFORCE = "on-policy gradient is REINFORCE's"
FAULTS = {
    "mean of rows": (algorithms.sft.evolve(reduce=mean_of_rows), "additive over units"),
    "reads a neighbor": (algorithms.sft.evolve(loss=neighborly), "additive over units|order-free"),
    "reads its place": (algorithms.sft.evolve(loss=position_in_pack), "additive over units|order-free"),
    "not a number": (algorithms.sft.evolve(loss=not_a_number), "finite at extremes"),
    "infinite": (algorithms.sft.evolve(loss=infinite), "finite at extremes"),
    "false coupling": (algorithms.sft.evolve(loss=by_sample), "declared coupling"),
    "wrong backward": (algorithms.sft.evolve(loss=wrong_slope), "gradcheck"),
    "squared advantage": (algorithms.grpo.evolve(loss=squared), REINFORCE),
    "lost sign": (algorithms.grpo.evolve(loss=pushed), REINFORCE),
    "no advantage": (algorithms.grpo.evolve(loss=blind), REINFORCE),
    "weighed by likelihood": (algorithms.grpo.evolve(loss=by_likelihood), REINFORCE),
    "detaches": (algorithms.sft.evolve(loss=detached), "a gradient flows to the scores does not hold"),
    "reduces to a constant": (algorithms.dapo.evolve(reduce=detached_sum), "reduce lets no gradient through"),
    "reads what is watched": (algorithms.sft.evolve(loss=undeclared), UNLOGGED + r"needs=\('entropies',\)"),
    "reads what nobody names": (
        algorithms.sft.evolve(loss=undeclared, watches=()),
        UNLOGGED + r"needs=\('entropies',\)",
    ),
    "is what is watched": (algorithms.sft.evolve(loss=entropies_alone), UNLOGGED + r"needs=\('entropies',\)"),
    "two losses": (algorithms.sft.evolve(loss=where_it_is), UNLOGGED + "without entropies, top1 and"),
    "measures what nobody names": (
        algorithms.sft.evolve(loss=metric_undeclared),
        UNLOGGED + r"mean_logits.*needs=\('mean_logits',\)",
    ),
    "writes": (algorithms.sft.evolve(loss=overwriting), "arguments stay as they are"),
    "remembers": (algorithms.sft.evolve(loss=remembering()), "arguments stay as they are"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(name):
    faulty, wanted = FAULTS[name]
    with pytest.raises(ValueError, match=wanted):
        check.check(faulty)


def test_a_budget_that_changes_the_loss_is_found():
    faulty, samples = algorithms.sft.evolve(reduce=mean_of_rows), check.draw(algorithms.sft, 0)
    assert "packs of at most" in check.problem(faulty, "budget-free", samples)


def test_a_policy_loss_over_the_generators_ratio_passes():
    check.check(algorithms.grpo.evolve(loss=of_generator))


def test_a_property_that_is_not_meant_to_hold_is_left_out():
    check.check(algorithms.grpo.evolve(loss=squared), without=(REINFORCE,))
    with pytest.raises(ValueError, match="without: 'reinforce' came; one of"):
        check.check(algorithms.grpo, without=("reinforce",))


def test_the_batch_that_a_failure_brings_is_the_smallest_there_is():
    with pytest.raises(check.Broken) as caught:
        check.check(algorithms.sft.evolve(reduce=mean_of_rows))
    least = caught.value.failure.samples
    # Two packs of one row each are wrong already, and one row cannot be.
    assert [s.tokens.tolist() for s in least] == [[0, 0]] * 2
    assert [s.trained.tolist() for s in least] == [[False, True]] * 2
    assert all(not np.any(values) for s in least for values in s.columns.values())


def test_a_coupling_that_is_named_passes():
    check.check(algorithms.sft.evolve(loss=by_sample, couples="sample"))


def test_samples_have_the_columns_that_an_algorithm_makes():
    mine = algorithms.sft.evolve(columns=lambda rewards, groups: {"gate": rewards * 2.0})
    drawn = check.draw(mine, 0)
    assert all(0.0 <= s.columns["gate"] <= 2.0 for s in drawn)
    assert all(isinstance(s, sample.Sample) for s in drawn)
