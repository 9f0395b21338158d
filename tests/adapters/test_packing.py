"""Packed weights multiply as the plain ones do and are plain tensors to everything else."""

import pytest
import torch

from adapters import loading, packing
from tests.adapters import zoo

if not torch.backends.mkldnn.is_available():
    pytest.skip("torch was built without oneDNN", allow_module_level=True)


def both(kind="llama", dtype=torch.float32, max_bytes=1 << 30):
    model, params = loading.bind(zoo.build(kind, dtype=dtype))
    return model, params, packing.packed(model, params, rows=3, max_bytes=max_bytes)


def names(found):
    return {n for n, p in found.items() if isinstance(p, packing.Packed)}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "opt"])
def test_a_packed_model_gives_the_same_scores(kind):
    model, params, found = both(kind)
    plain, fast = (model.predict(p, zoo.packed(zoo.rows()), None).logprobs for p in (params, found))
    assert names(found)
    assert type(fast) is torch.Tensor
    assert torch.allclose(plain, fast, atol=1e-5)


def test_only_weights_of_linear_layers_are_packed():
    _, params, found = both()
    assert found.keys() == params.keys()
    # The embedding is the head's weight, too.
    assert names(found) == {n for n in params if "proj" in n or "embed" in n}


def test_a_packed_weight_shares_the_memory_of_the_plain_one_and_is_it_to_other_functions():
    _, params, found = both()
    name = "model.embed_tokens.weight"
    assert found[name].data_ptr() == params[name].data_ptr()
    ids = torch.tensor([3, 5])
    assert torch.equal(torch.nn.functional.embedding(ids, found[name]), params[name][ids])
    assert type(found[name] * 2) is torch.Tensor


def test_copies_stay_under_their_bound():
    _, params, found = both(max_bytes=0)
    assert not names(found)
    assert all(found[n] is p for n, p in params.items())
    some = both(max_bytes=4000)[2]
    assert 0 < sum(some[n].nbytes for n in names(some)) <= 4000


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_stay_plain(dtype):
    assert not names(both(dtype=dtype)[2])
