"""Evaluation of every algorithm on its own: the numbers that training logs of the same weights and rows."""

import json
import os
import subprocess
import sys

import attrs
import pytest
import transformers

from core import algorithms
from core.losses import supervised
from shell import about, choose, config, evaluate
from tests import paths
from tests.shell import runs
from tests.shell.test_train_preference import BOTH
from tests.shell.words import write

PROMPTED = {
    "dataset": "task:letters", "dataset_split": "train[:6]", "eval_dataset": "task:letters",
    "eval_split": "test[:5]", "batch_size": 4, "num_generations": 2, "max_completion_length": 4,
    "max_length": "null", "temperature": 0.6,
}  # fmt: skip
own = algorithms.dpo.evolve(loss=algorithms.preferences["ipo"].loss)
halved = algorithms.sft.evolve(loss=lambda scores, batch: (supervised.nll(scores, batch)[0] / 2, {}))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    return {name: write(folder / f"{name}.jsonl", rows) for name, rows in BOTH.items()}


def asked(files, algorithm, **more):
    """Return the options of a run that is evaluated after its last step."""
    if algorithm in about.POLICY:
        rows = PROMPTED
    elif algorithm == "distill":
        # tiny as a teacher has other weights than tiny as a student.
        rows = {"teacher_model": "tiny", "eval_dataset": "demo", "eval_split": "test[:5]", "batch_size": 4}
        rows |= {"dataset_split": "train[:6]", "max_length": 96, "temperature": 0.6}
        rows |= {"max_completion_length": 4} if more["lmbda"] else {}
    else:
        file = files.get(algorithm)
        held = {"eval_dataset": file, "batch_size": 4, "dataset_split": "train", "max_length": 96}
        rows = (
            {"eval_dataset": "demo", "eval_split": "test[:5]"} if file is None else {"dataset": file, **held}
        )
    return {"algorithm": algorithm, **rows, "max_steps": 2, "eval_steps": 2, **more}


def logged(folder):
    """Return what a run logged of its evaluation."""
    return {n: v for line in runs.metrics(folder) for n, v in line.items() if n.startswith("eval_")}


def near(numbers):
    """To rounding: kernels may sum in another order where weights lie at another address."""
    return {name: pytest.approx(number, rel=1e-5, abs=1e-6) for name, number in numbers.items()}


def printed(capsys, *words):
    """Evaluate; return the numbers that were printed, and what was said."""
    assert evaluate.main(list(words)) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def words(folder, options, model=None):
    """Return the command that evaluates what a run left, by the run's own file."""
    held = {"dataset": options["eval_dataset"], "dataset_split": options.get("eval_split", "train")}
    flags = [word for name, value in held.items() for word in (f"--{name}", value)]
    return [model or str(folder / "model"), "--config", str(folder / "config.yaml"), *flags]


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("sft", {}),
        ("dpo", {}),
        ("dpo", {"loss_type": "simpo"}),
        ("dpo", {"packing": "none"}),
        ("kto", {}),
        ("reward", {}),
        ("grpo", {}),
        ("rloo", {}),
        ("distill", {"lmbda": 0.0}),
        ("distill", {"lmbda": 0.5}),
        ("distill", {"lmbda": 1.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())) or "default",
)
def test_a_model_on_its_own_gets_the_numbers_of_the_run_that_made_it(
    tmp_path, capsys, files, algorithm, more
):
    options = asked(files, algorithm, **more)
    folder = runs.made(tmp_path / "out", **options)
    wanted = logged(folder)
    capsys.readouterr()
    found, _ = printed(capsys, *words(folder, options), "--algorithm", algorithm)
    assert wanted
    assert found == near(wanted)


def test_a_callers_own_algorithm_is_evaluated_as_it_is_trained(tmp_path, capsys, files):
    options = asked(files, "dpo") | {"algorithm": f"{__name__}:own"}
    folder = runs.made(tmp_path / "out", **options)
    wanted = logged(folder)
    capsys.readouterr()
    found, said = printed(capsys, *words(folder, options), "--algorithm", f"{__name__}:own")
    assert found == near(wanted)
    assert "the reference is tiny, which the run in" in said
    assert found["eval_rewards/margins"] != 0


def test_the_base_is_the_reference_of_weights_that_are_put_on_it(tmp_path, capsys, files):
    options = asked(files, "dpo")
    folder = runs.made(tmp_path / "out", **options)
    wanted = logged(folder)
    capsys.readouterr()
    for weights in (folder / "checkpoint-2", folder / "model"):
        command = [*words(folder, options, "tiny"), "--algorithm", "dpo", "--init_from", str(weights)]
        found, said = printed(capsys, *command)
        assert found == near(wanted)
        assert f"the reference is tiny, under the weights of {weights}" in said


def test_a_named_reference_wins_over_the_one_that_a_run_began_with(tmp_path, capsys, files):
    options = asked(files, "dpo")
    folder = runs.made(tmp_path / "out", **options)
    itself = [*words(folder, options), "--algorithm", "dpo", "--ref_model", str(folder / "model")]
    found, _ = printed(capsys, *itself)
    assert found["eval_rewards/margins"] == 0
    assert found["eval_loss"] == pytest.approx(0.693147, abs=1e-6)


@pytest.mark.parametrize("packing", ["tree", "none"])
@pytest.mark.parametrize("batch_size", ["1", "4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_beside_itself_has_no_margin_in_any_precision(capsys, files, packing, batch_size, dtype):
    words = [
        "tiny",
        "--algorithm",
        "dpo",
        "--dataset",
        files["dpo"],
        "--ref_model",
        "tiny",
        "--max_length",
        "96",
    ]
    more = ["--packing", packing, "--batch_size", batch_size, "--dtype", dtype]
    found, _ = printed(capsys, *words, *more)
    assert found["eval_loss"] == pytest.approx(0.693147, abs=1e-6)
    assert found["eval_rewards/margins"] == found["eval_rewards/chosen"] == 0


def test_a_model_that_nothing_is_known_of_is_not_compared_with_itself(tmp_path, capsys, files):
    assert evaluate.main(["tiny", "--algorithm", "dpo", "--dataset", files["dpo"]]) == 2
    said = capsys.readouterr().err
    assert "--ref_model BASE" in said
    assert said.count("\n") == 1


def test_losses_without_a_reference_ask_for_none(capsys, files):
    found, _ = printed(
        capsys, "tiny", "--algorithm", "dpo", "--loss_type", "orpo", "--dataset", files["dpo"],
        "--max_length", "96",
    )  # fmt: skip
    assert {"eval_loss", "eval_log_odds_ratio"} <= found.keys()


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_parameters"])
def test_a_reference_that_makes_other_numbers_of_its_weights_is_refused(tmp_path, capsys, files, name):
    described = choose.tiny_config(config.Options(model="tiny"))
    described.max_window_layers = 3  # changes nothing where no layer has a window
    odd = {"rms_norm_eps": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
    transformers.LlamaForCausalLM(described).save_pretrained(tmp_path / "policy")
    before = getattr(described, name)
    setattr(described, name, odd[name])
    transformers.LlamaForCausalLM(described).save_pretrained(tmp_path / "other")
    setattr(described, name, before)
    command = [str(tmp_path / "policy"), "--tokenizer", "tiny", "--algorithm", "dpo"]
    command += ["--dataset", files["dpo"], "--max_length", "96", "--ref_model"]
    described.max_window_layers = 4
    transformers.LlamaForCausalLM(described).save_pretrained(tmp_path / "alike")
    assert evaluate.main([*command, str(tmp_path / "alike")]) == 0
    capsys.readouterr()
    assert evaluate.main([*command, str(tmp_path / "other")]) == 2
    said = capsys.readouterr().err
    assert f"{name} is" in said.splitlines()[-1]


def test_a_reference_of_another_kind_is_refused_by_the_parameter_that_differs(tmp_path, capsys, files):
    described = choose.tiny_config(config.Options(model="tiny"))
    described.num_hidden_layers = 1
    transformers.LlamaForCausalLM(described).save_pretrained(tmp_path / "other")
    command = ["tiny", "--algorithm", "dpo", "--dataset", files["dpo"], "--max_length", "96"]
    for name, wanted in (("other", "is another kind of model (model.layers.1"), ("none", "with --ref_model")):
        capsys.readouterr()
        assert evaluate.main([*command, "--ref_model", str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert wanted in said
        assert said.count("error: ") == 1


def test_the_model_may_be_an_option_like_any_other(capsys):
    few = ("--dataset", "demo", "--dataset_split", "test[:4]", "--max_length", "64")
    assert printed(capsys, "tiny", *few) == printed(capsys, "--model", "tiny", *few)
    assert evaluate.main(["tiny", "--model", "tiny", *few]) == 2
    assert "--model: it stands twice" in capsys.readouterr().err
    assert evaluate.main([*few]) == 2
    assert "--model: nothing came" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (["dpo", "--model", "tiny"], "say --algorithm dpo"),
        (["tiny", "--algorithm", "dop", "--dataset", "demo"], "Did you mean dpo?"),
        (["tiny", "--algorithm", "--dataset", "demo"], "--algorithm: nothing came"),
        (["tiny", "--algorithm", "grpo", "--dataset", "task:letters", "--loss_type", "dop"], "grpo"),
    ],
)
def test_a_command_that_is_wrong_says_what_is_right(capsys, told, wanted):
    assert evaluate.main(told) == 2
    said = capsys.readouterr().err
    assert wanted in said
    assert said.count("\n") == 1


def test_what_rewards_do_not_read_is_named(capsys):
    few = ("--dataset", "task:letters", "--dataset_split", "test[:2]", "--max_completion_length", "2")
    idle = ("--epsilon", "0.1", "--num_generations", "4", "--memory_report")
    found, said = printed(capsys, "tiny", "--algorithm", "grpo", *few, *idle)
    assert "evaluation does not read memory_report, epsilon, num_generations" in said
    assert {"eval_reward", "eval_completions/mean_length", "eval_rewards/letters/mean"} <= found.keys()


def test_an_algorithm_of_ones_own_may_read_text(capsys):
    few = ("--dataset", "demo", "--dataset_split", "test[:4]", "--max_length", "64")
    whole, _ = printed(capsys, "tiny", *few)
    half, _ = printed(capsys, "tiny", *few, "--algorithm", f"{__name__}:halved")
    assert half["eval_loss"] == pytest.approx(whole["eval_loss"] / 2)


@pytest.mark.parametrize("module", ["shell.train", "shell.evaluate"])
def test_help_that_nobody_reads_to_the_end_ends_quietly(module):
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--help"],
        cwd=paths.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ},
    )  # fmt: skip
    process.stdout.close()  # before the first word is written
    assert (process.stderr.read(), process.wait(60)) == (b"", 141)
    process.stderr.close()


def test_help_names_no_algorithm_that_does_not_run(capsys):
    for built in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(about.ALGORITHMS, "distill", built)
            assert evaluate.main(["--help"]) == 0
            assert ("distill" in capsys.readouterr().out) == built


def test_a_callers_own_algorithm_takes_the_defaults_of_what_trains_the_same_rows():
    asked = {"model": "tiny", "dataset": "demo", "output_dir": "out"}
    plain = config.from_values("my:own", asked)
    fields = ("learning_rate", "max_length", "disable_dropout")
    for kin in ("sft", "dpo", "kto", "reward", "grpo"):
        wanted = config.from_values(kin, asked).options
        found = config.settled(plain, kin)
        assert [getattr(found.options, name) for name in fields] == [getattr(wanted, name) for name in fields]
        differ = any(getattr(wanted, name) != getattr(plain.options, name) for name in fields)
        assert len(found.notes) == len(plain.notes) + differ
    said = config.settled(plain, "grpo").notes[-1]
    assert said == "as grpo, which trains the same rows: max_length null, learning_rate 1e-06"
    set_ = config.from_values("my:own", {**asked, "learning_rate": 0.5, "max_length": 7})
    assert config.settled(set_, "dpo").options == attrs.evolve(set_.options, disable_dropout=True)
    assert config.settled(config.from_values("sft", asked), "dpo") == config.from_values("sft", asked)
