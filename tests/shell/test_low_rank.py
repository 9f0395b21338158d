"""Training an adapter from end to end: what it leaves and leaves alone, how it goes on, what it refuses."""

import json
import os
import shutil

import peft
import pytest
import safetensors.torch
import torch
import transformers
import yaml

from core import steps as verbs
from shell import checkpoint, config, evaluate, merge, mistake, train
from tests import warm
from tests.shell import runs, words

LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "max_steps": 3}
TALKS = (
    ("Name a color.", "Red is one.", "No."),
    ("Name a color.", "Blue, like the sea.", "Color?"),
    ("What is 2 + 2?", "2 + 2 is 4.", "2 + 2 is 5, of course."),
    ("Say hi.", "Hi!", "Hi"),
)
PAIRS = [
    {"prompt": [words.user(q)], "chosen": [words.assistant(a)], "rejected": [words.assistant(b)]}
    for q, a, b in TALKS
]
ANSWERS = [
    {"prompt": [words.user(q)], "completion": [words.assistant(text)], "label": good}
    for q, a, b in TALKS
    for text, good in ((a, True), (b, False))
]
DRAWN = {
    "dataset": "task:letters", "dataset_split": "train[:6]", "batch_size": 4, "num_generations": 2,
    "max_completion_length": 6, "max_length": "null", "reward_funcs": "tests.shell.words:spread",
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of rows by algorithm."""
    folder = tmp_path_factory.mktemp("rows")
    pairs = words.write(folder / "pairs.jsonl", PAIRS)
    return {"dpo": pairs, "reward": pairs, "kto": words.write(folder / "kto.jsonl", ANSWERS)}


def asked(files, algorithm, **more):
    """Return the options of a small run of an algorithm."""
    rows = {"dataset": files[algorithm], "dataset_split": "train"} if algorithm in files else {}
    rows |= DRAWN if algorithm in ("grpo", "rloo") else {}
    return {"algorithm": algorithm, "batch_size": 4, "max_length": 96, **rows, **LORA, **more}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps of supervised training."""
    return runs.made(tmp_path_factory.mktemp("run") / "out", **LORA, save_steps=1)


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("sft", {}),
        ("dpo", {"gradient_checkpointing": True}),
        ("dpo", {"token_budget": 40}),
        ("kto", {}),
        ("reward", {}),
        ("grpo", {"beta": 0.1}),
        ("rloo", {"num_iterations": 2}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_every_algorithm_trains_an_adapter_alone_and_peft_loads_it(tmp_path, files, algorithm, more):
    folder = runs.made(tmp_path / "out", **asked(files, algorithm, **more))
    assert any(line["grad_norm"] > 0 for line in runs.metrics(folder))
    paths = checkpoint.load(folder / "checkpoint-3").tensors
    trained = {path.removeprefix("params/") for path in paths if path.startswith("params/")}
    assert {path for path in trained if ".lora_" not in path} == (
        {"score.weight"} if algorithm == "reward" else set()
    )
    assert {path.removeprefix("optimizer/first/") for path in paths if "/first/" in path} == trained
    kind, more = transformers.AutoModelForCausalLM, {}
    if algorithm == "reward":
        kind, more = transformers.AutoModelForSequenceClassification, {"num_labels": 1}
    base = kind.from_pretrained(folder / "base", **more)
    theirs = peft.PeftModel.from_pretrained(base, folder / "model")
    state = theirs.state_dict()
    for path, tensor in runs.weights(folder).items():
        stem, _, last = path.rpartition(".")
        own = f"{stem}.default.{last}" if "lora_" in path else f"{stem}.modules_to_save.default.{last}"
        assert torch.equal(state[own], tensor), path


def test_the_base_of_a_run_is_the_model_that_it_began_with_to_the_bit(tmp_path, run):
    still = runs.made(tmp_path / "out", learning_rate=0, max_steps=1)
    base = safetensors.torch.load_file(run / "base" / "model.safetensors")
    assert runs.weights(still).keys() == base.keys()
    assert all(torch.equal(tensor, base[name]) for name, tensor in runs.weights(still).items())


def test_the_first_step_of_dpo_compares_equals_whatever_the_adapter_stands_beside(tmp_path, files):
    for number, more in enumerate(
        ({}, {"lora_target_modules": "[all-linear, lm_head]"}, {"lora_modules_to_save": "[norm]"})
    ):
        found = runs.metrics(runs.made(tmp_path / str(number), **asked(files, "dpo", **more)))
        assert found[0]["rewards/margins"] == 0.0
        assert found[0]["loss"] == pytest.approx(0.693147, abs=1e-6)
        assert found[-1]["rewards/margins"] != 0.0


def test_the_reference_of_an_adapter_that_is_new_takes_no_memory(tmp_path, files, monkeypatch):
    seen = []
    plain = verbs.with_reference
    monkeypatch.setattr(verbs, "with_reference", lambda *a: seen.append(a[2]) or plain(*a))
    runs.made(tmp_path / "out", **asked(files, "dpo"))
    assert seen
    assert all(reference == {} for reference in seen)


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_a_generator_draws_from_the_adapter_and_after_going_on_too(tmp_path, files, algorithm):
    drawn = {"learning_rate": 0.05, "max_grad_norm": 0, "save_steps": 1, "beta": 0.05}
    whole = runs.made(tmp_path / "whole", **asked(files, algorithm, max_steps=4, **drawn))
    folder = tmp_path / "out"
    runs.made(folder, **asked(files, algorithm, max_steps=2, lr_scheduler_type="constant", **drawn))
    runs.made(folder, **asked(files, algorithm, max_steps=4, lr_scheduler_type="constant", **drawn))
    for line in (*runs.metrics(folder), *runs.metrics(whole)):
        assert line["sampling/sampling_logp_difference/max"] < 1e-4, line["step"]
    still = {**drawn, "max_steps": 4, "learning_rate": 0}
    base = runs.made(tmp_path / "base", **asked(files, algorithm, **still))
    texts = [
        [json.loads(row)["completion"] for row in (place / "completions.jsonl").read_text().splitlines()]
        for place in (whole, base)
    ]
    assert texts[0][:4] == texts[1][:4]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "sft", "lora_dropout": 0.2},
        {"algorithm": "grpo", **DRAWN, "num_iterations": 2},
    ],
    ids=["sft", "grpo"],
)
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_is_not(tmp_path, options):
    told = json.dumps({**LORA, **options, "max_steps": 8})
    code, out, err = warm.program(
        "tests.shell.killed", str(tmp_path), "1", "lines=2", "saves=2", OPTIONS=told
    )
    assert code == 0, err
    assert out.split() == ["lines", "2", "saves", "2"]


def test_two_ranks_train_the_adapter_of_one_process(tmp_path, files):
    plan = {name: asked(files, name, beta=0.1) for name in ("dpo", "grpo")} | {"sft": {**LORA}}
    alone = {name: runs.made(tmp_path / f"{name}-alone", **options) for name, options in plan.items()}
    named = {str(tmp_path / name): options for name, options in plan.items()}
    (tmp_path / "plan.json").write_text(json.dumps(named))
    code, _, err = warm.program("tests.shell.ranked", str(tmp_path / "plan.json"), ranks=2)
    assert code == 0, err
    for name, folder in alone.items():
        # A matrix that one step moved from 0 is as small as its rounding.
        one, two = runs.weights(folder), runs.weights(tmp_path / name)
        assert max(float((one[n] - two[n]).norm() / (one[n].norm() + 1e-3)) for n in one) < 1e-3


def test_an_adapter_as_model_stands_for_its_base_and_goes_on_from_where_it_is(tmp_path, run, capsys):
    folder = runs.made(tmp_path / "on", model=run / "model", learning_rate=0, max_steps=1)
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(folder).values(), runs.weights(run).values(),
                                                 strict=True))  # fmt: skip
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert (written["model"], written["init_from"]) == (str(run / "base"), str(run / "model"))
    assert (written["use_peft"], written["lora_r"], written["lora_alpha"]) == (True, 4, 8.0)
    runs.made(folder, model=run / "model", learning_rate=0, max_steps=1)
    assert "is finished" in capsys.readouterr().err


def test_a_reference_is_the_adapter_that_a_run_starts_from(tmp_path, files, run):
    given = asked(files, "dpo", max_steps=2, model=run / "model")
    settled = ("use_peft", "lora_r", "lora_alpha")
    folder = runs.made(tmp_path / "on", **{n: v for n, v in given.items() if n not in settled})
    assert runs.metrics(folder)[0]["rewards/margins"] == 0.0
    assert runs.metrics(folder)[0]["loss"] == pytest.approx(0.693147, abs=1e-6)
    started = checkpoint.load(folder / "checkpoint-2").values["reference"]
    plain = runs.made(tmp_path / "new", **asked(files, "dpo", model=run / "base"))
    assert started != checkpoint.load(plain / "checkpoint-3").values["reference"]


def test_a_checkpoint_of_an_adapter_is_started_from_and_its_scale_is_kept(tmp_path, run, capsys):
    source = {"init_from": run / "checkpoint-3", "learning_rate": 0, "max_steps": 1}
    folder = runs.made(tmp_path / "on", **{**LORA, **source})
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(folder).values(), runs.weights(run).values(),
                                                 strict=True))  # fmt: skip
    assert runs.run(tmp_path / "other", **{**LORA, **source, "lora_alpha": 9}) == 2
    assert "lora_alpha 9.0 came, and init_from" in capsys.readouterr().err


def test_evaluation_reads_an_adapter(run, capsys):
    rows = ("--dataset", "demo", "--dataset_split", "train[:24]", "--max_length", "64")
    found = []
    for place in ("model", "base"):
        assert evaluate.main([str(run / place), *rows]) == 0
        found.append(json.loads(capsys.readouterr().out)["eval_loss"])
    assert found[0] < found[1]


@pytest.mark.parametrize("more", [{}, {"lora_target_modules": "[all-linear, lm_head]"}])
@pytest.mark.filterwarnings("ignore")
def test_a_merged_folder_loads_without_peft_and_gives_the_logits_of_the_adapter(
    tmp_path, more, capsys, monkeypatch
):
    run = runs.made(tmp_path / "out", **{**LORA, "learning_rate": 0.01}, **more)
    transformers.utils.logging.enable_progress_bar()  # as where nothing was trained in this process
    capsys.readouterr()
    assert merge.main([str(run / "model"), str(tmp_path / "merged")]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == (f"the merged model is in {tmp_path / 'merged'}\n", "")
    written = [path for place in (run / "base", tmp_path / "merged") for path in place.iterdir()]
    assert {path.stat().st_mode for path in written} == {(run / "config.yaml").stat().st_mode}
    with monkeypatch.context() as full:
        full.setattr("shell.files.sync", lambda path: os.fsync(-1))
        assert merge.main([str(run / "model"), str(tmp_path / "half")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "half").exists()
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = transformers.AutoModelForCausalLM.from_pretrained(run / "base")
    tokens = torch.arange(40, 60)[None]
    with torch.no_grad():
        first = base(tokens).logits
        theirs = peft.PeftModel.from_pretrained(base, run / "model")(tokens).logits
        ours = whole(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (theirs - first).abs().max() > 0.1
    assert whole.dtype == torch.float32
    words_ = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert words_.chat_template
    assert merge.main([str(run / "model"), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_a_merge_is_refused_where_there_is_nothing_to_merge_or_no_room(tmp_path, run, capsys):
    for command, told in (
        ([], "python -m shell.merge ADAPTER OUTPUT_DIR"),
        ([str(run), str(tmp_path / "new")], f"Did you mean {run / 'model'}?"),
        ([str(run / "model"), str(run)], "is not empty"),
        (
            [str(run / "model"), str(tmp_path / "new"), "--learning_rate", "1"],
            "merging does not read learning_rate",
        ),
        ([str(run / "model"), str(tmp_path / "new"), "--dtype", "int8"], "dtype"),
        ([str(run / "model"), str(run / "config.yaml" / "new")], "cannot be written"),
    ):
        assert merge.main(command) == 2
        said = capsys.readouterr().err
        assert told in said
        assert said.count("\n") == 1
    assert not (tmp_path / "new").exists()


def told(*given, algorithm="sft"):
    """Return the line that refuses options."""
    with pytest.raises(mistake.Mistake) as caught:
        config.parse([algorithm, "--model", "tiny", "--dataset", "demo", *given])
    return str(caught.value)


def test_dropout_before_an_adapter_and_shared_prefixes_exclude_each_other():
    line = told("--use_peft", "--lora_dropout", "0.05", "--packing", "tree")
    assert "packing tree and lora_dropout 0.05" in line
    command = config.parse(
        ["sft", "--model", "tiny", "--dataset", "demo", "--use_peft", "--lora_dropout", "0.05"]
    )
    assert command.options.packing == "none"
    assert any("packing is none: under lora_dropout 0.05" in note for note in command.notes)
    command = config.parse(
        ["dpo", "--model", "tiny", "--dataset", "demo", "--use_peft", "--lora_dropout", "0.05"]
    )
    assert command.options.packing == "tree"
    assert any("lora_dropout 0.05 is off" in note for note in command.notes)


def test_options_of_an_adapter_without_one_are_named():
    command = config.parse(["sft", "--model", "tiny", "--dataset", "demo", "--lora_r", "8"])
    assert command.notes == ("lora_r is ignored: without use_peft there is no adapter.",)


def test_options_that_an_adapter_contradicts_are_refused(run):
    assert "has 4: leave lora_r out" in told_of(run, "--lora_r", "8")
    assert "leave lora_target_modules out" in told_of(run, "--lora_target_modules", "q_proj")
    assert "leave use_peft out" in told_of(run, "--use_peft", "false")
    assert "keep one" in told_of(run, "--init_from", str(run / "checkpoint-3"))


def told_of(run, *given):
    """Return the line that refuses options beside an adapter as model."""
    with pytest.raises(mistake.Mistake) as caught:
        config.parse(["sft", "--model", str(run / "model"), "--dataset", "demo", *given])
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"use_dora": True}, "has use_dora True; plain LoRA is what is here"),
        ({"peft_type": "IA3"}, "has peft_type 'IA3'"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern"),
        ({"r": None}, "cannot be read (TypeError"),
    ],
)
def test_adapters_of_other_kinds_are_refused_by_name(tmp_path, run, change, line):
    shutil.copytree(run / "model", tmp_path / "model")
    path = tmp_path / "model" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert line in told_of(tmp_path)


def test_a_cut_adapter_is_refused_before_a_model_is_loaded(tmp_path, run):
    shutil.copytree(run / "model", tmp_path / "model")
    path = tmp_path / "model" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    assert "cannot be read (SafetensorError" in told_of(tmp_path)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"lora_target_modules": "q_prj"}, "called q_prj; its linear layers are"),
        ({"lora_target_modules": "embed_tokens"}, "only linear layers get an adapter"),
        ({"lora_modules_to_save": "[nothing]"}, "called nothing"),
    ],
)
def test_names_that_fit_no_layer_are_told_before_the_model_is_loaded(
    tmp_path, monkeypatch, capsys, more, line
):
    monkeypatch.setattr("shell.choose.model", None)
    assert runs.run(tmp_path / "out", **LORA, **more) == 2
    assert line in capsys.readouterr().err


def test_whole_weights_are_no_start_for_an_adapter(tmp_path, run, capsys):
    assert runs.run(tmp_path / "out", **LORA, init_from=run / "base") == 2
    assert f"name it as model: --model {run / 'base'}" in capsys.readouterr().err


def test_a_run_does_not_go_on_over_another_base(tmp_path, run, capsys):
    folder, base = tmp_path / "out", tmp_path / "base"
    shutil.copytree(run / "base", base)
    shutil.copytree(run / "model", tmp_path / "words")
    options = {**LORA, "model": base, "tokenizer": tmp_path / "words"}
    runs.made(folder, **options)
    tensors = safetensors.torch.load_file(base / "model.safetensors")
    tensors["model.norm.weight"][0] += 1.0
    safetensors.torch.save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    assert runs.run(folder, **{**options, "max_steps": 4}) == 2
    assert "its adapter is of those" in capsys.readouterr().err


def test_the_folder_names_the_base_that_was_given(tmp_path, run):
    folder = runs.made(tmp_path / "out", **LORA, model=run / "base", tokenizer=run / "model")
    named = json.loads((folder / "model" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str((run / "base").resolve())
    assert not (folder / "base").exists()


def test_the_plan_counts_what_is_trained(tmp_path, capsys):
    promised = {}
    for peft_ in (True, False):
        folder = runs.made(tmp_path / str(peft_), **{**LORA, "use_peft": peft_, "max_steps": 1})
        promised[peft_] = sum(runs.facts(folder)["promised"]["held"]["update"].values())
    # Gradients and moments of 1,000,000 weights that are not trained.
    assert promised[False] - promised[True] > 9_000_000
    assert train.main(runs.words(tmp_path / "dry", **LORA, dry_run=True)) == 0
