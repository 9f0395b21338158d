"""Two processes that split the parameters train what one process trains, and leave the same files."""

import json
import os
import pathlib
import signal
import types

import pytest
import torch

from adapters import cpu, cuda
from core import ports
from shell import choose, config, evaluate, jobs, launched, mistake, splitting
from tests import warm
from tests.shell import runs, words

STEPS = 10
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
TALKS = (
    ("Name a color.", "Blue, like the sea.", "Color?"),
    ("What is 2 + 2?", "2 + 2 is 4.", "2 + 2 is 5, of course."),
    ("Say hi.", "Hi!", "Hi"),
    ("Say it twice.", "It. It.", "No."),
    ("And now?", "Now it is over, as far as I can see.", "?"),
)
PAIRS = {"algorithm": "dpo", "dataset_split": "train", "batch_size": 2, "max_length": 96, "max_steps": STEPS}
PROMPTS = {
    "algorithm": "grpo", "dataset": "task:letters", "dataset_split": "train[:6]", "batch_size": 4,
    "num_generations": 2, "max_completion_length": 6, "max_length": "null", "beta": 0.1, "max_steps": STEPS,
    "reward_funcs": "tests.shell.words:spread",
}  # fmt: skip
ADAPTED = {"use_peft": True, "lora_modules_to_save": "[norm]"}
# Rows are ragged, and the last batch of an epoch is uneven.
PLANS = {
    "sft": {
        "max_steps": STEPS,
        "dataset_split": "train[:13]",
        "eval_dataset": "demo",
        "eval_split": "test[:5]",
    },
    "sft in pieces, layers again": {
        "max_steps": STEPS,
        "token_budget": 40,
        "gradient_checkpointing": True,
        "weight_decay": 0.1,
    },
    "dpo": PAIRS,
    "dpo with an adapter": {"use_peft": True, "lora_dropout": 0, "dtype": "float64", **PAIRS},
    "grpo": PROMPTS,
}


def test_a_model_that_is_split_is_loaded_on_the_host_as_its_device_holds_it(monkeypatch):
    class LoadedError(Exception):
        pass

    def model(chosen, device, **_):
        raise LoadedError(device.type, choose.dtype(chosen, device), choose.attention(chosen, device))

    monkeypatch.setattr(choose, "model", model)
    chosen = config.parse(["sft", "--model", "tiny", "--dataset", "demo", "--fsdp"]).options
    ready = types.SimpleNamespace(
        command=types.SimpleNamespace(options=chosen),
        device=cuda.DEVICE,
        algorithm=types.SimpleNamespace(needs=()),
    )
    with pytest.raises(LoadedError) as loaded:
        jobs._loaded(ready, fresh=True)
    assert loaded.value.args == ("cpu", torch.bfloat16, "flex")


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """The options of each plan, its rows among them."""
    pairs = [
        {"prompt": [words.user(q)], "chosen": [words.assistant(a)], "rejected": [words.assistant(b)]}
        for q, a, b in TALKS
    ]
    file = words.write(tmp_path_factory.mktemp("rows") / "pairs.jsonl", pairs)
    made = {name: {"dataset": file, **plan} if "dpo" in name else plan for name, plan in PLANS.items()}
    # Of losses that fall the first is the greatest.
    best = {"eval_dataset": file, "load_best_model_at_end": True, "greater_is_better": True}
    return {**made, "dpo": {**made["dpo"], **best}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, plans):
    """Each plan, by one process."""
    root = tmp_path_factory.mktemp("alone")
    return {name: runs.made(root / name, **plan) for name, plan in plans.items()}


@pytest.fixture(scope="module")
def together(tmp_path_factory, plans):
    """Each plan, by two processes that split the parameters."""
    root = tmp_path_factory.mktemp("together")
    plan = {str(root / name): {**options, "fsdp": True, "save_steps": 4} for name, options in plans.items()}
    (root / "plan.json").write_text(json.dumps(plan))
    code, _, err = warm.program("tests.shell.ranked", str(root / "plan.json"), ranks=2)
    assert code == 0, err
    return {name: root / name for name in PLANS}


@pytest.mark.parametrize("name", PLANS)
def test_split_parameters_end_as_whole_ones_do(alone, together, name):
    assert runs.apart(runs.weights(together[name]), runs.weights(alone[name])) < 1e-5


def test_the_best_weights_of_a_split_run_are_those_of_an_earlier_step(alone, together):
    for folder in (alone["dpo"], together["dpo"]):
        assert [runs.facts(folder)[name] for name in ("step", "model_step")] == [STEPS, 3]


@pytest.mark.parametrize("name", PLANS)
def test_split_parameters_log_the_metrics_of_whole_ones(alone, together, name):
    one, two = (runs.metrics(folder[name], *runs.PLANNED) for folder in (alone, together))
    assert [line["loss"] for line in two if "loss" in line] == [
        pytest.approx(line["loss"], rel=1e-5, abs=1e-6) for line in one if "loss" in line
    ]
    assert two == [
        {key: pytest.approx(value, rel=1e-3, abs=1e-5) for key, value in line.items()} for line in one
    ]


@pytest.mark.parametrize("name", ["sft", "dpo with an adapter"])
def test_one_process_goes_on_from_the_checkpoint_of_two_that_split(alone, together, plans, name, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (together[name] / "checkpoint-4").rename(folder / "checkpoint-4")
    assert runs.run(folder, **{**plans[name], "save_steps": 4}) == 0
    assert runs.apart(runs.weights(folder), runs.weights(alone[name])) < 1e-5


def test_the_file_that_a_split_run_leaves_serves_evaluation_on_one_process(together, capsys):
    folder = together["sft"]
    assert evaluate.main([str(folder / "model"), "--config", str(folder / "config.yaml")]) == 0
    said = capsys.readouterr()
    assert "does not read" in said.err
    assert "fsdp" in said.err
    assert json.loads(said.out)["eval_loss"] > 0


def test_a_process_that_is_killed_ends_the_other_and_the_run_goes_on(tmp_path):
    folder = tmp_path / "out"
    # Frozen weights, an adapter and a part that trains whole: each is split in its own way.
    options = {"max_steps": 16, "save_steps": 2, "fsdp": True, **ADAPTED}
    process = runs.start(*LAUNCHER, "-m", "shell.train", *runs.words(folder, **options))
    while not list(folder.glob("checkpoint-*/manifest.json")):
        assert process.poll() is None, process.stderr.read()
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    second = next(c for c in children if b"\0RANK=1\0" in pathlib.Path(f"/proc/{c}/environ").read_bytes())
    os.kill(int(second), signal.SIGKILL)
    code, _, err = runs.done(process)
    assert code == 1
    assert "Signal 9 (SIGKILL)" in err
    stopped = max(runs.steps(folder))
    assert stopped < 16
    code, _, err = warm.program("shell.train", *runs.words(folder, **options), ranks=2)
    assert code == 0, err
    assert [line["step"] for line in runs.metrics(folder)] == list(range(1, 17))
    alone = runs.made(tmp_path / "alone", max_steps=16, save_strategy="no", **ADAPTED)
    assert runs.apart(runs.weights(folder), runs.weights(alone)) < 1e-4


def applied(*said, **variables):
    """Return the command that a launcher's variables make of one."""
    base = ("sft", "--model", "tiny", "--dataset", "demo", "--output_dir", "out")
    return launched.applied(config.parse([*base, *said]), variables)


def test_accelerates_configuration_of_full_sharding_is_honored():
    found = applied(
        ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_RESHARD_AFTER_FORWARD="true",
        FSDP_ACTIVATION_CHECKPOINTING="true", ACCELERATE_MIXED_PRECISION="bf16",
    )  # fmt: skip
    assert (found.options.fsdp, found.options.gradient_checkpointing, found.options.bf16) == (True,) * 3
    assert "fsdp true" in found.notes[-1]


def test_what_the_command_says_wins_over_the_launcher():
    assert not applied("--fsdp", "false", ACCELERATE_USE_FSDP="true").options.fsdp
    assert not applied("--dtype", "float32", ACCELERATE_MIXED_PRECISION="bf16").options.bf16


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", "deepspeed_config"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "megatron_lm_config"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "dynamo_backend"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "mixed_precision: fp16"),
        ("PARALLELISM_CONFIG_TP_SIZE", "2", "tp_size 2"),
    ],
)
def test_what_is_not_built_is_refused_by_its_name_in_accelerates_file(name, value, told):
    with pytest.raises(mistake.Mistake, match=told):
        applied(**{name: value})


def test_a_launcher_that_asks_for_nothing_changes_nothing():
    assert applied(ACCELERATE_MIXED_PRECISION="no", ACCELERATE_DYNAMO_BACKEND="NO") == applied()


def test_full_sharding_on_one_process_says_how_to_start_several(tmp_path, capsys):
    assert runs.run(tmp_path / "out", fsdp=True) == 2
    assert "torchrun" in capsys.readouterr().err


def test_planned_sizes_do_not_go_with_full_sharding():
    two = ports.Ranks(index=0, num=2, sum=lambda tree: tree, merge=lambda means: means)
    chosen = config.parse(
        ["sft", "--model", "tiny", "--dataset", "demo", "--fsdp", "--max_shapes", "4"]
    ).options
    with pytest.raises(mistake.Mistake, match="planned sizes"):
        splitting.check(chosen, cpu.DEVICE, two)


@pytest.mark.parametrize(("value", "wanted"), [("full_shard auto_wrap", True), ("", False), (True, True)])
def test_people_write_full_sharding_as_transformers_does(tmp_path, value, wanted):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"model": "tiny", "dataset": "demo", "fsdp": value}))
    assert config.parse(["sft", "--config", str(file)]).options.fsdp is wanted


def test_other_ways_to_shard_are_refused(tmp_path):
    with pytest.raises(mistake.Mistake, match="full_shard auto_wrap was wanted"):
        config.parse(["sft", "--model", "tiny", "--dataset", "demo", "--fsdp", "shard_grad_op"])
