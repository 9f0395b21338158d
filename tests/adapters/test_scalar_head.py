"""A reward model on trees: its scalars, its gradients, its pieces, as each sequence alone gives them."""

import copy

import numpy as np
import pytest
import torch
import transformers

from adapters import loading, scalar_head, tree_attention
from core import algorithms, pack, steps
from core.plan import sample

CONFIG = transformers.LlamaConfig(
    vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_labels=1, eos_token_id=1, pad_token_id=1, bos_token_id=None,
)  # fmt: skip
TOTAL = 1e-10


def module(implementation):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = transformers.AutoModelForSequenceClassification.from_config(
            copy.deepcopy(CONFIG), dtype=torch.float64, attn_implementation=implementation
        )
    scalar_head.draw(made, 3)
    return made


@pytest.fixture(params=[False, True], ids=["plain", "recomputed"])
def bound(request):
    return loading.bind(module(tree_attention.NAME), gradient_checkpointing=request.param)


def pairs():
    """Draw three pairs that share prompts; answers end in the end token and hold it."""
    draw = np.random.default_rng(1)
    made = []
    for unit in range(3):
        prompt = draw.integers(2, 40, 4)
        for length in (3, 6):
            tokens = np.concatenate([prompt, draw.integers(0, 40, length), [1]])
            made.append(
                sample.Sample(tokens=tokens, trained=np.arange(len(tokens)) >= 4, unit=unit, group=unit)
            )
    return made


def packed(*parts, **options):
    counts = pack.count([s for part in parts for s in part])
    return [pack.build(part, counts, needs=("values",), dtype=torch.float64, **options) for part in parts]


def test_a_scalar_takes_in_its_own_token_and_is_that_of_transformers(bound):
    model, params = bound
    assert model.scalar
    (whole,) = packed(pairs())
    values = model.predict(params, whole, None).values
    ends = np.cumsum([int(s.trained.sum()) for s in pairs()]) - 1
    plain = module("eager")
    plain.config.pad_token_id = None
    with torch.no_grad():
        alone = [plain(input_ids=torch.from_numpy(s.tokens)[None]).logits[0, 0] for s in pairs()]
    # Plain attention casts to float32 inside of norms, which the bound model does not.
    torch.testing.assert_close(values[ends], torch.stack(alone), rtol=1e-5, atol=1e-6)


def test_log_probabilities_are_not_made_up(bound):
    model, params = bound
    assert model.predict(params, packed(pairs())[0], None).logprobs.isnan().all()


def test_trees_pieces_and_packs_give_the_gradients_of_pairs_alone(bound):
    model, params = bound
    rows = pairs()
    ways = {
        "alone": packed(rows[:2], rows[2:4], rows[4:], share=False),
        "tree": packed(rows),
        "pieces": packed(rows, budget=7),
        "two packs": packed(rows[:2], rows[2:]),
        "an empty pack": packed(rows, []),
    }
    found = {
        name: steps.loss_and_grad(model, algorithms.reward, params, packs, 0) for name, packs in ways.items()
    }
    assert len(ways["pieces"][0].pieces) > 1
    value, _, grads = found.pop("alone")
    assert grads["score.weight"].norm() > 0
    for name, (other, _, others) in found.items():
        assert abs(other - value) < TOTAL * abs(value), name
        for leaf, grad in grads.items():
            assert (others[leaf] - grad).norm() <= TOTAL * grad.norm().clamp(min=1e-3), (name, leaf)


def test_a_head_is_drawn_from_its_seed_alone():
    one, two = module("eager"), module("eager")
    torch.manual_seed(99)
    scalar_head.draw(two, 3)
    assert torch.equal(one.score.weight, two.score.weight)
    scalar_head.draw(two, 4)
    assert not torch.equal(one.score.weight, two.score.weight)
