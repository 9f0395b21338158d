"""What holds of any options: every way in reads the same, and mistakes are one line."""

import json
import pathlib
import tempfile
import typing

import attrs
import hypothesis
import yaml
from hypothesis import strategies as st

from shell import about, checks, config, entries, mistake, options

# Options of which some values exclude others; the last of these have their own tests.
TIED = {
    "compile", "compile_beyond", "count_signatures", "max_shapes", "pad_to_multiple_of", "rope_scaling",
    "eval_dataset", "eval_on_start", "eval_steps", "eval_strategy", "greater_is_better",
    "load_best_model_at_end", "lr_scheduler_kwargs", "lr_scheduler_type", "metric_for_best_model",
    "report_to", "save_steps", "save_strategy", "streaming", "warmup_ratio", "warmup_steps",
}  # fmt: skip
FREE = sorted(
    name
    for name in options.FIELDS
    if options.known(name).built and options.reads("sft", name) and name not in TIED | {"model", "dataset"}
)
TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1).filter(
    lambda text: text.strip()
)


def numbers(name, kind):
    known = options.known(name)
    low = known.low if known.low is not None else known.above if known.above is not None else -1e6
    high = known.high if known.high is not None else known.below if known.below is not None else 1e6
    if kind is int:
        return st.integers(int(low), int(high))
    return st.floats(low, high, exclude_min=known.above is not None, exclude_max=known.below is not None)


def values(name):
    """Give values of one option, by its type alone."""
    taken = options.choices("sft", name)
    if taken:
        return st.sampled_from(taken)
    kinds = checks._kinds(options.FIELDS[name].type)
    ways = []
    if bool in kinds:
        ways.append(st.booleans())
    elif {int, float} & kinds:
        kind = float if float in kinds else int
        ways.append(
            numbers(name, kind).filter(
                lambda value: name != "logging_steps" or value < 1 or value == int(value)
            )
        )
    if str in kinds:
        ways.append(TEXT)
    if dict in kinds:
        inner = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.none())
        keys = st.text(st.characters(categories=("Lu",)), min_size=1)
        ways.append(st.dictionaries(keys, inner | st.lists(inner, max_size=2), max_size=3))
    if "null" in checks.wanted("sft", name):
        ways.append(st.none())
    return st.one_of(ways)


@st.composite
def asked(draw):
    """Draw values of a few options."""
    names = draw(st.lists(st.sampled_from(FREE), unique=True, max_size=6))
    given = {name: draw(values(name)) for name in names}
    rows = draw(TEXT | st.lists(TEXT | st.fixed_dictionaries({"path": TEXT, "config": TEXT}), min_size=1))
    return {"model": draw(TEXT), "dataset": rows} | given


def from_file(text):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return config.parse(["sft", "--config", str(path)])


@hypothesis.given(asked())
def test_options_written_as_yaml_are_read_back_the_same(given):
    chosen = config.from_values("sft", given).options
    text = config.to_yaml(chosen)
    assert from_file(text).options == chosen
    assert config.changes(yaml.safe_load(text), chosen) == []


@hypothesis.given(asked())
def test_a_file_and_a_call_mean_the_same(given):
    command = config.from_values("sft", given)
    other = from_file(entries.dump(given))
    assert (other.options, other.given) == (command.options, command.given)


@hypothesis.given(asked())
def test_words_and_a_call_mean_the_same(given):
    hypothesis.assume(
        not any(isinstance(value, str) and _has_another_reading(value) for value in given.values())
    )
    words = [f"--{name}={_word(value)}" for name, value in given.items()]
    assert config.parse(["sft", *words]).options == config.from_values("sft", given).options


def _word(value):
    if isinstance(value, str):
        return value
    line = yaml.dump([value], Dumper=entries._Dumper, default_flow_style=True, width=1e9, allow_unicode=True)
    return line.strip()[1:-1]


def _has_another_reading(text):
    """Say whether a word could be null, a number, a list or a mapping as well."""
    return entries.Entry(key="", value=text, where="", text=True).read() != text


def attempt(read):
    """Return what was read and "read", or nothing and the mistake."""
    try:
        return read(), "read"
    except mistake.Mistake as told:
        return None, str(told)


@hypothesis.given(
    st.lists(
        st.one_of(
            st.text(),
            st.sampled_from([f"--{name}" for name in options.FIELDS]),
            st.sampled_from(
                ["--config", "--bf16", "--datasets", "true", "null", "1e-5", "[a, b]", "{a: 1}", "tiny"]
            ),
        )
    )
)
def test_any_words_give_options_or_a_mistake_of_one_line(words):
    hypothesis.assume(not {"-h", "--help"} & set(words))
    command, line = attempt(lambda: config.parse(["sft", *words]))
    assert len(line.splitlines()) == 1
    assert command is None or from_file(config.to_yaml(command.options)).options == command.options


@hypothesis.given(
    st.text() | st.dictionaries(st.sampled_from([*options.FIELDS, "bf16"]), st.text()).map(json.dumps)
)
def test_any_file_gives_options_or_a_mistake_of_one_line(text):
    _, line = attempt(lambda: from_file(text))
    assert len(line.splitlines()) == 1


def another(name, value):
    """Give another value of an option, or nothing where the type alone does not tell one."""
    taken = [other for other in options.choices("sft", name) if other != value]
    kinds = checks._kinds(options.FIELDS[name].type)
    if taken:
        return taken[0]
    if bool in kinds:
        return not value
    if {int, float} & kinds:
        return (
            (value or 0) / 2 + 1
            if options.known(name).high is None and options.known(name).below is None
            else 0.5
        )
    return "other" if str in kinds else {"other": 1}


def test_only_a_change_of_what_is_learned_stops_a_run_from_going_on():
    chosen = config.from_values("sft", {"model": "tiny", "dataset": "a.jsonl"}).options
    old = yaml.safe_load(config.to_yaml(chosen))
    named = set()
    for name in options.FIELDS:
        value = getattr(chosen, name)
        changed = attrs.evolve(chosen, **{name: another(name, value)})
        assert config.changes(old, changed) in ([], [name])
        named |= set(config.changes(old, changed))
    assert {
        "model",
        "dataset",
        "learning_rate",
        "seed",
        "batch_size",
        "token_budget",
        "packing",
        "init_from",
    } <= named
    assert not named & {
        "output_dir", "max_steps", "num_train_epochs", "logging_steps", "save_steps", "save_total_limit",
        "eval_steps", "report_to", "dry_run", "resume", "price_per_hour", "device",
    }  # fmt: skip


def test_every_interval_is_at_least_a_step_and_a_part_of_the_run_below_1():
    assert [config.every(interval, 10) for interval in (0.2, 0.25, 1e-9, 1, 7, 500)] == [2, 3, 1, 1, 7, 500]


def test_every_option_has_a_type_a_line_of_help_and_a_default_that_it_takes():
    for name, field in options.FIELDS.items():
        known = options.known(name)
        assert known.text
        assert known.text[-1] not in ".;"
        assert typing.get_origin(field.type) or isinstance(field.type, type)
        for algorithm in (*about.ALGORITHMS, about.OWN):
            usual = options.default(algorithm, name)
            if options.reads(algorithm, name) and usual is not None:
                usual = list(usual) if isinstance(usual, tuple) else usual
                entry = entries.Entry(key=name, value=usual, where=name)
                assert checks.typed(algorithm, name, entry) is not None


def test_cutting_a_long_row_keeps_its_start():
    words = ["sft", "--model", "tiny", "--dataset", "demo", "--truncation", "cut"]
    assert config.parse(words).options.truncation == "keep_start"
