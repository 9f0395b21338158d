"""Numbers and words that mean one thing to a person and another to YAML or to floating point."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell import choose, config, entries, mistake
from shell import options as options_

BASE = ("sft", "--model", "tiny", "--dataset", "demo")


def parsed(*words):
    """Return the options of a command line."""
    return config.parse([*BASE, *words]).options


def told(*words):
    """Return the line that refuses a command line."""
    with pytest.raises(mistake.Mistake) as refused:
        parsed(*words)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@given(st.integers(0, 10**6), st.integers(0, 4))
def test_zeros_before_a_whole_number_change_nothing(number, zeros):
    text = "0" * zeros + str(number)
    assert entries.read(text) == number
    assert parsed("--seed", text).seed == number
    assert (
        config.from_values("sft", {"model": "tiny", "dataset": "demo", "seed": text}).options.seed == number
    )


@pytest.mark.parametrize("text", ["1:30", "10:20:30", "0x10", "0b11", "1:30.5"])
@pytest.mark.parametrize("name", ["max_steps", "learning_rate", "save_steps"])
def test_a_number_to_another_base_is_no_number(tmp_path, name, text):
    assert told(f"--{name}", text).startswith(f"--{name}: {text!r} came")
    (tmp_path / "run.yaml").write_text(f"{name}: {text}\n")
    assert f"{name}: {text!r} came" in told("--config", str(tmp_path / "run.yaml"))


def test_zeros_before_a_number_mean_the_same_in_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text("max_steps: 010\nlearning_rate: 01e-3\nnum_train_epochs: 02.5\n")
    chosen = parsed("--config", str(tmp_path / "run.yaml"))
    assert (chosen.max_steps, chosen.learning_rate, chosen.num_train_epochs) == (10, 1e-3, 2.5)


@given(st.integers(1, 99), st.integers(1, 40))
def test_a_part_of_a_run_is_the_whole_steps_that_it_is_on_paper(percent, hundreds):
    assert config.every(percent / 100, 100 * hundreds) == percent * hundreds


@given(st.floats(0.001, 0.999), st.integers(1, 10**5))
def test_a_part_of_a_run_is_rounded_up_and_at_least_one_step(part, num_steps):
    steps = config.every(part, num_steps)
    assert 1 <= steps <= num_steps
    assert steps - 1 <= part * num_steps <= steps + 1e-8


def test_a_warmup_ratio_is_the_whole_steps_that_it_is_on_paper():
    assert choose.num_warmup(parsed("--warmup_ratio", "0.07"), 100) == 7


@pytest.mark.parametrize("text", ["", " "])
@pytest.mark.parametrize("name", ["output_dir", "init_from", "tokenizer", "chat_template", "eval_dataset"])
def test_a_name_without_a_letter_is_refused(name, text):
    line = told(f"--{name}", text)
    assert line.startswith(f"--{name}: ")
    assert options_.known(name).text in line


@pytest.mark.parametrize(
    ("numbers", "said"),
    [("{min_lr: 2e-5}", "at most 1e-05"), ("{min_lr_rate: 1.5}", "at most 1")],
)
def test_a_least_rate_above_the_rate_itself_is_refused(numbers, said):
    words = ("--lr_scheduler_type", "cosine_with_min_lr", "--learning_rate", "1e-5", "--lr_scheduler_kwargs")
    assert said in told(*words, numbers)
    for fine in ("{min_lr: 1e-5}", "{min_lr_rate: 1}"):
        assert parsed(*words, fine).lr_scheduler_kwargs


def test_a_second_file_of_options_is_refused_without_the_advice_to_write_both():
    line = told("--config", "one.yaml", "--config", "two.yaml")
    assert line == "--config: it stands twice; once was wanted."


@pytest.mark.parametrize(
    ("loss", "name"),
    [("sapo", "epsilon"), ("sapo", "epsilon_high"), ("vespo", "epsilon_high"), ("cispo", "epsilon")],
)
def test_a_bound_that_a_loss_does_not_read_is_refused(loss, name):
    words = ["grpo", "--model", "tiny", "--dataset", "task:letters", "--loss_type", loss, f"--{name}", "0.3"]
    with pytest.raises(mistake.Mistake, match=f"{name}: it is not read by loss_type {loss}"):
        config.parse(words)


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize(
    ("algorithm", "name", "more"),
    [
        ("dpo", "loss_weights", ("--loss_type", "[sigmoid, sft]")),
        ("grpo", "reward_weights", ("--reward_funcs", "mine:score")),
    ],
)
def test_a_list_of_numbers_holds_finite_ones(algorithm, name, more, number):
    words = [algorithm, *BASE[1:], *more, f"--{name}", f"[1, {number}]"]
    with pytest.raises(mistake.Mistake, match=rf"--{name}: '\[1, {number}\]' came; finite numbers were"):
        config.parse(words)
