"""The optimizers are torch.optim's, as pure functions."""

import math

import pytest
import torch

from core import optimizers, record

RATES = [1e-2 * (1 - k / 200) for k in range(100)]


def params(dtype=torch.float64, seed=0):
    """A matrix, a bias and a scalar."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"weight": (4, 3), "bias": (4,), "gain": ()}
    return {n: torch.randn(s, generator=draw, dtype=torch.float64).to(dtype) for n, s in shapes.items()}


def rules(**options):
    """Both optimizers."""
    return {
        "adamw": optimizers.adamw(rate=RATES.__getitem__, weight_decay=0.1, **options),
        "sgd": optimizers.sgd(rate=RATES.__getitem__, **options),
    }


def run(optimizer, start, num_steps=5, *, donate=False):
    """Make updates with gradients drawn from the step."""
    values, state = start, optimizer.init(start)
    for k in range(num_steps):
        grads = params(next(iter(start.values())).dtype, seed=k + 1)
        values, state = optimizer.update(grads, state, values, rate=optimizer.rate(k), donate=donate)
    return values, state


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("max_norm", [0.0, 0.7])
def test_a_hundred_updates_are_those_of_torchs_adamw(dtype, max_norm):
    optimizer = optimizers.adamw(rate=RATES.__getitem__, weight_decay=0.1, max_norm=max_norm)
    got, _ = run(optimizer, params(dtype), 100)
    theirs = {n: p.clone().requires_grad_() for n, p in params(dtype).items()}
    decayed, spared = [theirs["weight"]], [theirs["bias"], theirs["gain"]]
    reference = torch.optim.AdamW(
        [{"params": decayed}, {"params": spared, "weight_decay": 0.0}], weight_decay=0.1
    )
    for k in range(100):
        for n, grad in params(dtype, seed=k + 1).items():
            theirs[n].grad = grad
        if max_norm:
            torch.nn.utils.clip_grad_norm_(theirs.values(), max_norm)
        for group in reference.param_groups:
            group["lr"] = RATES[k]
        reference.step()
    for n, p in theirs.items():
        torch.testing.assert_close(got[n], p.detach(), rtol=1e-6, atol=1e-6)


def test_norms_and_biases_do_not_decay():
    start = params()
    optimizer = optimizers.adamw(rate=lambda done: 0.5, weight_decay=0.1)
    zeros = {n: torch.zeros_like(p) for n, p in start.items()}
    new, _ = optimizer.update(zeros, optimizer.init(start), start, rate=0.5)
    torch.testing.assert_close(new["weight"], start["weight"] * 0.95)
    assert torch.equal(new["bias"], start["bias"])
    assert torch.equal(new["gain"], start["gain"])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("max_norm", [0.0, 0.7])
def test_donating_the_state_changes_no_bit(name, max_norm):
    optimizer = rules(max_norm=max_norm)[name]
    kept, given = (run(optimizer, params(), donate=donate) for donate in (False, True))
    for x, y in zip(record.tree.leaves(kept), record.tree.leaves(given), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_arguments_are_left_alone_unless_they_are_donated(name):
    optimizer = rules(max_norm=0.1)[name]
    start, grads = params(), params(seed=1)
    state = optimizer.init(start)
    before = record.tree.map(torch.clone, (grads, state, start))
    new, _ = optimizer.update(grads, state, start, rate=0.1)
    for x, y in zip(record.tree.leaves((grads, state, start)), record.tree.leaves(before), strict=True):
        assert torch.equal(x, y)
    assert not {p.data_ptr() for p in new.values()} & {p.data_ptr() for p in start.values()}
    donated, _ = optimizer.update(grads, state, start, rate=0.1, donate=True)
    assert {p.data_ptr() for p in donated.values()} == {p.data_ptr() for p in start.values()}


def test_gradients_are_scaled_down_together_and_never_up():
    optimizer = optimizers.sgd(rate=lambda done: 1.0, max_norm=2.5)
    zero = {"a": torch.zeros(1, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}

    def step(a, b):
        grads = {"a": torch.tensor([a], dtype=torch.float64), "b": torch.tensor([b], dtype=torch.float64)}
        new, _ = optimizer.update(grads, (), zero, rate=1.0)
        return [new["a"].item(), new["b"].item()]

    assert step(3.0, 4.0) == pytest.approx([-1.5, -2.0], abs=1e-6)
    assert step(0.3, 0.4) == pytest.approx([-0.3, -0.4], abs=1e-15)
    assert step(0.0, 0.0) == [0.0, 0.0]


def test_the_norm_is_over_all_gradients_as_one_vector_in_float32_or_better():
    grads = {"a": torch.full((3,), 1.0), "b": torch.full((1,), 1.0)}
    assert optimizers.global_norm(grads).item() == 2.0
    many = {"a": torch.full((4096,), 1.0, dtype=torch.bfloat16)}
    assert optimizers.global_norm(many).item() == 64.0
    assert optimizers.global_norm(many).dtype == torch.float32


def test_a_gradient_that_is_not_finite_is_seen_in_the_norm():
    assert math.isnan(optimizers.global_norm({"a": torch.tensor([1.0, math.nan])}).item())


def test_five_micro_batches_accumulated_by_two_make_three_updates():
    optimizer = optimizers.sgd(rate=lambda done: 1.0)
    values, micro, updates = {"a": torch.zeros(())}, [1.0] * 5, 0
    for start in range(0, 5, 2):
        part = micro[start : start + 2]
        grads = {"a": torch.tensor(sum(part) / len(part))}
        values, _ = optimizer.update(grads, (), values, rate=1.0)
        updates += 1
    assert (updates, values["a"].item()) == (3, -3.0)


def narrow(seed=0):
    """Parameters in bfloat16, but for one."""
    return {n: p if n == "gain" else p.bfloat16() for n, p in params(torch.float32, seed=seed).items()}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("max_norm", [0.0, 0.7])
def test_masters_take_the_steps_of_float32_and_parameters_are_their_roundings(name, max_norm):
    rule = rules(max_norm=max_norm)[name]
    optimizer = optimizers.with_masters(rule)
    start, wide = narrow(), {n: p.float() for n, p in narrow().items()}
    values, state, want, kept = start, optimizer.init(start), wide, rule.init(wide)
    for k in range(20):
        grads = params(torch.float32, seed=k + 1)
        values, state = optimizer.update(grads, state, values, rate=1e-3)
        want, kept = rule.update(grads, kept, want, rate=1e-3)
    assert set(state.masters) == {"weight", "bias"}
    for n, p in values.items():
        assert p.dtype == start[n].dtype
        assert torch.equal(state.masters.get(n, p), want[n])
        assert torch.equal(p, want[n].to(p.dtype))


def test_a_step_below_half_a_unit_of_bfloat16_is_lost_without_masters_and_adds_up_with_them():
    start, grads = {"a": torch.ones(8, dtype=torch.bfloat16)}, {"a": torch.ones(8)}
    plain = optimizers.sgd(rate=lambda done: 1e-3)
    values, state = start, optimizers.with_masters(plain).init(start)
    lost = start
    for _ in range(100):
        values, state = optimizers.with_masters(plain).update(grads, state, values, rate=1e-3)
        lost, _ = plain.update({"a": grads["a"].bfloat16()}, (), lost, rate=1e-3)
    assert torch.equal(lost["a"], start["a"])
    torch.testing.assert_close(values["a"].float(), torch.full((8,), 0.9), rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_masters_leave_arguments_alone_unless_donated_and_then_reuse_their_memory(name):
    optimizer = optimizers.with_masters(rules(max_norm=0.1)[name])
    kept, given = (run(optimizer, narrow(), donate=donate) for donate in (False, True))
    for x, y in zip(record.tree.leaves(kept), record.tree.leaves(given), strict=True):
        assert torch.equal(x, y)
    start, grads = narrow(), params(torch.float32, seed=1)
    state = optimizer.init(start)
    before = record.tree.map(torch.clone, (grads, state, start))
    optimizer.update(grads, state, start, rate=0.1)
    for x, y in zip(record.tree.leaves((grads, state, start)), record.tree.leaves(before), strict=True):
        assert torch.equal(x, y)
    donated, after = optimizer.update(grads, state, start, rate=0.1, donate=True)
    assert {p.data_ptr() for p in donated.values()} == {p.data_ptr() for p in start.values()}
    assert all(after.masters[n].data_ptr() == state.masters[n].data_ptr() for n in after.masters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masters_change_nothing_of_what_is_wide(dtype):
    rule = rules()["adamw"]
    one, other = (run(optimizer, params(dtype)) for optimizer in (rule, optimizers.with_masters(rule)))
    assert record.tree.structure(one) == record.tree.structure(other)
    assert all(torch.equal(x, y) for x, y in zip(*map(record.tree.leaves, (one, other)), strict=True))


def test_adamw_refuses_numbers_with_which_it_cannot_work():
    with pytest.raises(ValueError, match=r"beta2 is 1\.0; a number from 0 up to but not 1"):
        optimizers.adamw(rate=lambda done: 1.0, beta2=1.0)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_steps_in_float32_on_narrow_parameters_are_refused_and_not_rounded_away(name):
    rule, given = rules()[name], narrow()
    wide = {name: p.float() for name, p in given.items()}
    with pytest.raises(ValueError, match=rf"{name}: .* gradient torch\.float32; wrap .* with_masters"):
        rule.update(wide, rule.init(given), given, rate=1.0)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("wrap", [lambda rule: rule, optimizers.with_masters])
def test_a_norm_that_is_known_is_not_measured_again(name, wrap):
    asked = []

    def norm(grads):
        asked.append(len(grads))
        return optimizers.global_norm(grads)

    optimizer = wrap(rules(max_norm=0.1, norm=norm)[name])
    start, grads = narrow() if wrap is optimizers.with_masters else params(), params(seed=1)
    if wrap is optimizers.with_masters:
        grads = {n: g.float() for n, g in grads.items()}
    state = optimizer.init(start)
    measured, _ = optimizer.update(grads, state, start, rate=0.1)
    told, _ = optimizer.update(grads, state, start, rate=0.1, norm=optimizers.global_norm(grads))
    assert asked == [3]
    assert all(torch.equal(measured[n], p) for n, p in told.items())


def turned(values):
    """The same numbers in memory that runs along the other axis."""
    return values.T.contiguous().T


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("which", ["parameter", "gradient", "both"])
def test_how_a_parameter_or_a_gradient_lies_in_memory_changes_no_bit(name, which):
    rule = rules()[name]
    start, grad = torch.arange(24.0).reshape(4, 6), torch.arange(24.0).reshape(4, 6) - 11.5
    plain, _ = rule.update({"a": grad}, rule.init({"a": start}), {"a": start}, rate=0.1)
    start = start if which == "gradient" else turned(start)
    grad = grad if which == "parameter" else turned(grad)
    got, _ = rule.update({"a": grad}, rule.init({"a": start}), {"a": start}, rate=0.1)
    assert torch.equal(got["a"], plain["a"])


def test_a_view_with_gaps_is_updated_as_what_it_shows_and_the_rest_is_left_alone():
    held, rule = torch.ones(4, 6), rules()["adamw"]
    start, grad = held[:, ::2], torch.arange(12.0).reshape(4, 3) - 5.5
    plain, _ = rule.update({"a": grad}, rule.init({"a": start.clone()}), {"a": start.clone()}, rate=0.1)
    got, _ = rule.update({"a": grad}, rule.init({"a": start}), {"a": start}, rate=0.1, donate=True)
    assert torch.equal(got["a"], plain["a"])
    assert bool((held[:, 1::2] == 1.0).all())
