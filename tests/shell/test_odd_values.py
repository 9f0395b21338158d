"""Numbers without end, beyond all bounds or of no kind, and text that is none: told in a line."""

import os
import types

import pytest

from shell import asked, checks, choose, config, evaluate, mistake, options, sample, sources
from tests.shell import runs

ODD = (".inf", "-.inf", ".nan", "1e400", "99999999999999999999999", "[]", "[.nan]", "{a: 1}", '"\\0"', "")
NUMBERS = [name for name, field in options.FIELDS.items() if {int, float} & checks._kinds(field.type)]
LISTS = ("reward_weights", "loss_weights")
TEXTS = ("model", "output_dir", "dataset", "init_from", "chat_template", "report_to")


def reader(name):
    """Return an algorithm that reads an option."""
    only = options.known(name).only
    return "sft" if only is None else next(iter(only))


def outcome(name, word):
    """Return the options, or the line that refuses a value."""
    values = {"model": "tiny", "dataset": "demo", "output_dir": "out"} | {name: word}
    algorithm = reader(name)
    argv = [word for key, value in values.items() for word in (f"--{key}", value)]
    try:
        return config.parse([algorithm, *argv]).options
    except mistake.Mistake as told:
        return str(told)


@pytest.mark.parametrize("name", [*NUMBERS, *LISTS])
def test_a_number_is_finite_and_countable_or_refused_in_a_line(name):
    for word in ODD:
        found = outcome(name, word)
        if isinstance(found, str):
            assert name in found
            assert "\n" not in found
            continue
        value = getattr(found, name)
        assert word in ("", "[]", "99999999999999999999999"), (word, value)
        assert value is None or value == () or isinstance(value, float | str), (word, value)


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_no_system_takes_for_a_name_is_refused(name):
    with pytest.raises(mistake.Mistake, match=f"{name}=: .*wanted"):
        config.from_values("sft", {"model": "tiny", "dataset": "demo", "output_dir": "out"} | {name: "a\0b"})


@pytest.mark.parametrize(
    "entry", [{"split": 5}, {"config": [1]}, {"path": " "}, {"weight": 10**400}, {"split": ""}]
)
def test_an_entry_of_a_dataset_holds_text_where_text_is_wanted(entry):
    rows = [{"path": "a.jsonl", **entry}]
    with pytest.raises(mistake.Mistake, match=r"dataset=: .*wanted"):
        config.from_values("sft", {"model": "tiny", "dataset": rows})


@pytest.mark.parametrize(("word", "told"), [("[1e308]", "at most 1e"), ("[.nan]", "finite"), ("[1e6]", "")])
def test_weights_of_rewards_are_numbers_that_sums_can_hold(word, told):
    found = outcome("reward_weights", word)
    assert told in found if told else found.reward_weights == (1e6,)


def test_a_seed_may_be_larger_than_a_count():
    assert outcome("seed", "4294967295").seed == 2**32 - 1
    assert "at most" in outcome("seed", "4294967296")
    assert outcome("max_steps", "2147483647").max_steps == 2**31 - 1
    assert "at most 2147483647 was wanted" in outcome("max_steps", "2147483648")


@pytest.mark.parametrize("word", [".inf", ".nan"])
def test_a_warmup_without_end_is_told(word):
    assert outcome("warmup_steps", word).startswith(f"--warmup_steps: '{word}' came")


@pytest.mark.parametrize("word", ["--", "--=3", "-- "])
def test_a_key_without_a_letter_is_told(word):
    with pytest.raises(mistake.Mistake, match="it names no option"):
        config.parse(["sft", "--model", "tiny", "--dataset", "demo", word])


def test_a_part_of_an_epoch_that_is_no_step_is_told(tmp_path, capsys):
    assert runs.run(tmp_path / "out", num_train_epochs="1e-30") == 2
    assert "is no step; raise it, or set max_steps" in capsys.readouterr().err.splitlines()[-1]


def test_rows_that_are_neither_a_file_nor_a_folder_are_told(tmp_path):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, told in (("link.jsonl", "a link to where nothing is"), ("pipe.jsonl", "a pipe")):
        with pytest.raises(mistake.Mistake, match=f"{name} is {told}"):
            sources.find(str(tmp_path / name))


def test_a_new_file_is_no_link_to_nowhere(tmp_path):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    with pytest.raises(mistake.Mistake, match="it is there already"):
        asked.read(["tiny", "--prompt", "a", "--output", str(tmp_path / "link.jsonl")], str(tmp_path))


@pytest.mark.parametrize(
    ("word", "told"), [("gkd", "distill"), ("orpo", "dpo --loss_type orpo"), ("PPO", "grpo")]
)
def test_an_algorithm_that_others_call_otherwise_is_named(word, told):
    with pytest.raises(mistake.Mistake, match=f"Did you mean {told}"):
        config.parse([word])


def test_a_length_that_a_file_has_by_default_is_what_the_model_holds(tmp_path):
    (tmp_path / "run.yaml").write_text("model: tiny\ndataset: demo\nmax_length: 1024\n")
    told = []
    described = types.SimpleNamespace(max_position_embeddings=512)
    described.get_text_config = lambda: described
    command = config.parse(["sft", "--config", str(tmp_path / "run.yaml")])
    assert choose.max_length(command, described, told.append) == 512
    assert len(told) == 1
    command = config.parse(["sft", "--config", str(tmp_path / "run.yaml"), "--max_length", "1025"])
    with pytest.raises(mistake.Mistake, match="max_length 1025 came"):
        choose.max_length(command, described, told.append)


def test_a_runs_own_file_is_evaluated_on_the_rows_that_it_was_evaluated_on(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "dataset: demo\ndataset_split: train\neval_dataset: demo\neval_split: test[:4]\n"
    )
    words = ["tiny", "--config", str(tmp_path / "run.yaml")]
    command = evaluate._command(words)
    assert (command.options.dataset, command.options.dataset_split) == ("demo", "test[:4]")
    assert "the rows are eval_dataset demo of the file, test[:4]" in command.notes
    command = evaluate._command([*words, "--dataset", "other.jsonl", "--dataset_split", "train[:2]"])
    assert (command.options.dataset, command.options.dataset_split) == ("other.jsonl", "train[:2]")


def test_packing_in_the_words_of_others_says_what_it_turns_off():
    command = config.parse(["sft", "--model", "tiny", "--dataset", "demo", "--packing", "false"])
    assert command.options.packing == "none"
    assert any("leave packing out to share them" in note for note in command.notes)
    assert config.parse(["sft", "--model", "tiny", "--dataset", "demo", "--packing", "none"]).notes == ()


def test_a_flag_that_is_refused_did_come():
    with pytest.raises(mistake.Mistake, match="--load_in_4bit: it came, and it has no equal here"):
        config.parse(["sft", "--model", "tiny", "--dataset", "demo", "--load_in_4bit"])


def test_labels_that_both_weigh_nothing_train_nothing():
    words = ["kto", "--model", "tiny", "--dataset", "demo", "--desirable_weight", "0"]
    with pytest.raises(mistake.Mistake, match="nothing is trained"):
        config.parse([*words, "--undesirable_weight", "0"])
    assert config.parse(words).options.desirable_weight == 0


def test_weights_that_broke_in_the_last_step_are_told(tmp_path, capsys):
    runs.made(tmp_path / "out", max_steps=1, learning_rate=1e6, weight_decay=1e38)
    assert "hold numbers that are not finite" in capsys.readouterr().err
    assert any("not finite" in note for note in runs.facts(tmp_path / "out")["notes"])


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto", "grpo"])
def test_an_empty_list_of_losses_is_refused(algorithm):
    with pytest.raises(mistake.Mistake, match=r"loss_type: .* wanted"):
        config.parse([algorithm, "--model", "tiny", "--dataset", "demo", "--loss_type", "[]"])


def test_what_no_file_could_hold_is_refused_from_python_too():
    values = {"model": "tiny", "dataset": "demo", "chat_template_kwargs": {"a": [object()]}}
    with pytest.raises(mistake.Mistake, match="chat_template_kwargs=: <object object"):
        config.from_values("sft", values)


def test_a_prompt_that_is_too_long_is_not_told_of_a_file_that_nobody_named(capsys):
    assert (
        sample.main(["tiny", "--max_length", "20", "--max_completion_length", "4", "--prompt", "long " * 40])
        == 2
    )
    line = capsys.readouterr().err.splitlines()[-1]
    assert "--prompt leaves no prompt" in line
    assert "rows.jsonl" not in line
