"""Budget, packing, streams and ranks change nothing but rounding."""

import json
import math

import pytest
import torch
import transformers

from core.plan import batching
from shell import evaluate
from tests import warm
from tests.shell import runs

STEPS = 5
ROWS = {"eval_dataset": "demo", "eval_split": "test[:5]"}
PLANS = {
    "one pack": {},
    "small packs": {"token_budget": 130},
    "three packs": {
        "token_budget": 64,
        "batch_size": 3,
        "dataset_split": "train[:3]",
        "num_train_epochs": 2,
    },
    "planned sizes": {"token_budget": 160, "pad_to_multiple_of": 32, "max_shapes": 2},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Each plan, by one process."""
    root = tmp_path_factory.mktemp("alone")
    return {name: runs.made(root / name, **_options(name)) for name in PLANS}


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Each plan, by two ranks."""
    root = tmp_path_factory.mktemp("together")
    (root / "plan.json").write_text(json.dumps({str(root / name): _options(name) for name in PLANS}))
    code, _, err = warm.program("tests.shell.ranked", str(root / "plan.json"), ranks=2)
    assert code == 0, err
    return {name: root / name for name in PLANS}


def _options(name):
    more = {} if name == "three packs" else {"max_steps": STEPS}
    return {**PLANS[name], **more, **ROWS}


@pytest.mark.parametrize("name", PLANS)
def test_two_ranks_train_the_weights_of_one_process(alone, together, name):
    assert runs.apart(runs.weights(together[name]), runs.weights(alone[name])) < 1e-5


@pytest.mark.parametrize("name", PLANS)
def test_two_ranks_log_the_metrics_of_one_process(alone, together, name):
    one, two = (runs.metrics(folder[name], *runs.PLANNED) for folder in (alone, together))
    assert two == [{key: pytest.approx(value, rel=1e-4) for key, value in line.items()} for line in one]


def test_an_epoch_of_three_packs_ends_on_two_ranks_and_every_row_counts_once(together):
    facts = runs.facts(together["three packs"])
    assert (facts["ranks"], facts["step"]) == (2, 2)
    assert facts["promised"]["packs"] == 3
    assert facts["reached"]["trained_tokens"] == 2 * facts["rows"]["train"]["trained"]
    assert facts["reached"]["flops"] < facts["promised"]["flops"]  # its own share


def test_ranks_say_everything_once_and_write_one_folder(together):
    folder = together["one pack"]
    assert runs.steps(folder) == [STEPS]
    assert [line["step"] for line in runs.metrics(folder)] == list(range(1, STEPS + 1))


def test_accelerate_launches_a_run_that_goes_on_from_one_process(tmp_path, alone):
    options = {**_options("one pack"), "save_steps": 2}
    folder = tmp_path / "out"
    assert runs.run(folder, **{**options, "max_steps": 2}) == 0
    # What accelerate calls --multi_gpu is torchrun under its own settings; its --cpu is one process, or MPI.
    launcher = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
    more = ("--rdzv_backend", "c10d", "--main_process_port", "0", "--num_machines", "1")
    more += ("--mixed_precision", "no", "--dynamo_backend", "no")
    command = runs.words(folder, **options)
    code, _, err = runs.done(runs.start(*launcher, *more, "-m", "shell.train", *command))
    assert code == 0, err
    assert runs.facts(folder)["ranks"] == 2, err
    assert err.count("done: ") == 1
    assert [line["step"] for line in runs.metrics(folder)] == list(range(1, STEPS + 1))


def test_a_mistake_on_two_ranks_ends_both(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "one"}\n{"text": 2}\n')
    (tmp_path / "plan.json").write_text(
        json.dumps({str(tmp_path / "out"): {"dataset": str(file), "dataset_split": "train", "max_steps": 1}})
    )
    code, _, err = warm.program("tests.shell.ranked", str(tmp_path / "plan.json"), ranks=2)
    assert code == 2
    assert err.count("error: row 1") == 2
    assert "RuntimeError" not in err


@pytest.mark.parametrize(
    "changed",
    [
        {"token_budget": 130},
        {"token_budget": 40},
        {"packing": "none"},
        {"packing": "none", "token_budget": 130},
        {"streaming": True, "eval_steps": STEPS},
        {"attn_implementation": "eager"},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_budget_packing_and_streams_change_nothing_but_rounding(alone, tmp_path, changed):
    folder = runs.made(tmp_path / "out", **{**_options("one pack"), **changed})
    assert runs.apart(runs.weights(folder), runs.weights(alone["one pack"])) < 1e-5
    one, other = (runs.metrics(each, *runs.PLANNED) for each in (alone["one pack"], folder))
    for before, after in zip(one, other, strict=True):
        for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"):
            assert after[name] == pytest.approx(before[name], rel=1e-4), name
    assert other[-1]["eval_loss"] == pytest.approx(one[-1]["eval_loss"], rel=1e-5)


def test_a_budget_below_one_row_really_cuts_it(alone):
    lengths = [len(one.tokens) for one in _samples()]
    plan = batching.assign(_samples(), budget=130, couples="token", num_ranks=1)
    assert len(plan[0]) > 1
    assert min(lengths) > 40


def _samples():
    from shell import data, sources, tiny

    opened = data.look(sources.find("demo", split="train[:6]"))
    rows = data.rules(opened, tokenizer=tiny.tokenizer(), max_length=64)
    pieces = (piece for rows, _ in data.batches(opened[0].source.read(0), opened[0], rows) for piece in rows)
    from core.plan import sample

    return [sample.Sample(tokens=one.tokens, trained=one.trained) for row in pieces for one in row]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8])
def test_evaluation_does_not_depend_on_the_batch_size(alone, capsys, batch_size):
    folder = alone["one pack"] / "model"
    command = [str(folder), "--dataset", "demo", "--dataset_split", "test[:5]", "--max_length", "64"]
    assert evaluate.main([*command, "--batch_size", str(batch_size)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval_loss"] == pytest.approx(_by_hand(folder), rel=1e-5)
    assert found["eval_num_tokens"] == sum(len(one) for one in _rendered(folder))


def _rendered(folder):
    from shell import demo

    words = transformers.AutoTokenizer.from_pretrained(folder)
    rows = demo.rows("test")[:5]
    return [words.apply_chat_template(row["messages"])["input_ids"] for row in rows]


def _by_hand(folder):
    """Return the mean negative log-likelihood of all tokens but the first, one row at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    total = count = 0
    for ids in _rendered(folder):
        tokens = torch.tensor([ids[:64]])
        with torch.no_grad():
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
        total -= float(logprobs.gather(-1, tokens[0, 1:, None]).sum())
        count += tokens.shape[1] - 1
    assert math.isfinite(total)
    return total / count
