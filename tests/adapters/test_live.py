"""Live bytes are counted exactly, and a step holds what `core.plan.memory` promises."""

import functools
import gc

import numpy as np
import pytest
import torch
import transformers

from adapters import live, loading, lora, shapes, tree_attention
from core import algorithms, head, optimizers, pack, steps
from core.plan import memory, sample

NODES = 384
WAYS = {
    "plain": {},
    "selective": {"checkpointing": "selective"},
    "full": {"checkpointing": True},
    "full, in chunks": {"checkpointing": True, "chunk": 48},
    "in chunks": {"chunk": 48},
}
# Many layers for their width, so that what they keep, one of them and gradients all tell.
CONFIG = transformers.LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=1024,
)  # fmt: skip
ADAMW = optimizers.adamw(rate=lambda done: 1e-3, max_norm=1.0)


def test_a_storage_counts_once_from_its_first_tensor_to_its_last():
    with live.Live() as found:
        one = torch.ones(1000)
        view = one.view(10, 100)
        assert found.now == 4000
        more = one + 1
        assert (found.now, found.peak) == (8000, 8000)
        del one
        gc.collect()
        assert found.now == 8000
        del view
        assert found.now == 4000
    del more
    assert (found.now, found.peak) == (0, 8000)


def test_weights_that_are_laid_out_to_draw_with_count_as_long_as_they_live():
    weight = torch.ones(64, 50)
    with live.Live([weight]) as found:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
        assert found.now == found.peak == 2 * 64 * 50 * 4
        del packed
        assert found.now == 64 * 50 * 4


def test_what_was_there_before_is_held_and_not_counted_as_made():
    there = torch.ones(500)
    assert live.peak_bytes(lambda: there.view(5, 100).sum(), [there]) == 4
    assert live.size([there, there[3:], torch.ones(1, dtype=torch.float64)]) == 2008


def bound(way, config=CONFIG, dtype=torch.float32):
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=tree_attention.NAME)
    modes = {
        "gradient_checkpointing": way.get("checkpointing", False),
        "feed_forward_chunk": way.get("chunk", 0),
    }
    return loading.bind(module.to(dtype), **modes)


def packs(number):
    """Return packs of one sequence each."""
    rows = [np.random.default_rng(i).integers(0, CONFIG.vocab_size, NODES) for i in range(number)]
    samples = [sample.Sample(tokens=row, trained=np.arange(NODES) > 0, unit=i) for i, row in enumerate(rows)]
    totals = pack.count(samples)
    return [pack.build([one], totals) for one in samples]


def most_in_a_pass(config, dtype, levers):
    """Return what forward, loss and backward are promised to take beside what is there between steps."""
    plan = memory.plan(shapes.shape(config, dtype), NODES, levers)
    held = {m: sum(parts[n] for n in parts if n not in memory.STATE) for m, parts in plan.items()}
    return max(bytes_ for moment, bytes_ in held.items() if moment != "update")


@pytest.mark.parametrize("name", WAYS)
def test_a_pass_holds_what_the_plan_says(name):
    model, params = bound(WAYS[name])
    counted = live.peak_bytes(
        lambda: steps.loss_and_grad(model, algorithms.sft, params, packs(1), 0), params.values()
    )
    levers = memory.Levers(one_pack=True, **WAYS[name])
    assert most_in_a_pass(CONFIG, torch.float32, levers) == pytest.approx(counted, rel=0.08)


@pytest.mark.parametrize("number", [1, 3])
def test_a_whole_step_holds_what_the_plan_says_gradients_of_earlier_packs_included(number):
    model, params = bound({"checkpointing": True})
    state = steps.init(params, ADAMW, algorithms.sft, key=0)
    there = [*params.values(), *state.optimizer.first.values(), *state.optimizer.second.values()]
    made = live.peak_bytes(
        lambda: steps.train_step(model, algorithms.sft, ADAMW, state, packs(number), donate=True), there
    )
    levers = memory.Levers(one_pack=number == 1, checkpointing=True)
    promised = memory.peak(shapes.shape(CONFIG, torch.float32), NODES, levers)
    assert promised == pytest.approx(made + live.size(there), rel=0.1)


class Largest(live.Live):
    """Notes the most numbers that one of the tensors that were made has."""

    most = 0

    def see(self, tensor):
        before = self.now
        super().see(tensor)
        if self.now > before:
            self.most = max(self.most, tensor.untyped_storage().nbytes() // tensor.itemsize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_beside_the_head_takes_what_the_plan_says_and_nothing_of_the_frozen_heads_size(
    dtype, monkeypatch
):
    # A vocabulary so large, and tiles so small, that the sum of the gradients by B tells.
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=1024,
    )  # fmt: skip
    tile = 1 << 18
    monkeypatch.setattr(head, "score", functools.partial(head.score, tile_bytes=tile))
    model, params = bound({"checkpointing": True}, config, dtype)
    settings = lora.Settings(rank=32, targets=("all-linear", "lm_head"))
    model, params = lora.attach(model, params, settings)
    found = Largest([*model.frozen.values(), *params.values()])
    before, found.most = found.now, 0
    with found:
        steps.loss_and_grad(model, algorithms.sft, params, packs(1), 0)
    assert found.most < config.vocab_size * config.hidden_size
    trained = lora.trained(model.module, settings)
    assert trained == lora.Trained(num=sum(p.numel() for p in params.values()), head_columns=32)
    levers = memory.Levers(
        one_pack=True,
        checkpointing=True,
        adapter=trained.num,
        head_columns=trained.head_columns,
        tile_bytes=tile,
    )
    assert most_in_a_pass(config, dtype, levers) == pytest.approx(found.peak - before, rel=0.08)


def test_the_plan_knows_the_heads_tiles():
    assert memory.Levers().tile_bytes == head.TILE_BYTES
