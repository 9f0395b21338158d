"""Whole steps on decoders: pair losses beside their own likelihood, packs that train nothing, many steps."""

import gc

import numpy as np
import pytest
import torch

from adapters import live, loading, transformers_lm
from core import algorithms, optimizers, pack, steps
from core.plan import sample
from tests.adapters import zoo


def pairs():
    """Three pairs; both sides of one begin alike."""
    draw = np.random.default_rng(0)
    found = []
    for unit in range(3):
        prompt = draw.integers(3, zoo.VOCAB, 4)
        for _ in range(2):
            tokens = np.concatenate([prompt, draw.integers(3, zoo.VOCAB, draw.integers(1, 7))])
            found.append(
                sample.Sample(tokens=tokens, trained=np.arange(len(tokens)) >= 4, unit=unit, group=unit)
            )
    return found


def logprobs(module, each):
    """Log-probabilities of the trained tokens of a sample by itself, by the module's own forward."""
    tokens = torch.from_numpy(each.tokens)
    with transformers_lm.KeepDouble():
        logits = module(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    found = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return found[torch.from_numpy(each.trained[1:])].detach()


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("options", [{}, {"budget": 6}])
def test_losses_of_pairs_hold_the_likelihood_of_the_chosen_side(kind, options):
    samples = pairs()
    module = zoo.build(kind, attention="eager")
    found = [logprobs(module, each) for each in samples]
    chosen, rejected = found[::2], found[1::2]
    nll = -sum(x.sum() for x in chosen) / sum(map(len, chosen))

    def odds(x):
        return x.mean() - torch.log1p(-x.mean().exp())

    def mean(margins):
        return -torch.nn.functional.logsigmoid(0.1 * torch.stack(margins)).mean()

    both = list(zip(chosen, rejected, strict=True))
    orpo = -0.1 * torch.nn.functional.logsigmoid(torch.stack([odds(c) - odds(r) for c, r in both])).mean()
    wanted = {"sft": nll, "cpo": nll + mean([c.sum() - r.sum() for c, r in both]), "orpo": nll + orpo}
    model, params = loading.bind(zoo.build(kind))
    for name, want in wanted.items():
        value, _ = steps.evaluate(
            model, algorithms.preferences[name], params, [zoo.packed(samples, **options)]
        )
        assert value.item() == pytest.approx(want.item(), rel=1e-12)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"feed_forward_chunk": 4}])
def test_a_pack_that_trains_nothing_adds_exactly_nothing(options):
    samples = zoo.rows()
    idle = [sample.Sample(tokens=s.tokens, trained=np.zeros(len(s.tokens), bool)) for s in samples[:2]]
    model, params = loading.bind(zoo.build("llama"), **options)
    totals = pack.count(samples + idle)
    whole, nothing = (pack.build(some, totals, dtype=torch.float64) for some in (samples, idle))
    want, _, grads = steps.loss_and_grad(model, algorithms.sft, params, [whole], 0)
    value, _, found = steps.loss_and_grad(model, algorithms.sft, params, [whole, nothing], 0)
    assert torch.equal(value, want)
    assert all(torch.equal(found[name], grads[name]) for name in grads)
    value, _, found = steps.loss_and_grad(model, algorithms.sft, params, [nothing], 0)
    assert value.item() == 0.0
    assert not any(bool(grad.any()) for grad in found.values())


def test_tensors_and_their_bytes_are_the_same_after_fifty_and_three_hundred_steps():
    module = zoo.build("llama", num_hidden_layers=1)
    model, params = loading.bind(module, gradient_checkpointing="selective", feed_forward_chunk=4)
    adamw = optimizers.adamw(rate=lambda done: 1e-3)
    state = steps.init(params, adamw, algorithms.sft, key=0)
    each = zoo.packed(zoo.rows()[:2], needs=algorithms.sft.watches)
    counts = []
    with live.Live(params.values()) as found:
        for k in range(1, 301):
            state, means = steps.train_step(model, algorithms.sft, adamw, state, [each])
            if k in (50, 300):
                gc.collect()
                counts.append((found.now, sum(type(o) is torch.Tensor for o in gc.get_objects())))
    assert means
    assert counts[0] == counts[1]
