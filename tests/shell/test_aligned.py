"""Parameters lie where an allocator puts them, at the start and after a stop: by it products round."""

import torch

from core import steps
from shell import checkpoint, choose, references, states
from tests.shell import runs


def shifted(tensor):
    """Return a copy that begins a number after where an allocator would let it begin."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return room[1:].view(tensor.shape).copy_(tensor)


def begins(tensors):
    """Return where within a line of the cache tensors begin."""
    return {tensor.data_ptr() % 64 for tensor in tensors.values()}


def test_only_what_lies_between_lines_is_copied():
    kept, odd = torch.arange(5.0), shifted(torch.arange(7.0))
    found = states.aligned({"kept": kept, "odd": odd})
    assert found["kept"] is kept
    assert torch.equal(found["odd"], odd)
    assert (begins({"odd": odd}), begins(found)) == ({4}, {0})


def test_a_checkpoint_comes_back_at_the_addresses_of_an_allocator(tmp_path):
    tensors = {f"params/{size}": torch.arange(float(size)) for size in range(1, 40)}
    checkpoint.save(tmp_path, 1, tensors, {})
    assert begins(checkpoint.load(tmp_path / "checkpoint-1").tensors) == {0}


def test_a_run_begins_at_the_addresses_of_an_allocator_wherever_its_weights_lay(tmp_path, monkeypatch):
    load, init, seen = choose.model, steps.init, []

    def odd(*args, **named):
        model, params = load(*args, **named)
        return model, {name: shifted(param) for name, param in params.items()}

    monkeypatch.setattr(choose, "model", odd)
    monkeypatch.setattr(
        steps, "init", lambda params, *a, **n: seen.append(begins(params)) or init(params, *a, **n)
    )
    runs.made(tmp_path / "out", max_steps=1)
    assert seen == [{0}]


def test_a_reference_that_moves_does_so_where_it_would_after_a_stop():
    made = references.Reference(params={"w": shifted(torch.ones(3))}, fingerprint="")
    assert begins(references.moving(made).params) == {0}
