"""How tests draw: engines on tiny models, what transformers' generate says, and a model that is a chain."""

import numpy as np
import torch

from adapters import loading, sampling
from core import ports
from tests.adapters import zoo

LENGTHS = (2, 5, 9)


def sampler(kind="llama", *, dtype=torch.float64, changes=None, **options):
    """Make an engine on a tiny model, and its parameters."""
    model, params = loading.bind(zoo.build(kind, dtype=dtype, **(changes or {})))
    return sampling.Sampler(model, **options), params


def prompts(*lengths, seed=1):
    draw = np.random.default_rng(seed)
    return [draw.integers(3, zoo.VOCAB, n) for n in lengths]


def generate(engine, rows, numbers=None, *, num_samples=2, key=3, **numbers_of):
    engine, params = engine
    rule = ports.Sampling(**{"max_tokens": 12, **numbers_of})
    numbers = range(len(rows)) if numbers is None else numbers
    return engine.generate(params, rows, numbers, num_samples=num_samples, sampling=rule, key=key)


def own(kind, row, num_tokens, *, dtype=torch.float32, changes=None):
    """What transformers' generate says, greedily, after one prompt."""
    attention = "eager" if kind in ("gemma2", "gpt_oss") else "sdpa"
    module = zoo.build(kind, attention=attention, dtype=dtype, **(changes or {}))
    made = module.generate(
        torch.from_numpy(row)[None],
        attention_mask=torch.ones(1, len(row), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return made[0, len(row) :].numpy()


def same(left, right):
    """Say whether two completions are one."""
    return (
        np.array_equal(left.tokens, right.tokens)
        and left.ended == right.ended
        and np.allclose(left.logprobs, right.logprobs, atol=1e-6)
        and np.allclose(left.kept, right.kept, atol=1e-6)
    )


def chain(following: dict[int, int]):
    """Make an engine on a model that says one token after another, whatever came before."""
    module = zoo.build("llama", hidden_size=64, tie_word_embeddings=False, dtype=torch.float32)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "layers" in name and "norm" not in name:
                p.zero_()
        module.model.norm.weight.fill_(1.0)
        module.model.embed_tokens.weight.copy_(torch.eye(zoo.VOCAB, 64))
        module.lm_head.weight.zero_()
        for token, then in following.items():
            module.lm_head.weight[then, token] = 1.0
    model, params = loading.bind(module)
    return sampling.Sampler(model), params
