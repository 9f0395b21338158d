"""The verbs: no number of a step hangs on how its rows are packed, and arguments are left alone."""

import gc

import attrs
import numpy as np
import pytest
import torch

from core import algorithms, metrics, optimizers, pack, ports, record, reference, steps
from core.plan import sample

MODEL = reference.Reference()
RATE = optimizers.adamw(rate=lambda done: 0.05, max_norm=1.0)


class Given:
    """A model whose log-probability of each row is a parameter: row k of the step is number k."""

    def __init__(self):
        self.keys = []

    def predict(self, params, pack, key):
        """Look the rows up by the column `place`."""
        self.keys.append(key)
        return scores(params, pack.batch)

    def pull_back(self, params, pack, key, loss):
        """Differentiate by the table."""
        self.keys.append(key)
        leaf = params["rows"].detach().requires_grad_()
        with torch.enable_grad():
            value, means = loss(scores({"rows": leaf}, pack.batch))
        (grad,) = torch.autograd.grad(value, leaf)
        return value.detach(), means, {"rows": grad}


def scores(params, batch):
    """The rows' numbers as log-probabilities."""
    return pack.Scores(logprobs=params["rows"].index_select(0, batch.place.long()))


def given_rows(*losses):
    """Samples of one trained token each row, and the parameter that gives them these losses."""
    start, samples = 0, []
    for row in losses:
        place = np.arange(start - 1, start + len(row), dtype=np.float64)
        tokens = np.arange(len(row) + 1)
        samples.append(sample.Sample(tokens=tokens, trained=tokens > 0, columns={"place": place}))
        start += len(row)
    flat = [-loss for row in losses for loss in row]
    return samples, {"rows": torch.tensor(flat, dtype=torch.float64)}


def in_packs(*parts, needs=(), **options):
    """One pack a part, all with the counts of the whole."""
    counts = pack.count([s for part in parts for s in part])
    return [pack.build(p, counts, needs=needs, dtype=torch.float64, **options) for p in parts]


def row(*tokens, trained_from=1, group=0):
    """A sample that is trained from a place on."""
    numbers = np.array(tokens)
    return sample.Sample(tokens=numbers, trained=np.arange(len(numbers)) >= trained_from, group=group)


P, A, B, C = (1, 2, 3), (4, 5), (6, 7), (8, 9)
FOREST = [row(*P, *A), row(*P, *B), row(*P, *A, *C)]


def grads_of(packs, algorithm=algorithms.sft, params=None):
    """Loss and gradients on the reference model."""
    params = reference.params() if params is None else params
    value, _, grads = steps.loss_and_grad(MODEL, algorithm, params, packs, 0)
    return value, grads


def assert_same(got, want, tolerance=1e-12):
    """Compare two (loss, gradients)."""
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
    for n in want[1]:
        torch.testing.assert_close(got[1][n], want[1][n], rtol=tolerance, atol=tolerance)


def test_one_token_of_4_and_nine_of_1_are_1_3_in_any_packs():
    samples, params = given_rows([4.0], [1.0] * 9)
    for parts in ([samples], [samples[:1], samples[1:]]):
        value, _, grads = steps.loss_and_grad(Given(), algorithms.sft, params, in_packs(*parts), 0)
        assert value.item() == pytest.approx(1.3, abs=1e-12)
        torch.testing.assert_close(grads["rows"], torch.full((10,), -0.1, dtype=torch.float64))


def test_evaluation_gives_the_loss_of_training_in_any_packs():
    samples, params = given_rows([4.0], [1.0] * 9)
    for parts in ([samples], [samples[:1], samples[1:]]):
        packs = in_packs(*parts)
        value, _ = steps.evaluate(Given(), algorithms.sft, params, packs)
        assert value.item() == pytest.approx(1.3, abs=1e-12)


def test_each_pack_of_a_step_draws_from_a_key_of_its_own_and_evaluation_draws_nothing():
    samples, params = given_rows([1.0], [2.0])
    packs = in_packs(samples[:1], samples[1:])
    trained, again, other, evaluated = (Given() for _ in range(4))
    for model, key in ((trained, 5), (again, 5), (other, 6)):
        steps.loss_and_grad(model, algorithms.sft, params, packs, key)
    steps.evaluate(evaluated, algorithms.sft, params, packs)
    assert trained.keys == again.keys
    assert len({*trained.keys, *other.keys}) == 4
    assert evaluated.keys == [None, None]


def test_equal_packs_of_two_ranks_draw_from_keys_of_their_own():
    samples, params = given_rows([1.0])
    first, second = Given(), Given()
    for index, model in enumerate((first, second)):
        ranks = attrs.evolve(ports.ALONE, index=index, num=2)
        steps.loss_and_grad(model, algorithms.sft, params, in_packs(samples), 5, ranks=ranks)
    assert first.keys != second.keys


def test_a_forest_of_nine_nodes_equals_seventeen_tokens_run_alone():
    (shared,) = in_packs(FOREST)
    (apart,) = in_packs(FOREST, share=False)
    assert (len(shared.tokens), len(apart.tokens)) == (9, 17)
    assert_same(grads_of([shared]), grads_of([apart]))


def test_a_token_that_forks_and_ends_keeps_every_prediction_once():
    (shared,) = in_packs([attrs.evolve(s, trained=np.arange(len(s.tokens)) > 2) for s in FOREST])
    assert len(shared.edge_nodes) == 6
    assert len(shared.term_edges) == 8


def test_editing_a_branch_leaves_the_scores_of_another_as_they_were_to_the_bit():
    def of_b(a):
        (one,) = in_packs([row(*P, *a), row(*P, *B)])
        found = MODEL.predict(reference.params(), one, 0)
        return found.logprobs[one.batch.terms.sample == 1]

    assert torch.equal(of_b(A), of_b((9, 10)))


def test_identical_rows_vote_twice():
    twice = [row(*P, *A, trained_from=3), row(*P, *A, trained_from=3), row(*P, *B, trained_from=3)]
    assert_same(grads_of(in_packs(twice)), grads_of(in_packs(*[[s] for s in twice])))
    once_a, once_b = (grads_of(in_packs([s]))[0] for s in twice[1:])
    assert grads_of(in_packs(twice))[0].item() == pytest.approx(((2 * once_a + once_b) / 3).item(), abs=1e-12)


def test_a_pack_with_nothing_trained_adds_a_gradient_of_zero():
    silent = row(1, 2, 3, trained_from=9)
    assert_same(grads_of(in_packs(FOREST, [silent], [])), grads_of(in_packs(FOREST)))
    value, grads = grads_of(in_packs([silent], FOREST)[:1])
    assert value == 0.0
    assert all((g == 0).all() for g in grads.values())


def test_the_gradient_norm_is_the_same_over_one_pack_and_four_and_taken_before_clipping():
    samples = [*FOREST, row(9, 8, 7, 6)]
    state = steps.init(reference.params(), RATE, algorithms.sft, key=0)
    norms = []
    for parts in ([samples], [[s] for s in samples]):
        _, means = steps.train_step(MODEL, algorithms.sft, RATE, state, in_packs(*parts))
        norms.append(metrics.values(means)["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    wanted = optimizers.global_norm(grads_of(in_packs(samples))[1]).item()
    assert norms[0] == pytest.approx(wanted, rel=1e-12)
    assert wanted > 0.1


def test_train_step_is_loss_and_grad_then_update():
    state = steps.init(reference.params(), RATE, algorithms.sft, key=3)
    packs = in_packs(FOREST)
    new, means = steps.train_step(MODEL, algorithms.sft, RATE, state, packs)
    value, grads = grads_of(packs)
    by_hand = steps.update(RATE, state, grads)
    assert metrics.values(means)["loss"] == pytest.approx(value.item(), rel=1e-12)
    assert (new.step, new.key) == (by_hand.step, by_hand.key) == (1, 3)
    for x, y in zip(record.tree.leaves(new), record.tree.leaves(by_hand), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("donate", [False, True])
def test_a_step_writes_to_its_state_only_when_that_is_donated(donate):
    state = steps.init(reference.params(), RATE, algorithms.sft, key=0)
    before = record.tree.map(torch.clone, state)
    new, _ = steps.train_step(MODEL, algorithms.sft, RATE, state, in_packs(FOREST), donate=donate)
    same = [
        torch.equal(x, y) for x, y in zip(record.tree.leaves(state), record.tree.leaves(before), strict=True)
    ]
    assert all(same) is not donate
    kept, _ = steps.train_step(MODEL, algorithms.sft, RATE, before, in_packs(FOREST))
    for x, y in zip(record.tree.leaves(new), record.tree.leaves(kept), strict=True):
        assert torch.equal(x, y)


def test_what_an_algorithm_remembers_reaches_its_loss_and_follows_its_metrics():
    def loss(scores, batch, *, weight):
        return -weight * scores.logprobs, {}

    mine = algorithms.sft.evolve(
        loss=loss, carry={"weight": 2.0}, next_carry=lambda carry, means: {"weight": means["loss"]}
    )
    state = steps.init(reference.params(), RATE, mine, key=0)
    new, _ = steps.train_step(MODEL, mine, RATE, state, in_packs(FOREST))
    plain = grads_of(in_packs(FOREST))[0].item()
    assert new.carry == {"weight": pytest.approx(2.0 * plain)}
    value, _, _ = steps.loss_and_grad(MODEL, mine, new.params, in_packs(FOREST), 0, carry=new.carry)
    again = steps.loss_and_grad(MODEL, algorithms.sft, new.params, in_packs(FOREST), 0)[0]
    assert value.item() == pytest.approx(2.0 * plain * again.item())


def test_live_tensors_do_not_grow_with_steps():
    state = steps.init(reference.params(), RATE, algorithms.sft, key=0)
    needs = algorithms.sft.watches
    counts, kept = [], []
    for k in range(1, 51):
        state, means = steps.train_step(MODEL, algorithms.sft, RATE, state, in_packs(FOREST, needs=needs))
        kept = [means]
        if k in (5, 50):
            gc.collect()
            counts.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    assert kept
    assert counts[0] == counts[1]


def test_metrics_hold_no_graph():
    _, means, _ = steps.loss_and_grad(
        MODEL, algorithms.sft, reference.params(), in_packs(FOREST, needs=algorithms.sft.watches), 0
    )
    leaves = record.tree.leaves(means)
    assert {"entropy", "mean_token_accuracy"} <= means.keys()
    assert not any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        (lambda scores: (-scores.logprobs.mean(), {}), r"shape \(\); one axis of 2 \(one a term\)"),
        (lambda scores: -scores.logprobs, r"returned Tensor; a tuple \(values, metrics\)"),
        (lambda scores: (-scores.logprobs.detach(), {}), "returned values that no gradient flows from"),
        (lambda scores: ((scores.logprobs < -1).double(), {}), "returned values that no gradient flows from"),
        (lambda scores: (-scores.logprobs, {"m": 1.0}), "metric 'm' is a float"),
        (lambda scores: (-scores.logprobs, {"m": scores.entropies}), "metric 'm' is a NoneType"),
    ],
)
def test_a_loss_that_returns_something_else_is_told_what_was_wanted(returned, wanted):
    mine = algorithms.sft.evolve(loss=lambda scores, batch: returned(scores), watches=())
    samples = [sample.Sample(tokens=np.array([1, 2, 3]), trained=np.arange(3) > 0)]
    packs = [pack.build(samples, pack.count(samples))]
    for one in (mine, mine.evolve(linear=False)):
        with pytest.raises(ValueError, match=wanted):
            steps.loss_and_grad(reference.Reference(), one, reference.params(), packs, 0)


def test_a_reduction_without_a_gradient_is_refused_where_there_is_a_row_to_train():
    mine = algorithms.dapo.evolve(
        loss=lambda scores, batch: (-scores.logprobs, {}), reduce=lambda values, batch: values.sum().detach()
    )
    samples = [sample.Sample(tokens=np.array([1, 2, 3]), trained=np.arange(3) > 0)]
    packs, empty = ([pack.build(rows, pack.count(samples))] for rows in (samples, []))
    with pytest.raises(ValueError, match="reduce returned a number that no gradient flows from"):
        steps.loss_and_grad(reference.Reference(), mine, reference.params(), packs, 0)
    assert steps.evaluate(reference.Reference(), mine, reference.params(), packs)[0] > 0
    loss = steps.objective(mine, empty[0].batch, {})
    assert loss(pack.Scores(logprobs=torch.zeros(0, requires_grad=True)))[0] == 0
