"""The emulated device computes what the CPU does, counts honestly, and refuses what Trainium refuses."""

import pytest
import torch
from torch.nn import functional

from tests.devices import emulated


def _network(device):
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    return made.to(device)


def _gradients(device):
    network = _network(device)
    rows = torch.linspace(-1, 1, 32).view(4, 8).to(device)
    with torch.autocast(device, torch.bfloat16):
        network(rows).float().square().sum().backward()
    return [p.grad.cpu().flatten().tolist() for p in network.parameters()]


def _both():
    return _gradients("cpu"), _gradients("neuron")


def test_gradients_are_those_of_the_cpu():
    here, there = emulated.run(_both)
    torch.testing.assert_close(
        [torch.tensor(g) for g in there], [torch.tensor(g) for g in here], rtol=1e-6, atol=1e-6
    )


def _eager(lengths):
    network, new = _network("neuron"), []
    for length in lengths:
        before = len(emulated.counts()["signatures"])
        network(torch.ones(length, 8).to("neuron"))
        new.append(len(emulated.counts()["signatures"]) - before)
    return new


def test_a_shape_seen_before_adds_no_signature():
    first, again, other = emulated.run(_eager, [4, 4, 5])
    assert again == 0 < other <= first


def _compiled(lengths, dynamic):
    network = torch.compile(_network("neuron"), backend="neuron", dynamic=dynamic)
    emulated.forget()
    for length in lengths:
        network(torch.ones(length, 8, device="neuron", requires_grad=True)).sum().backward()
    counted = emulated.counts()
    inside = [name for name in counted["signatures"] if name.startswith("aten::addmm")]
    return counted["forward"], counted["backward"], [g["pass"] for g in counted["graphs"]], inside


def test_each_length_compiles_forward_and_backward_apart_and_nothing_in_a_graph_counts_as_eager():
    forward, backward, passes, inside = emulated.run(_compiled, [4, 5, 4], False)
    assert (forward, backward) == (2, 2)
    assert passes == ["forward", "backward"] * 2
    assert inside == []


def _refused(problem):
    try:
        problem()
    except Exception as error:
        return str(error)
    return ""


def _symbolic():
    return _refused(lambda: _compiled([4, 5], True)), _refused(lambda: _compiled([4, 5], None))


@pytest.mark.parametrize("dynamic", [0, 1])
def test_symbolic_shapes_are_refused(dynamic):
    assert "static shapes only" in emulated.run(_symbolic)[dynamic]


def _attention(dtypes):
    def attend(query, key, value):
        return functional.scaled_dot_product_attention(query, key, value)

    parts = [torch.ones(1, 2, 4, 8, dtype=getattr(torch, name), device="neuron") for name in dtypes]
    with torch.autocast("neuron", torch.bfloat16):
        return _refused(lambda: torch.compile(attend, backend="neuron", dynamic=False)(*parts))


def test_attention_of_mixed_dtypes_is_refused_and_of_one_dtype_is_not():
    assert "one dtype were wanted" in emulated.run(_attention, ["float32", "float32", "bfloat16"])
    assert emulated.run(_attention, ["float32"] * 3) == ""


def _mode():
    tuned = torch.compile(torch.relu, backend="neuron", dynamic=False, mode="max-autotune")
    return _refused(lambda: tuned(torch.ones(1, 8, device="neuron")))


def test_no_mode_but_the_default_is_taken():
    assert "with mode 'default' only" in emulated.run(_mode)


def test_a_command_finds_the_device_and_leaves_its_counts():
    code = (
        "import torch_neuronx, torch\n"
        "print(torch.accelerator.current_accelerator(check_available=True))\n"
        "torch.compile(torch.relu, backend='neuron', dynamic=False)(torch.ones(3, device='neuron'))\n"
    )
    done = emulated.command("-c", code)
    assert (done.status, done.out) == (0, "neuron\n"), done.err
    assert (done.counts["forward"], done.counts["backward"]) == (1, 0)


def test_this_process_never_gets_the_device():
    emulated.package()
    with pytest.raises(RuntimeError):
        torch.device("neuron")
