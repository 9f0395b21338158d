"""What a command line and a file mean, and how mistakes in them are told."""

import pathlib
import resource
import subprocess
import sys

import pytest

from shell import config, keys, manual, mistake, options, trackers
from tests import paths

BASE = ("--model", "tiny", "--dataset", "a.jsonl")


def parsed(*words, algorithm="sft"):
    return config.parse([algorithm, *BASE, *words])


def told(*words, algorithm="sft", base=BASE):
    with pytest.raises(mistake.Mistake) as caught:
        config.parse([algorithm, *base, *words])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def written(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return "--config", str(path)


@pytest.mark.parametrize("number", ["1e-5", "1.0e-5", '"1e-5"', "0.00001", ".1e-4", "1E-5", "1e-05"])
def test_every_spelling_of_a_small_number_is_that_number(tmp_path, number):
    file = written(tmp_path, f"learning_rate: {number}\nchat_template_kwargs: {{x: {number}}}")
    assert parsed(*file).options.learning_rate == 1e-5
    assert parsed("--learning_rate", number).options.learning_rate == 1e-5
    assert parsed(f"--learning_rate={number}").options.learning_rate == 1e-5
    inner = "1e-5" if number.startswith('"') else 1e-5
    assert parsed(*file).options.chat_template_kwargs == {"x": inner}


def test_what_is_no_number_is_told_with_key_value_and_line(tmp_path):
    line = told(*written(tmp_path, "seed: 1\nlearning_rate: abc"))
    assert "run.yaml, line 2, learning_rate: 'abc' came; a number, at least 0 was wanted." in line
    assert told("--learning_rate", "abc") == "--learning_rate: 'abc' came; a number, at least 0 was wanted."


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("learning-rate", "learning_rate"),
        ("learnign_rate", "learning_rate"),
        ("Learning_Rate", "learning_rate"),
        ("lr", "learning_rate"),
        ("epochs", "num_train_epochs"),
        ("per_device_train_batch", "per_device_train_batch_size"),
        ("no_pakcing", "packing"),
    ],
)
def test_a_key_that_does_not_exist_is_told_with_the_nearest_right_one(tmp_path, key, right):
    for line in (told(f"--{key}", "1"), told(*written(tmp_path, f"{key}: 1"))):
        assert key in line
        assert f"Did you mean {right}?" in line


def test_a_key_in_a_section_is_told_to_stand_at_the_left_margin(tmp_path):
    line = told(*written(tmp_path, "seed: 1\ntraining:\n  learning_rate: 1e-5"))
    assert "line 2, training" in line
    assert "write learning_rate at the left margin" in line
    assert "write learning_rate beside it" in told("--chat_template_kwargs", "{learning_rate: 1}")
    assert "Did you mean min_lr" in told(*written(tmp_path, "lr_scheduler_kwargs: {min_lr_rat: 1}"))


def test_a_key_that_stands_twice_is_told_with_both_lines(tmp_path):
    assert "line 3, seed: it also stands in line 1" in told(
        *written(tmp_path, "seed: 1\nmax_steps: 2\nseed: 2")
    )
    assert "x: it also stands in line 1" in told(*written(tmp_path, "chat_template_kwargs: {x: 1, x: 2}"))
    assert told("--seed", "1", "--seed", "2").startswith("--seed: it stands twice")


@pytest.mark.parametrize(
    "off", [["--packing", "false"], ["--packing=False"], ["--no_packing"], ["--packing", "none"]]
)
def test_the_command_line_switches_off_what_the_file_switches_on(tmp_path, off):
    file = written(tmp_path, "packing: true\nstreaming: true\nmax_steps: 3\n")
    assert parsed(*file).options.packing == "tree"
    assert parsed(*file, *off).options.packing == "none"
    assert not parsed(
        *file, *(word.replace("packing", "streaming").replace("none", "no") for word in off)
    ).options.streaming


def test_the_command_line_wins_over_another_name_for_the_same_in_the_file(tmp_path):
    file = written(
        tmp_path, "torch_dtype: float32\nbf16: false\nper_device_train_batch_size: 4\nmax_seq_length: 9\n"
    )
    chosen = parsed(*file, "--dtype", "bfloat16", "--batch_size", "6", "--max_length", "null").options
    assert (chosen.dtype, chosen.batch_size, chosen.max_length) == ("bfloat16", 6, None)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--warmup_steps", "3", "--warmup_ratio", "0.1"], ["--warmup_steps", "--warmup_ratio"]),
        (["--warmup_steps", "0.2", "--warmup_ratio", "0.1"], ["--warmup_steps", "--warmup_ratio"]),
        (
            ["--lr_scheduler_type", "constant", "--warmup_steps", "3"],
            ["--lr_scheduler_type", "--warmup_steps"],
        ),
        (["--lr_scheduler_kwargs", "{min_lr: 0}"], ["lr_scheduler_type", "--lr_scheduler_kwargs"]),
        (
            ["--batch_size", "8", "--per_device_train_batch_size", "2"],
            ["--batch_size", "--per_device_train_batch"],
        ),
        (["--model_name_or_path", "other"], ["--model", "--model_name_or_path"]),
        (["--eval_strategy", "no", "--eval_steps", "5"], ["--eval_strategy", "--eval_steps"]),
        (["--eval_strategy", "epoch", "--eval_steps", "5"], ["--eval_strategy", "--eval_steps"]),
        (["--eval_strategy", "no", "--eval_dataset", "b.jsonl"], ["--eval_strategy", "--eval_dataset"]),
        (["--save_strategy", "epoch", "--save_steps", "5"], ["--save_strategy", "--save_steps"]),
        (["--metric_for_best_model", "loss"], ["--metric_for_best_model", "eval_dataset"]),
        (["--greater_is_better"], ["--greater_is_better", "metric_for_best_model"]),
        (["--streaming"], ["--streaming", "max_steps"]),
        (["--streaming", "--num_train_epochs", "1"], ["--streaming", "max_steps"]),
        (["--eval_strategy", "epoch"], ["--eval_strategy", "eval_dataset"]),
        (["--beta", "0.1"], ["beta", "sft"]),
        (["--num_generations", "4"], ["num_generations", "sft"]),
    ],
)
def test_options_that_exclude_or_need_each_other_are_both_named(words, names):
    line = told(*words)
    assert all(name in line for name in names)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ["--loss_type", "nlll"],
            ["--loss_type: 'nlll' came", "one of nll, dft was wanted", "Did you mean nll?"],
        ),
        (["--loss_type", "sigmoid"], ["one of nll, dft was wanted"]),
        (["--loss_type", "[nll, dft]"], ["one of nll, dft was wanted"]),
        (["--lr_scheduler_type", "cosin"], ["Did you mean cosine?"]),
        (["--lr_scheduler_type", "cosine_with_restarts"], ["cosine_with_min_lr is the nearest"]),
        (["--device", "gpu"], ["one of auto, cpu, cuda, rocm, neuron"]),
        (["--dtype", "float16"], ["Did you mean bfloat16?"]),
        (["--max_steps", "1.5"], ["1.5", "a whole number or null, at least 1"]),
        (["--max_steps", "true"], ["a whole number"]),
        (["--max_steps", "0"], ["at least 1"]),
        (["--save_steps", "2.5"], ["whole steps, or a part of the run"]),
        (["--logging_steps", "0"], ["above 0"]),
        (["--learning_rate", "nan"], ["a number"]),
        (["--learning_rate", ".inf"], ["a number"]),
        (["--learning_rate", "null"], ["a number, at least 0 was wanted"]),
        (["--adam_beta2", "1"], ["below 1"]),
        (["--seed"], ["--seed: nothing came"]),
        (["--streaming", "maybe"], ["true or false"]),
        (["--optim", "lion"], ["--optim: 'lion' came", "AdamW"]),
        (["--fp16"], ["--fp16", "bfloat16"]),
        (["--save_strategy", "best"], ["one of no, steps, epoch"]),
        (["--report_to", "mlflow"], ["one of trackio, tensorboard, wandb"]),
        (["--report_to", "all"], ["name the trackers"]),
        (["--gradient_accumulation_steps", "0"], ["a whole number of at least 1"]),
        (["--pad_to_multiple_of", "0"], ["one of auto, none or a whole number, at least 1"]),
        (["--pad_to_multiple_of", "none", "--max_shapes", "3"], ["none pads nothing"]),
        (["--compile_beyond", "eager"], ["nothing is compiled; set compile"]),
        (["--count_signatures", "--compile"], ["a graph has no operators to count"]),
        (["--chat_template_path", "some/model"], ["a .jinja file was wanted"]),
        (["--use_vllm"], ["--use_vllm", "not read by sft"]),
    ],
)
def test_a_wrong_value_is_told_with_what_was_wanted(words, parts):
    line = told(*words)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ("[a, {pth: b}]", "Did you mean path?"),
        ("[{weight: 2}]", "an entry with a path"),
        ("[{path: a, weight: 0}]", "weight 0.0 came; a number above 0"),
        ("[{path: a, weight: x}]", "weight 'x' came"),
        ("[a, {path: b, weight: 2}]", "all or none were wanted"),
    ],
)
def test_a_wrong_entry_of_a_list_of_datasets_is_told(rows, part):
    assert part in told("--dataset", rows, base=("--model", "tiny"))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- a\n- b", "line 1: a list came; `key: value` lines were wanted"),
        ("just words", "line 1: a text came"),
        ("seed: 1\n\tmax_steps: 3", "line 2: "),
        ("seed: [1", "YAML was wanted"),
        ("? [a, b]\n: 1", "line 1: a list came as a key"),
        ("x: !!python/object:os.system 1", "line 1: "),
    ],
)
def test_a_file_that_is_no_mapping_is_told_with_its_line(tmp_path, text, part):
    assert part in told(*written(tmp_path, text))


def test_a_file_that_is_missing_or_not_named_is_told(tmp_path):
    assert "nowhere.yaml: it cannot be read" in told("--config", str(tmp_path / "nowhere.yaml"))
    assert told("--config").startswith("--config: nothing came; one YAML file was wanted")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    assert "it is not UTF-8 text" in told("--config", str(tmp_path / "bytes.yaml"))
    assert parsed(*written(tmp_path, "")).options == parsed().options


def test_algorithms_that_are_unknown_or_not_built_are_told_by_name(monkeypatch):
    assert "Did you mean sft?" in told(algorithm="sftt")
    monkeypatch.setattr("shell.about.ALGORITHMS", {"sft": True, "dpo": True, "grpo": False})
    assert "not built yet; sft, dpo or module:name was wanted" in told(algorithm="grpo")
    with pytest.raises(mistake.Mistake, match="no algorithm came"):
        config.parse([])
    with pytest.raises(mistake.Mistake, match=r"'--model': it does not exist"):
        config.parse(list(BASE))
    assert "'word': it belongs to no option" in told("word", base=())


def test_a_model_and_a_dataset_are_asked_for():
    assert told(base=()).startswith("--model: nothing came")
    assert told(base=("--model", "tiny")).startswith("--dataset: nothing came")


def test_an_algorithm_of_ones_own_reads_options_of_data_and_rollouts():
    command = parsed("--completion_only_loss", "true", algorithm="my.module:mine")
    assert command.options.completion_only_loss is True
    assert "--beta: a teacher reads it, and there is none" in told("--beta", "1", algorithm="my.module:mine")
    assert "not built yet" in told("--engine", "vllm", algorithm="my.module:mine")
    assert parsed("--num_generations", "4", algorithm="my.module:mine").options.num_generations == 4


def test_a_batch_is_what_devices_take_times_accumulation_times_ranks(monkeypatch, tmp_path):
    assert parsed().options.batch_size == 8
    assert parsed("--gradient_accumulation_steps", "3").options.batch_size == 24
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parsed("--per_device_train_batch_size", "5").options.batch_size == 10
    file = written(tmp_path, "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2")
    assert parsed(*file, "--gradient_accumulation_steps", "3").options.batch_size == 24
    assert parsed("--batch_size", "6").options.batch_size == 6


def test_max_steps_says_how_long_a_run_is_and_a_line_says_so():
    command = parsed("--max_steps", "5", "--num_train_epochs", "2")
    assert command.options.max_steps == 5
    assert command.notes == ("--num_train_epochs is ignored: max_steps 5 says how long the run is.",)
    assert parsed("--max_steps", "-1", "--num_train_epochs", "2").notes == ()


def test_evaluation_follows_from_what_is_given():
    assert parsed().options.eval_strategy == "no"
    assert parsed("--eval_dataset", "b.jsonl").options.eval_strategy == "epoch"
    assert parsed("--eval_dataset", "hub/id").options.eval_split == "test"
    chosen = parsed("--eval_dataset", "b.jsonl", "--eval_steps", "5").options
    assert (chosen.eval_strategy, chosen.eval_steps) == ("steps", 5)
    chosen = parsed("--eval_dataset", "b.jsonl", "--eval_strategy", "steps", "--logging_steps", "7").options
    assert (chosen.eval_steps, chosen.eval_split) == (7, "train")
    chosen = config.parse(
        ["sft", "--model", "tiny", "--dataset", "hub/id", "--eval_strategy", "epoch"]
    ).options
    assert (chosen.eval_dataset, chosen.eval_split) == ("hub/id", "test")


def test_strategies_are_words_though_yaml_reads_an_unquoted_no_as_false(tmp_path):
    file = written(tmp_path, "eval_strategy: no\nsave_strategy: no\n")
    chosen = parsed(*file).options
    assert (chosen.eval_strategy, chosen.save_strategy, chosen.save_steps) == ("no", "no", None)
    assert parsed(*file, "--save_strategy", "steps").options.save_steps == 500
    assert parsed("--eval_strategy", "no", "--save_strategy", "no").options == chosen


def test_a_test_split_is_not_looked_for_where_there_is_none():
    assert "set eval_dataset" in told("--eval_strategy", "epoch", "--eval_dataset", "null")
    assert "set eval_dataset" in told("--eval_on_start")


def test_a_python_caller_gives_values_and_paths(tmp_path):
    chosen = config.from_values(
        "sft", {"model": "tiny", "dataset": ["a"], "output_dir": tmp_path, "bf16": True}
    )
    assert (chosen.options.output_dir, chosen.options.dataset) == (str(tmp_path), ("a",))
    assert (chosen.options.dtype, chosen.options.bf16) == ("float32", True)
    with pytest.raises(mistake.Mistake, match=r"^learning_rate=: 'x' came; a number"):
        config.from_values("sft", {"model": "tiny", "dataset": "a", "learning_rate": "x"})


def test_a_schedule_with_a_floor_takes_one():
    words = ("--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs")
    assert parsed(*words, "{min_lr: 1e-6}").options.lr_scheduler_kwargs == {"min_lr": 1e-6}
    assert "keep one" in told(*words, "{min_lr: 0, min_lr_rate: 0.1}")
    assert "min_lr 'x' came" in told(*words, "{min_lr: x}")


def test_values_of_other_libraries_are_read():
    chosen = parsed(
        "--warmup_steps", "0.1", "--pad_to_multiple_of", "auto", "--loss_type", "chunked_nll"
    ).options
    assert (chosen.warmup_steps, chosen.warmup_ratio) == (None, 0.1)
    assert (chosen.pad_to_multiple_of, chosen.loss_type) == ("auto", "nll")
    assert parsed("--pad_to_multiple_of", "null").options.pad_to_multiple_of == "auto"
    assert parsed("--pad_to_multiple_of", "64").options.pad_to_multiple_of == 64
    assert parsed("--torch_compile").options.compile is True
    assert parsed("--torch_compile_backend", "inductor").options.compile is True
    assert parsed("--torch_compile_mode", "max-autotune").options.compile is True
    assert parsed("--warmup_steps", "10.0").options.warmup_steps == 10
    assert parsed("--optim", "adamw_torch_fused", "--use_cpu").options.device == "cpu"
    assert parsed("--train_sampling_strategy", "sequential").options.shuffle_dataset is False
    command = parsed("--attn_implementation", "kernels-community/flash-attn2")
    assert command.options.attn_implementation == "auto"
    assert "kernels-community/flash-attn2 knows no trees" in command.notes[0]
    for name in ("flash_attention_2", "flex_attention"):
        assert parsed("--attn_implementation", name).options.attn_implementation == name
    for written, read in (("true", True), ("no", False), ("selective", "selective")):
        assert parsed("--gradient_checkpointing", written).options.gradient_checkpointing == read


def test_several_datasets_come_as_yaml_as_words_and_as_a_mixture(tmp_path):
    def rows(*words):
        return config.parse(["sft", "--model", "tiny", *words]).options.dataset

    both = ({"path": "a", "weight": 1}, {"path": "b", "weight": 2, "split": "s"})
    assert rows("--dataset", "[{path: a, weight: 1}, {path: b, weight: 2, split: s}]") == both
    assert rows("--dataset", "a", "b") == rows("--dataset", "[a, b]") == ("a", "b")
    assert "a list or text or null was wanted" in told("--dataset", "{path: a}", base=BASE[:2])
    mixture = "datasets: [{path: a, weight: 1, columns: [x]}, {path: b, weight: 2, split: s, name: null}]"
    assert rows(*written(tmp_path, mixture)) == both
    assert "fraction of an entry has no equal" in told("--datasets", "[{path: a, fraction: 0.5}]", base=())
    line = told("--dataset", "[{path: a, split: train}]", "--eval_strategy", "epoch", base=BASE[:2])
    assert "--eval_strategy: dataset names no test split beside it; set eval_dataset" in line


def test_a_tracker_without_package_or_login_is_told_before_anything_is_imported(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "tensorboard came, and it is not installed" in told("--report_to", "tensorboard")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert "wandb came without a login" in told("--report_to", "trackio", "wandb")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password a")
    assert parsed("--report_to", "trackio,wandb").options.report_to == ("trackio", "wandb")
    monkeypatch.setenv("WANDB_BASE_URL", "https://elsewhere")
    assert "without a login" in told("--report_to", "wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert parsed("--report_to", "wandb").options.report_to == ("wandb",)


def test_the_trackers_that_can_be_asked_for_are_those_that_there_are():
    assert options.choices("sft", "report_to") == trackers.NAMES


@pytest.mark.parametrize(
    "words", [["--help"], ["sft", "-h"], ["help"], ["dpo", "--help"], ["my:own", "--help"]]
)
def test_help_lists_the_options_and_exits_with_0(words, capsys):
    with pytest.raises(SystemExit) as left:
        config.parse(words)
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "--learning_rate" in shown
    assert ("--beta" in shown) == (words[0] != "sft")
    assert max(map(len, shown.splitlines())) <= 120


def test_the_page_of_options_is_the_one_that_the_table_gives():
    page = paths.ROOT / "docs" / "options.md"
    assert page.read_text() == manual.as_markdown(), (
        "write it again: python -m shell.manual > docs/options.md"
    )


def test_every_nickname_leads_to_a_key():
    assert all(name in options.FIELDS or name in keys.RUN for name in keys.NICKNAMES.values())


def test_a_mistake_is_told_in_under_a_second_and_a_half_without_torch():
    script = (
        "import sys\nfrom shell import config, mistake\n"
        "try: config.parse(sys.argv[1:])\n"
        "except mistake.Mistake as told: sys.exit(f'{told} torch: {\"torch\" in sys.modules}')"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", script, "sft", *BASE, "--seed", "x"],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(paths.ROOT),
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr.strip().endswith("was wanted. torch: False")
    # The processor's time, not the clock's: other processes of a busy machine do not count.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5
