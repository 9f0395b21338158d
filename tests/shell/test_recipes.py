"""Files that people have: every key is known; three public recipes run or are refused rightly."""

import dataclasses
import importlib.machinery
import importlib.util
import pathlib

import pytest
import transformers
import yaml

from shell import config, keys, mistake, options

HERE = pathlib.Path(__file__).parent
TABLES = (options.FIELDS, keys.RUN, keys.HARMLESS, keys.REFUSED)
TRL = yaml.safe_load((HERE / "trl_keys.yaml").read_text())
THEIRS = sorted(
    {key for names in TRL.values() for key in names}
    | {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
)


@pytest.fixture(autouse=True)
def ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("WANDB_API_KEY", "a key")
    found = importlib.util.find_spec
    there = importlib.machinery.ModuleSpec("wandb", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there if name == "wandb" else found(name))


def recipe(tmp_path, name, *, without=(), more=""):
    """Write a recipe without some of its keys, which may be mappings of several lines."""
    kept, skip = [], False
    for line in (HERE / "recipes" / f"{name}.yaml").read_text().splitlines():
        if not line.startswith((" ", "-")):
            skip = line.partition(":")[0] in without
        if not skip:
            kept.append(line)
    path = tmp_path / "recipe.yaml"
    path.write_text("\n".join([*kept, more]))
    return str(path)


@pytest.mark.parametrize("key", THEIRS)
def test_every_key_of_theirs_stands_in_exactly_one_list(key):
    assert sum(key in table for table in TABLES) == 1


def test_no_key_stands_in_two_lists():
    assert len(set().union(*TABLES)) == sum(len(table) for table in TABLES)


def test_every_key_that_runs_sets_an_option_or_a_part_of_one():
    parts = {"gradient_accumulation_steps", "optim", "per_device_train_batch_size"}
    assert {run.name for run in keys.RUN.values()} <= set(options.FIELDS) | parts


@pytest.mark.parametrize("key", keys.HARMLESS)
def test_a_harmless_key_is_ignored_with_one_line_that_names_it(key):
    base = {"model": "tiny", "dataset": "a.jsonl"}
    plain, other = config.from_values("sft", base), config.from_values("sft", base | {key: True})
    assert other.options == plain.options
    assert len(other.notes) == 1
    assert key in other.notes[0]


@pytest.mark.parametrize("key", keys.REFUSED)
def test_a_refused_key_is_refused_with_what_to_do_unless_it_asks_for_what_is_done(key):
    base = {"model": "tiny", "dataset": "a.jsonl"}
    with pytest.raises(mistake.Mistake) as told:
        config.from_values("sft", base | {key: "something else"})
    assert key in str(told.value)
    assert keys.REFUSED[key].instead in str(told.value)
    for fine in keys.REFUSED[key].fine:
        assert config.from_values("sft", base | {key: fine}) == config.from_values("sft", base)


def test_the_example_of_trls_command_line_runs():
    command = config.parse(["sft", "--config", str(HERE / "recipes" / "trl_cli_sft.yaml")])
    chosen = command.options
    assert (chosen.model, chosen.dataset) == ("Qwen/Qwen2.5-0.5B", "stanfordnlp/imdb")
    assert (chosen.learning_rate, chosen.lr_scheduler_type, chosen.report_to) == (1e-4, "cosine", ())
    assert command.notes == ()


def test_the_zephyr_recipe_is_refused_for_its_mixture_with_the_key_to_use(tmp_path):
    with pytest.raises(mistake.Mistake, match=r"recipe.yaml, line 6, dataset_mixture.*dataset: \[\{path"):
        config.parse(["sft", "--config", recipe(tmp_path, "alignment_handbook_zephyr_sft")])


def test_the_zephyr_recipe_runs_once_its_mixture_is_written_as_datasets(tmp_path):
    ours = "dataset: HuggingFaceH4/ultrachat_200k\ndataset_split: train_sft\neval_split: test_sft"
    path = recipe(tmp_path, "alignment_handbook_zephyr_sft", without=["dataset_mixture"], more=ours)
    command = config.parse(["sft", "--config", path])
    chosen = command.options
    assert (chosen.model, chosen.revision, chosen.dtype) == ("mistralai/Mistral-7B-v0.1", "main", "bfloat16")
    assert (chosen.batch_size, chosen.max_length, chosen.max_steps) == (16 * 8, 2048, None)
    assert (chosen.num_train_epochs, chosen.warmup_ratio, chosen.save_steps) == (1, 0.1, 100)
    assert (chosen.eval_strategy, chosen.eval_steps) == ("epoch", None)
    assert (chosen.eval_dataset, chosen.eval_split) == ("HuggingFaceH4/ultrachat_200k", "test_sft")
    assert chosen.report_to == ("wandb",)
    assert chosen.gradient_checkpointing
    noted = {note.split(",")[2].split()[0].rstrip(":") for note in command.notes}
    assert noted == {
        "dataset_num_proc", "do_eval", "gradient_checkpointing_kwargs", "hub_model_id", "hub_strategy",
        "log_level", "overwrite_output_dir", "per_device_eval_batch_size", "push_to_hub",
        "remove_unused_columns",
    }  # fmt: skip


def test_the_open_r1_recipe_is_refused_for_its_kernel_alone(tmp_path):
    with pytest.raises(mistake.Mistake, match=r"use_liger: True came.*leave it out"):
        config.parse(["sft", "--config", recipe(tmp_path, "open_r1_olympic_coder_sft")])
    command = config.parse(
        ["sft", "--config", recipe(tmp_path, "open_r1_olympic_coder_sft", without=["use_liger"])]
    )
    chosen = command.options
    assert (chosen.dataset, chosen.dataset_config) == ("open-r1/codeforces-cots", "solutions_decontaminated")
    assert (chosen.batch_size, chosen.max_length, chosen.packing) == (2 * 8 * 8, 32768, "none")
    assert (chosen.lr_scheduler_type, chosen.lr_scheduler_kwargs) == (
        "cosine_with_min_lr",
        {"min_lr_rate": 0.1},
    )
    assert (chosen.save_steps, chosen.max_grad_norm, chosen.eval_strategy) == (0.2, 0.2, "no")
