"""What runs in which dtype: products in bfloat16, everything that is summed in float32."""

import pytest
import torch

from adapters import loading
from core import algorithms, blocks, pack, steps
from tests.adapters import zoo


def cast(kind="llama", **options):
    """Bind a float32 model that runs under autocast."""
    return loading.bind(zoo.build(kind, dtype=torch.float32), autocast=torch.bfloat16, **options)


def built(**options):
    """Merge the rows into a pack of float32 columns."""
    samples = zoo.rows()
    return pack.build(samples, pack.count(samples), **options)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "gpt_oss", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"budget": 6}])
def test_autocast_follows_float64_as_bfloat16_parameters_do_and_its_gradients_are_float32(kind, options):
    want = zoo.alone(zoo.build(kind, attention="eager"), zoo.rows())
    distances = {}
    for name, bound in {
        "autocast": cast(kind),
        "bfloat16": loading.bind(zoo.build(kind, dtype=torch.bfloat16)),
    }.items():
        model, params = bound
        value, _, grads = model.pull_back(params, built(**options), 0, zoo.nll)
        assert value.dtype == torch.float32
        assert abs(value - want[0]) / want[0] < 0.02
        distances[name] = sum((grads[n].double() - g).norm() ** 2 for n, g in want[1].items()) ** 0.5
        if name == "autocast":
            assert {g.dtype for g in grads.values()} == {torch.float32}
    scale = sum(g.norm() ** 2 for g in want[1].values()) ** 0.5
    assert 0 < distances["autocast"] <= 1.5 * distances["bfloat16"] < 0.3 * scale


def test_under_autocast_the_loss_and_the_head_sum_in_float32():
    model, params = cast()
    seen = []

    def loss(scores):
        seen.append((scores.logprobs.dtype, torch.is_autocast_enabled("cpu")))
        one = torch.full((4, 4), 1.001)
        seen.append((one @ one).dtype)
        return zoo.nll(scores)

    model.pull_back(params, built(needs=("entropies",)), 0, loss)
    assert seen == [(torch.float32, False), torch.float32]


@pytest.mark.parametrize("cast_to", [None, torch.bfloat16])
def test_a_kernel_of_halves_serves_autocast_and_leaves_float32_to_the_dense_mask(cast_to, monkeypatch):
    came = []

    def forward(query, *rest):
        came.append(query.dtype)
        return blocks.HOST.forward(query, *rest)

    halves = blocks.HOST._replace(dtypes=(torch.bfloat16, torch.float16), forward=forward)
    monkeypatch.setattr(blocks, "KERNELS", {"cpu": halves})
    model, params = loading.bind(zoo.build("llama", dtype=torch.float32), autocast=cast_to)
    proved = set(came)
    came.clear()
    model.pull_back(params, built(), 0, zoo.nll)
    assert proved == set(came) == ({cast_to} if cast_to else set())


@pytest.mark.parametrize("options", [{}, {"budget": 6}])
def test_recomputing_layers_under_autocast_changes_no_bit(options):
    found = []
    for recompute in (False, True):
        model, params = cast(gradient_checkpointing=recompute)
        found.append(model.pull_back(params, built(**options), 0, zoo.nll)[2])
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_a_forest_under_autocast_is_its_sequences_alone():
    model, params = cast()
    together = model.predict(params, built(), None).logprobs
    alone = [model.predict(params, pack.build([s], pack.count([s])), None).logprobs for s in zoo.rows()]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0.05, atol=0.05)


def test_gradients_of_bfloat16_parameters_add_up_over_packs_and_pieces_in_float32():
    model, params = loading.bind(zoo.build("llama", dtype=torch.bfloat16))
    each = pack.build(zoo.rows(), pack.count(zoo.rows()), needs=algorithms.sft.watches)
    _, _, grads = steps.loss_and_grad(model, algorithms.sft, params, [each] * 3, 0)
    one = model.pull_back(params, each, 0, steps.objective(algorithms.sft, each.batch, {}))[2]
    assert {g.dtype for g in one.values()} == {torch.bfloat16}
    for n, g in grads.items():
        assert g.dtype == torch.float32
        assert torch.equal(g, one[n].float() + one[n].float() + one[n].float())
    cut = pack.build(zoo.rows(), pack.count(zoo.rows()), budget=4)
    assert len(cut.pieces) > 3
    pieced = model.pull_back(params, cut, 0, zoo.nll)[2]
    assert {g.dtype for g in pieced.values()} == {torch.float32}


def test_a_rotary_table_holds_300_positions_apart_in_bfloat16():
    model, params = loading.bind(zoo.build("llama", dtype=torch.bfloat16, max_position_embeddings=512))
    tokens = zoo.np.full(300, 5)
    row = zoo.sample.Sample(tokens=tokens, trained=zoo.np.arange(300) > 0)
    embedding = model.module.base_model.rotary_emb
    cos, sin = embedding(torch.zeros(1, 300, 8).float(), torch.arange(300)[None])
    assert len({tuple(v) for v in torch.cat([cos, sin], -1)[0].tolist()}) == 300
    wide, wide_params = loading.bind(zoo.build("llama", max_position_embeddings=512))
    got = model.predict(params, pack.build([row], pack.count([row])), None).logprobs.double()
    want = wide.predict(wide_params, zoo.packed([row]), None).logprobs
    assert (got - want).abs().max() < 0.3
