"""Precision from end to end: bfloat16 parameters with float32 masters, and float32 ones under autocast."""

import json

import pytest
import safetensors.torch
import torch
import transformers

from shell import checkpoint, config, mistake
from tests import warm
from tests.shell import runs

DRAWN = {
    "algorithm": "grpo", "dataset": "task:letters", "dataset_split": "train[:6]", "batch_size": 4,
    "num_generations": 2, "max_completion_length": 6, "max_length": "null", "beta": 0.1,
    "reward_funcs": "tests.shell.words:spread",
}  # fmt: skip
HALVES = {"masters": {"dtype": "bfloat16"}, "autocast": {"bf16": True}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Six steps in each precision."""
    root = tmp_path_factory.mktemp("precision")
    plans = {**HALVES, "float32": {}}
    return {name: runs.made(root / name, **options, max_steps=6) for name, options in plans.items()}


def test_bfloat16_runs_follow_float32_from_the_first_step(made):
    want = runs.metrics(made["float32"])
    for name in HALVES:
        got = runs.metrics(made[name])
        for one, other in zip(got, want, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=5e-3), name
            assert one["loss"] != other["loss"], name


def test_a_checkpoint_holds_masters_of_which_the_parameters_are_roundings(made):
    tensors = checkpoint.load(made["masters"] / "checkpoint-6").tensors
    names = [path.removeprefix("params/") for path in tensors if path.startswith("params/")]
    moved = 0
    for name in names:
        master, param = tensors[f"optimizer/masters/{name}"], tensors[f"params/{name}"]
        assert (master.dtype, param.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(master.bfloat16(), param)
        assert tensors[f"optimizer/rule/first/{name}"].dtype == torch.float32
        moved += int((master != param).sum())
    assert moved > 0
    assert {t.dtype for t in runs.weights(made["masters"]).values()} == {torch.bfloat16}


def test_autocast_leaves_parameters_and_state_in_float32(made):
    tensors = checkpoint.load(made["autocast"] / "checkpoint-6").tensors
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    assert not [path for path in tensors if "masters" in path]


@pytest.mark.parametrize("name", HALVES)
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_is_not(tmp_path, name):
    told = json.dumps({**HALVES[name], "max_steps": 8})
    code, out, err = warm.program(
        "tests.shell.killed", str(tmp_path), "1", "lines=2", "saves=2", OPTIONS=told
    )
    assert code == 0, err
    assert out.split() == ["lines", "2", "saves", "2"]


@pytest.mark.parametrize(
    "more", [{"dtype": "bfloat16"}, {"bf16": True}, {"dtype": "bfloat16", "use_peft": True}]
)
def test_rewards_are_learned_from_in_bfloat16_and_the_generator_agrees(tmp_path, more):
    folder = runs.made(tmp_path / "out", **DRAWN, **more, max_steps=3, num_iterations=2)
    for line in runs.metrics(folder):
        # Completions are drawn and scored in other orders of the same bfloat16 sums.
        assert line["sampling/sampling_logp_difference/mean"] < 0.02
        assert line["grad_norm"] > 0


@pytest.mark.parametrize("more", HALVES.values(), ids=HALVES)
def test_recomputation_and_pieces_train_as_well(tmp_path, more):
    plain = runs.made(tmp_path / "plain", **more, max_steps=3)
    for number, how in enumerate(({"gradient_checkpointing": True}, {"token_budget": 40})):
        folder = runs.made(tmp_path / str(number), **more, **how, max_steps=3)
        for one, other in zip(runs.metrics(folder), runs.metrics(plain), strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=2e-3)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=3e-2)


def test_a_start_from_a_checkpoint_takes_the_masters_along(tmp_path, made):
    folder = runs.made(
        tmp_path / "out", init_from=made["masters"] / "checkpoint-6", learning_rate=0, max_steps=1
    )
    tensors = checkpoint.load(made["masters"] / "checkpoint-6").tensors
    for name, weight in runs.weights(folder).items():
        assert torch.equal(weight, tensors[f"optimizer/masters/{name}"])


def test_an_adapter_over_bfloat16_is_float32_and_its_base_is_left_alone(tmp_path):
    folder = runs.made(tmp_path / "out", use_peft=True, dtype="bfloat16", max_steps=3)
    tensors = checkpoint.load(folder / "checkpoint-3").tensors
    assert {t.dtype for path, t in tensors.items() if path.startswith("params/")} == {torch.float32}
    assert {t.dtype for t in runs.weights(folder).values()} == {torch.float32}
    base = safetensors.torch.load_file(folder / "base" / "model.safetensors")
    assert {t.dtype for t in base.values()} == {torch.bfloat16}
    assert transformers.AutoModelForCausalLM.from_pretrained(folder / "base").dtype == torch.bfloat16


def chosen(*given):
    """Return dtype and bf16 of a command line."""
    options = config.parse(["sft", "--model", "tiny", "--dataset", "demo", *given]).options
    return options.dtype, options.bf16


def test_bf16_means_autocast_over_float32_as_in_transformers():
    assert chosen() == ("auto", False)
    assert chosen("--bf16") == ("float32", True)
    assert chosen("--bf16", "false") == ("float32", False)
    assert chosen("--bf16", "null") == ("auto", False)
    assert chosen("--bf16", "--dtype", "bfloat16") == ("bfloat16", True)
    assert chosen("--bf16", "--torch_dtype", "auto") == ("auto", True)
    assert chosen("--dtype", "bfloat16") == ("bfloat16", False)
    with pytest.raises(mistake.Mistake, match="bf16 and dtype"):
        chosen("--bf16", "--dtype", "float64")
    with pytest.raises(mistake.Mistake, match="'half' came; true or false was wanted"):
        chosen("--bf16", "half")
