"""Signatures are told apart as a compiler of operators would, on any device and in backward too."""

import numpy as np
import torch
import transformers

from adapters import loading, signatures, tree_attention
from core import pack, padded
from core.plan import sample, sizes

PLANNED = sizes.Sizes(nodes=(48,), edges=(48,))
LENGTHS = (30, 33, 41, 30, 46)


def new(builds):
    """Return how many signatures each step brings."""
    torch.manual_seed(0)
    described = transformers.LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    module = transformers.AutoModelForCausalLM.from_config(
        described, dtype=torch.float32, attn_implementation=tree_attention.NAME
    )
    model, params = loading.bind(module, attention="mask")
    counted, found = signatures.Signatures(), []
    for length in LENGTHS:
        draw = np.random.default_rng(length)
        samples = [sample.Sample(tokens=draw.integers(0, 11, length), trained=np.arange(length) > 0)]
        each = builds(samples)
        before = len(counted.seen)
        with counted:
            model.pull_back(params, each, 0, lambda scores: (scores.logprobs.sum(), {}))
        found.append(len(counted.seen) - before)
    return found


def test_each_length_brings_new_ones():
    found = new(lambda samples: pack.build(samples, pack.count(samples)))
    assert all(count > 0 for count in found[:3])
    assert found[3] == 0
    assert found[4] > 0


def test_after_the_first_step_of_a_size_only_the_host_sees_new_ones():
    counted = new(lambda samples: padded.build(samples, pack.count(samples), planned=PLANNED, budget=48))
    plain = new(lambda samples: pack.build(samples, pack.count(samples)))
    # The table on the host keeps its true size: a handful of small operators against those of the model.
    assert all(count <= plain[1] // 4 for count in counted[1:])


def test_numbers_are_no_part_of_a_signature_and_backward_is_counted():
    counted = signatures.Signatures()
    rows = torch.ones(4, requires_grad=True)
    with counted:
        for factor in (2.0, 3.0):
            (rows * factor).sum().backward()
    once = len(counted.seen)
    with counted:
        (rows * 4.0).sum().backward()
    assert len(counted.seen) == once >= 3
