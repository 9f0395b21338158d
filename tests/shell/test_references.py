"""What a policy is compared with: a reference that follows it, one that was asked once for all, or none."""

import json
import shutil
import signal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core import steps as verbs
from shell import aside, cached, checkpoint, config, loop, mistake, references, scored
from tests import warm
from tests.shell import runs, words
from tests.shell.test_train_preference import BOTH

SYNCED: dict[str, Any] = {"sync_ref_model": True, "ref_model_mixup_alpha": 0.3, "ref_model_sync_steps": 2}
CACHED: dict[str, Any] = {"precompute_ref_log_probs": True}
PROMPTS = {
    "dataset": "task:letters", "dataset_split": "train[:6]", "batch_size": 4, "num_generations": 2,
    "max_completion_length": 4, "max_length": "null", "beta": 0.1, "reward_funcs": "length",
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    return {name: words.write(folder / f"{name}.jsonl", rows) for name, rows in BOTH.items()}


def asked(files, algorithm: str = "dpo", **more: Any) -> dict[str, Any]:
    """Return the options of a small run."""
    if algorithm in ("grpo", "rloo"):
        return {"algorithm": algorithm, "max_steps": 4, **PROMPTS, **more}
    rows = {"dataset": files[algorithm], "dataset_split": "train", "max_length": 96}
    return {"algorithm": algorithm, **rows, "batch_size": 4, "max_steps": 4, **more}


def held(folder, step):
    """Return the policy and the reference that a checkpoint holds."""
    tensors = checkpoint.load(folder / f"checkpoint-{step}").tensors
    return tuple(
        {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        for prefix in ("params/", references.PREFIX)
    )


@given(st.floats(0, 1), st.booleans())
def test_a_reference_moves_its_part_of_the_way(alpha, donate):
    draw = torch.Generator().manual_seed(0)
    old, new = ({"w": torch.randn(3, 2, generator=draw, dtype=torch.float64)} for _ in range(2))
    want = alpha * new["w"] + (1 - alpha) * old["w"]
    before = old["w"].clone()
    found = verbs.synced(old, new, alpha=alpha, donate=donate)["w"]
    torch.testing.assert_close(found, want, rtol=1e-14, atol=1e-14)
    assert (found.data_ptr() == old["w"].data_ptr()) == donate
    assert donate or torch.equal(old["w"], before)


def test_all_the_way_is_the_policy_to_the_bit_and_none_of_it_the_reference():
    old, new = {"w": torch.tensor([0.1, 3.0])}, {"w": torch.tensor([0.7, -2.0])}
    assert torch.equal(verbs.synced(old, new, alpha=1.0)["w"], new["w"])
    assert torch.equal(verbs.synced(old, new, alpha=0.0)["w"], old["w"])
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        verbs.synced(old, new, alpha=1.1)


def test_a_reference_in_a_narrow_type_is_refused_where_it_would_stand_still():
    old, new = {"w": torch.ones(2, dtype=torch.bfloat16)}, {"w": torch.full((2,), 1.25, dtype=torch.bfloat16)}
    assert torch.equal(verbs.synced(old, new, alpha=1.0)["w"], new["w"])
    with pytest.raises(ValueError, match=r"reference w is torch\.bfloat16, .* hold it in float32"):
        verbs.synced(old, new, alpha=0.01)
    wide = {"w": old["w"].float()}
    for _ in range(500):
        wide = verbs.synced(wide, new, alpha=0.01)
    torch.testing.assert_close(wide["w"], torch.full((2,), 1.25 - 0.25 * 0.99**500))


def test_a_reference_of_a_narrow_model_moves_in_float32_and_goes_on_to_the_same_bits(tmp_path, files):
    small = {"sync_ref_model": True, "ref_model_mixup_alpha": 1e-3, "ref_model_sync_steps": 1}
    plan = asked(files, save_steps=1, dtype="bfloat16", learning_rate=1e-2, **small)
    folder = runs.made(tmp_path / "out", **plan)
    for step in (2, 3, 4):
        (policy, now), (_, before) = held(folder, step), held(folder, step - 1)
        for name, reference in now.items():
            assert reference.dtype == torch.float32
            assert torch.equal(reference, before[name].lerp(policy[name].float(), 1e-3))
    assert any(not torch.equal(now[n], before[n]) for n in now)
    wanted = held(folder, 4)
    shutil.rmtree(folder / "checkpoint-4")
    runs.made(folder, **plan)
    for one, two in zip(held(folder, 4), wanted, strict=True):
        assert all(torch.equal(one[n], two[n]) for n in two)


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "grpo", "rloo"])
def test_a_synced_reference_follows_the_policy_at_its_steps_and_is_in_the_checkpoint(
    tmp_path, files, algorithm
):
    folder = runs.made(tmp_path / "out", **asked(files, algorithm, save_steps=1, **SYNCED))
    (start, first), *_ = [held(folder, step) for step in (1,)]
    assert first.keys() == start.keys()
    policies, followed = zip(*(held(folder, step) for step in (1, 2, 3, 4)), strict=True)
    for name, reference in first.items():
        second = reference.lerp(policies[1][name], 0.3)
        assert torch.equal(followed[1][name], second)
        assert torch.equal(followed[2][name], second)
        assert torch.equal(followed[3][name], second.lerp(policies[3][name], 0.3))
    moved = [n for n in first if not torch.equal(followed[1][n], first[n])]
    assert moved


def test_a_reference_that_moves_all_the_way_each_step_leaves_every_step_at_equality(tmp_path, files):
    more = {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 1}
    lines = runs.metrics(runs.made(tmp_path / "out", **asked(files, **more)))
    assert [line["loss"] for line in lines] == [pytest.approx(np.log(2), abs=1e-6)] * 4
    frozen = runs.metrics(runs.made(tmp_path / "frozen", **asked(files)))
    assert frozen[-1]["loss"] != pytest.approx(np.log(2), abs=1e-3)


def test_a_frozen_reference_is_not_in_the_checkpoint(tmp_path, files):
    folder = runs.made(tmp_path / "out", **asked(files, max_steps=1))
    assert held(folder, 1)[1] == {}


@pytest.mark.parametrize("algorithm", ["dpo", "rloo"])
def test_a_run_with_a_synced_reference_that_is_killed_ends_like_one_that_is_not(tmp_path, files, algorithm):
    more = {"max_steps": 8, "logging_steps": 3, "steps_per_generation": 2} if algorithm == "rloo" else {}
    plan = asked(files, algorithm, **SYNCED, **{"max_steps": 8, "logging_steps": 3, **more})
    options = json.dumps({name: str(value) for name, value in plan.items()} | {"max_steps": 8})
    code, out, err = warm.program(
        "tests.shell.killed", str(tmp_path), "4", "lines=3", "saves=1", OPTIONS=options
    )
    assert code == 0, err
    assert out.split() == ["lines", "3", "saves", "1"]


def test_a_synced_reference_goes_on_when_what_it_began_as_is_gone(tmp_path, files):
    source = tmp_path / "source"
    shutil.copytree(runs.made(tmp_path / "first", **asked(files, max_steps=1)) / "model", source)
    plan = asked(files, init_from=source, save_steps=1, **SYNCED)
    runs.made(tmp_path / "straight", **plan)
    runs.made(tmp_path / "out", **plan)
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    shutil.rmtree(source)
    runs.made(tmp_path / "out", **plan)
    runs.same(tmp_path / "straight", tmp_path / "out", 4)


def test_a_checkpoint_that_lacks_the_synced_reference_is_no_place_to_go_on_from():
    chosen = config.from_values(
        "dpo", {"model": "tiny", "dataset": "demo", "output_dir": "x", "sync_ref_model": True}
    ).options
    with pytest.raises(KeyError):
        references.join({"w": torch.ones(1)}, {}, chosen)


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("dpo", {"loss_type": "ipo"}),
        ("dpo", {"loss_type": "aot", "eval_dataset": "rows", "eval_steps": 2}),
        ("kto", {"loss_type": "apo_zero_unpaired"}),
    ],
)
def test_a_reference_that_was_asked_once_gives_what_one_beside_the_policy_gives(
    tmp_path, files, algorithm, more
):
    if "eval_dataset" in more:
        more |= {"eval_dataset": files[algorithm], "eval_split": "train"}
    plan = asked(files, algorithm, dtype="float64", **more)
    plain, kept = (runs.made(tmp_path / str(i), **plan, **extra) for i, extra in enumerate(({}, CACHED)))
    assert runs.apart(runs.weights(kept), runs.weights(plain)) <= 1e-12
    one, other = (runs.metrics(folder, *runs.PLANNED) for folder in (plain, kept))
    assert other == [
        {name: pytest.approx(value, rel=1e-9, abs=1e-9) for name, value in line.items()} for line in one
    ]


def test_in_the_first_epoch_they_are_the_same_to_the_bit(tmp_path, files):
    plan = asked(files, max_steps=2, token_budget=300, eval_dataset=files["dpo"], eval_split="train")
    plain, kept = (runs.made(tmp_path / str(i), **plan, **extra) for i, extra in enumerate(({}, CACHED)))
    runs.same(plain, kept, 2)


def test_while_it_trains_no_reference_is_held(tmp_path, files, monkeypatch):
    seen = []
    train = loop.train
    monkeypatch.setattr(
        loop, "train", lambda job, run, *more: seen.append((job, run)) or train(job, run, *more)
    )
    runs.made(tmp_path / "out", **asked(files, max_steps=1, **CACHED))
    ((job, run),) = seen
    assert job.frozen is None
    assert run.reference is None
    (row, *_) = job.rows.rows.samples(0)
    assert (row.columns["reference_logprobs"][row.trained] < 0).all()


def counted(monkeypatch):
    """Count the batches that are scored for a cache."""
    calls, made = [], scored.logprobs
    monkeypatch.setattr(scored, "logprobs", lambda *args, **more: calls.append(1) or made(*args, **more))
    return calls


def test_the_next_start_finds_what_the_reference_said_and_goes_on_to_the_same_bits(
    tmp_path, files, monkeypatch
):
    plan = asked(files, save_steps=2, **CACHED)
    whole = runs.made(tmp_path / "whole", **plan)
    made = verbs.train_step

    def train_step(model, algorithm, optimizer, state, *args, **more):
        if state.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return made(model, algorithm, optimizer, state, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(verbs, "train_step", train_step)
        assert runs.run(tmp_path / "out", **plan) == 143
    calls = counted(monkeypatch)
    runs.made(tmp_path / "out", **plan)
    assert not calls
    runs.same(whole, tmp_path / "out", 4)


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_a_cache_that_is_gone_or_damaged_is_made_again(tmp_path, files, monkeypatch, damage):
    plan = asked(files, save_steps=2, **CACHED)
    folder = runs.made(tmp_path / "out", **plan)
    whole = runs.weights(folder)
    (file,) = (folder / "prepared").glob(f"reference-*/{cached.FILE}")
    if damage == "gone":
        shutil.rmtree(file.parent)
    else:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    shutil.rmtree(folder / "checkpoint-4")
    calls = counted(monkeypatch)
    runs.made(folder, **plan)
    assert calls
    assert runs.apart(runs.weights(folder), whole) == 0.0
    assert aside.whole(file.parent) is not None


def test_a_cache_is_found_by_weights_rows_and_settings(tmp_path, files):
    def keys(folder):
        return {path.name for path in (folder / "prepared").glob("reference-*")}

    ways = [{}, {"seed": 7}, {"dtype": "float64"}, {"max_length": 40}, {"packing": "none"}, {"batch_size": 2}]
    found = [keys(runs.made(tmp_path / str(i), **asked(files, **{**CACHED, "max_steps": 1, **way})))
             for i, way in enumerate(ways)]  # fmt: skip
    assert all(len(names) == 1 for names in found)
    assert len(set().union(*found)) == len(ways)
    again = keys(
        runs.made(tmp_path / "again", **asked(files, **{**CACHED, "max_steps": 1, "learning_rate": 1}))
    )
    assert again == found[0]


def test_a_cache_holds_no_pickle(tmp_path, files):
    folder = runs.made(tmp_path / "out", **asked(files, max_steps=1, **CACHED))
    (file,) = (folder / "prepared").glob(f"reference-*/{cached.FILE}")
    assert np.load(file, allow_pickle=False).dtype == np.float32
    assert {path.name for path in file.parent.iterdir()} == {cached.FILE, aside.ABOUT}


def test_two_ranks_ask_the_reference_together(tmp_path, files):
    plan = asked(files, max_steps=2, **CACHED)
    alone = runs.made(tmp_path / "alone", **plan)
    told = {str(tmp_path / "together"): {name: str(value) for name, value in plan.items()}}
    (tmp_path / "plan.json").write_text(json.dumps(told))
    code, _, err = warm.program("tests.shell.ranked", str(tmp_path / "plan.json"), ranks=2)
    assert code == 0, err
    assert runs.apart(runs.weights(tmp_path / "together"), runs.weights(alone)) < 1e-5


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("grpo", {"beta": 0.0}),
        ("rloo", {"beta": 0.0}),
        ("dpo", {"loss_type": "sft"}),
        ("dpo", {"loss_type": "orpo"}),
        ("dpo", {"loss_type": "[cpo, simpo]", "beta": 0.1}),
        ("reward", {}),
    ],
)
def test_no_reference_is_loaded_where_nothing_is_compared_with_one(
    tmp_path, files, algorithm, more, monkeypatch
):
    monkeypatch.setattr("shell.references.of", None)
    monkeypatch.setattr("core.steps.with_reference", lambda model, algorithm, params, packs: packs)
    runs.made(tmp_path / "out", **{**asked(files, algorithm, max_steps=1), **more})


@pytest.mark.parametrize(
    ("algorithm", "words_", "told"),
    [
        ("dpo", "--sync_ref_model --loss_type simpo", "compares with no reference"),
        ("grpo", "--sync_ref_model", "compares with no reference"),
        ("dpo", "--precompute_ref_log_probs --loss_type orpo", "compares with no reference"),
        ("dpo", "--ref_model_mixup_alpha 0.3", "the reference stays; set sync_ref_model"),
        ("kto", "--ref_model_sync_steps 3", "the reference stays; set sync_ref_model"),
        ("dpo", "--sync_ref_model --ref_model_mixup_alpha 0", "above 0"),
        ("dpo", "--sync_ref_model --precompute_ref_log_probs", "sync_ref_model moves the reference"),
        ("dpo", "--precompute_ref_log_probs --streaming --max_steps 2", "a stream's rows are not known"),
        ("kto", "--precompute_ref_log_probs", "apo_zero_unpaired does not"),
        ("grpo", "--precompute_ref_log_probs --beta 0.1", "not read by grpo"),
        ("sft", "--sync_ref_model", "not read by sft"),
    ],
)
def test_a_reference_that_cannot_be_is_refused_by_name(algorithm, words_, told):
    line = ["--model", "tiny", "--dataset", "demo", "--output_dir", "x", *words_.split()]
    with pytest.raises(mistake.Mistake, match=told):
        config.parse([algorithm, *line])


def test_the_defaults_of_a_synced_reference_are_those_of_other_peoples_files():
    chosen = config.from_values("dpo", {"model": "tiny", "dataset": "demo", "output_dir": "x"}).options
    assert (chosen.ref_model_mixup_alpha, chosen.ref_model_sync_steps) == (0.6, 512)
    assert (chosen.sync_ref_model, chosen.precompute_ref_log_probs) == (False, False)
