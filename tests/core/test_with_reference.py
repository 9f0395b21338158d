"""Log-probabilities of a frozen reference as a column of packs; packs of ranks that have no work."""

import attrs
import pytest
import torch

from core import algorithms, check, pack, reference, steps

MODEL, PARAMS = reference.Reference(), reference.params()
ALL = {n: a for n, a in vars(algorithms).items() if isinstance(a, algorithms.Algorithm)}


def packed(algorithm, *parts):
    counts = pack.count([s for part in parts for s in part])
    needs = algorithm.reads
    return [pack.build(part, counts, needs=needs, dtype=torch.float64) for part in parts]


def bare(algorithm):
    """Draw samples that bring no log-probabilities of a reference."""
    return [
        attrs.evolve(s, columns={n: v for n, v in s.columns.items() if n != "reference_logprobs"})
        for s in check.draw(algorithm, 0)
    ]


def test_a_policy_that_is_its_reference_has_log_ratios_of_exactly_0():
    packs = packed(algorithms.dpo, bare(algorithms.dpo))
    (each,) = steps.with_reference(MODEL, algorithms.dpo, PARAMS, packs)
    scores = MODEL.predict(PARAMS, each, 0)
    assert torch.equal(scores.logprobs, each.batch.reference_logprobs)
    values, found = algorithms.dpo.loss(scores, each.batch)
    assert torch.equal(values, torch.full_like(values, 2.0).log())
    assert torch.equal(found["rewards/margins"], torch.zeros_like(values))


def test_the_reference_is_other_parameters_and_gets_no_gradient():
    packs = packed(algorithms.dpo, bare(algorithms.dpo))
    other = {n: p.clone().requires_grad_() for n, p in reference.params(seed=1).items()}
    (each,) = steps.with_reference(MODEL, algorithms.dpo, other, packs)
    assert torch.equal(each.batch.reference_logprobs, MODEL.predict(other, packs[0], 0).logprobs)
    assert not each.batch.reference_logprobs.requires_grad
    assert "reference_logprobs" not in packs[0].batch.terms.columns
    assert steps.with_reference(MODEL, algorithms.dpo, None, [each]) == [each]


def test_an_algorithm_without_reference_is_scored_by_none():
    packs = packed(algorithms.simpo, bare(algorithms.simpo))
    assert steps.with_reference(MODEL, algorithms.simpo, None, packs) == packs
    with pytest.raises(ValueError, match="no parameters of a reference came"):
        steps.with_reference(MODEL, algorithms.dpo, None, packs)


@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL)
def test_a_pack_with_nothing_in_it_adds_nothing(algorithm):
    samples = check.draw(algorithm, 3)
    runs = [
        steps.loss_and_grad(MODEL, algorithm, PARAMS, packed(algorithm, *parts), 0)
        for parts in ([samples], [samples, []], [[], samples])
    ]
    for value, _, grads in runs[1:]:
        assert torch.equal(value, runs[0][0])
        assert all(torch.equal(grads[name], grad) for name, grad in runs[0][2].items())
