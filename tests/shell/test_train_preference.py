"""Preference training from end to end: DPO and its relatives, KTO, reward models."""

import inspect
import json
import math

import pytest
import torch
import transformers

from core import algorithms
from shell import checkpoint, config, loss_checks, mistake, options, tiny
from tests import warm
from tests.shell import runs, words

LOG2 = math.log(2)
TALKS = [
    ("Name a color.", "Red is one.", "No."),
    ("Name a color.", "Blue, like the sea.", "Color?"),
    ("What is 2 + 2?", "2 + 2 is 4.", "2 + 2 is 5, of course."),
    ("Say hi.", "Hi!", "Hi"),
    ("Count to three.", "1, 2, 3.", "3, 2, 1, and so on and so forth."),
    ("Is water wet?", "Yes.", "It is not."),
]
BOTH = {
    "dpo": [
        {"prompt": [words.user(q)], "chosen": [words.assistant(a)], "rejected": [words.assistant(b)]}
        for q, a, b in TALKS
    ],
    "kto": [
        {"prompt": [words.user(q)], "completion": [words.assistant(text)], "label": good}
        for q, a, b in TALKS
        for text, good in ((a, True), (b, False))
    ],
}
BOTH["reward"] = [row | {"margin": 0.5} for row in BOTH["dpo"]]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of rows by algorithm."""
    folder = tmp_path_factory.mktemp("rows")
    return {name: words.write(folder / f"{name}.jsonl", rows) for name, rows in BOTH.items()}


def asked(files, algorithm, **more):
    """Return the options of a small run of an algorithm."""
    rows = {"dataset": files.get(algorithm, files["dpo"]), "dataset_split": "train"}
    return {"algorithm": algorithm, **rows, "batch_size": 4, "max_steps": 3, "max_length": 96, **more}


def first(folder):
    return runs.metrics(folder)[0]


@pytest.mark.parametrize("packing", ["tree", "none"])
@pytest.mark.parametrize("more", [{"batch_size": 1}, {"batch_size": 4}, {"token_budget": 24}])
def test_before_the_first_step_the_policy_is_its_reference(tmp_path, files, packing, more):
    chosen = asked(files, "dpo", packing=packing, **(more | {"max_steps": 1}))
    found = first(runs.made(tmp_path / "out", **chosen))
    assert found["loss"] == pytest.approx(LOG2, abs=1e-6)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        assert found[name] == 0.0, name
    assert found["logps/chosen"] < 0


AT_EQUALITY = {
    "sigmoid": LOG2, "hinge": 1.0, "ipo": 25.0, "sigmoid_norm": LOG2, "robust": LOG2, "nca_pair": 2 * LOG2,
    "bco_pair": 2 * LOG2, "sppo_hard": 50.0, "apo_zero": 1.0, "apo_down": 1.0, "aot": LOG2,
    "aot_unpaired": LOG2, "discopop": 0.5 * LOG2 + 0.5,
}  # fmt: skip


def test_every_loss_of_pairs_trains_and_begins_at_its_value_for_equal_models(tmp_path, files):
    for name, value in AT_EQUALITY.items():
        folder = runs.made(tmp_path / name, **asked(files, "dpo", loss_type=name, max_steps=2))
        assert first(folder)["loss"] == pytest.approx(value, rel=1e-5), name
        assert runs.metrics(folder)[1]["loss"] != pytest.approx(value, rel=1e-5), name
    smoothed = asked(files, "dpo", loss_type="exo_pair", label_smoothing=0.25, max_steps=1)
    wanted = 0.5 * (math.log(0.5 / 0.75) + math.log(0.5 / 0.25))
    assert first(runs.made(tmp_path / "exo", **smoothed))["loss"] == pytest.approx(wanted, rel=1e-5)
    alone = set(loss_checks.ALONE)
    assert {*AT_EQUALITY, "exo_pair", *alone} == set(options.choices("dpo", "loss_type"))


@pytest.mark.parametrize("name", loss_checks.ALONE)
def test_losses_that_read_no_reference_train_without_one(tmp_path, files, name):
    folder = runs.made(tmp_path / "out", **asked(files, "dpo", loss_type=name, max_steps=2))
    lines = runs.metrics(folder)
    assert lines[0]["loss"] != lines[1]["loss"]
    assert checkpoint.load(folder / "checkpoint-2").values["reference"] is None


def test_another_model_may_be_the_reference_and_a_run_goes_on_with_the_same_one(tmp_path, files, capsys):
    base = runs.made(tmp_path / "base", **asked(files, "dpo", max_steps=1)) / "model"
    chosen = asked(files, "dpo", ref_model=base, max_steps=2, lr_scheduler_type="constant")
    folder = runs.made(tmp_path / "out", **chosen)
    assert runs.metrics(folder)[0]["rewards/margins"] != 0  # the policy begins elsewhere
    runs.made(folder, **{**chosen, "max_steps": 3})
    whole = runs.made(tmp_path / "whole", **{**chosen, "max_steps": 3})
    runs.same(folder, whole, 3)
    capsys.readouterr()
    assert runs.run(folder, **{**chosen, "max_steps": 4, "ref_model": "tiny"}) == 2
    assert "ref_model" in capsys.readouterr().err


def test_several_losses_add_up_with_their_weights(tmp_path, files):
    alone = first(runs.made(tmp_path / "sft", **asked(files, "dpo", loss_type="sft")))["loss"]
    mixed = asked(files, "dpo", loss_type="[sigmoid, bco_pair, sft]", loss_weights="[0.8, 0.2, 1.0]")
    found = first(runs.made(tmp_path / "mixed", **mixed))["loss"]
    assert found == pytest.approx(0.8 * LOG2 + 0.2 * 2 * LOG2 + alone, rel=1e-5)


def test_numbers_of_the_loss_reach_it(tmp_path, files):
    base = runs.metrics(runs.made(tmp_path / "base", **asked(files, "dpo")))[-1]["loss"]
    ways = {
        "beta": 0.5, "label_smoothing": 0.1, "ld_alpha": 0.0, "use_weighting": True,
        "f_divergence_type": "forward_kl",
    }  # fmt: skip
    losses = {
        name: runs.metrics(runs.made(tmp_path / name, **asked(files, "dpo", **{name: value})))[-1]["loss"]
        for name, value in ways.items()
    }
    assert len({base, *losses.values()}) == len(ways) + 1


def test_kto_begins_at_one_half_with_a_zero_of_zero_and_sees_both_kinds(tmp_path, files):
    folder = runs.made(tmp_path / "out", **asked(files, "kto", max_steps=3))
    lines = runs.metrics(folder)
    assert (lines[0]["loss"], lines[0]["kl"]) == (0.5, 0.0)
    assert all({"rewards/chosen", "rewards/rejected", "kl"} <= line.keys() for line in lines)
    facts = runs.facts(folder)
    assert facts["promised"]["trained_tokens"] == facts["rows"]["train"]["trained"]
    assert facts["reached"]["trained_tokens"] == facts["rows"]["train"]["trained"]


def test_a_step_of_one_labeled_answer_alone_is_the_rest_of_an_epoch_or_refused(tmp_path, files, capsys):
    rest = asked(files, "kto", batch_size=11, max_steps=2)
    assert runs.metrics(runs.made(tmp_path / "rest", **rest))[1].keys() >= {"loss", "grad_norm"}
    assert runs.run(tmp_path / "one", **asked(files, "kto", batch_size=1)) == 2
    assert "at least 2 was wanted" in capsys.readouterr().err
    alone = asked(files, "kto", batch_size=1, loss_type="apo_zero_unpaired", max_steps=1)
    assert first(runs.made(tmp_path / "alone", **alone))["loss"] == 0.5


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "reward"])
def test_budget_and_packing_change_nothing_but_rounding(tmp_path, files, algorithm):
    ways = {"whole": {}, "pieces": {"token_budget": 40}, "apart": {"packing": "none", "token_budget": 100}}
    # Where gradients are nearly 0, Adam with a small epsilon makes steps of their rounding.
    held = {"eval_dataset": files[algorithm], "eval_steps": 3, "adam_epsilon": 1e-4}
    folders = {
        name: runs.made(tmp_path / name, **asked(files, algorithm, **way, **held))
        for name, way in ways.items()
    }
    whole = runs.weights(folders.pop("whole"))
    line = runs.metrics(tmp_path / "whole")[-1]
    for folder in folders.values():
        assert runs.apart(runs.weights(folder), whole) < 1e-5
        other = runs.metrics(folder)[-1]
        assert other["eval_loss"] == pytest.approx(line["eval_loss"], rel=1e-4)
        assert other["loss"] == pytest.approx(line["loss"], rel=1e-4)


@pytest.mark.parametrize("algorithm", ["dpo", "reward"])
def test_evaluation_of_pairs_does_not_depend_on_how_many_are_planned_together(tmp_path, files, algorithm):
    found = []
    for size in (1, 4, 6):
        plan = asked(files, algorithm, batch_size=size, max_steps=1, learning_rate=0)
        folder = runs.made(tmp_path / str(size), **plan, eval_dataset=files[algorithm])
        found.append(runs.metrics(folder)[-1])
    for line in found[1:]:
        assert line["eval_loss"] == pytest.approx(found[0]["eval_loss"], rel=1e-5)
    assert "eval_rewards/margins" in found[0] or "eval_accuracy" in found[0]


def test_two_ranks_train_what_one_process_trains(tmp_path, files):
    plans = {name: asked(files, name, token_budget=120, adam_epsilon=1e-4) for name in BOTH}
    plan = {str(tmp_path / "two" / name): options for name, options in plans.items()}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    code, _, err = warm.program("tests.shell.ranked", str(tmp_path / "plan.json"), ranks=2)
    assert code == 0, err
    for name, chosen in plans.items():
        one, two = runs.made(tmp_path / "one" / name, **chosen), tmp_path / "two" / name
        assert runs.apart(runs.weights(two), runs.weights(one)) < 1e-5, name
        for before, after in zip(
            runs.metrics(one, *runs.PLANNED), runs.metrics(two, *runs.PLANNED), strict=True
        ):
            assert after == {
                key: pytest.approx(value, rel=1e-4, abs=1e-6) for key, value in before.items()
            }, name


def test_a_run_that_is_killed_ends_like_one_that_is_not_reference_and_all(tmp_path, files):
    plan = asked(files, "dpo", max_steps=8, init_from=str(runs.made(tmp_path / "start") / "model"))
    deaths = ("moments=1", "lines=2", "saves=2")
    code, out, err = warm.program("tests.shell.killed", str(tmp_path), "3", *deaths, OPTIONS=json.dumps(plan))
    assert code == 0, err
    assert out.split() == ["moments", "1", "lines", "2", "saves", "2"]
    assert first(tmp_path / "whole")["loss"] == pytest.approx(LOG2, abs=1e-6)


@pytest.mark.parametrize("algorithm", ["kto", "reward"])
def test_unpaired_and_reward_runs_that_are_killed_end_like_those_that_are_not(tmp_path, files, algorithm):
    plan = asked(files, algorithm, max_steps=8)
    code, out, err = warm.program(
        "tests.shell.killed", str(tmp_path), "3", "lines=2", OPTIONS=json.dumps(plan)
    )
    assert code == 0, err
    assert out.split() == ["lines", "2"]


def test_a_reference_that_changed_on_the_disk_is_refused(tmp_path, files, capsys):
    start = runs.made(tmp_path / "start", max_steps=1) / "model"
    plan = asked(files, "dpo", model=str(start))
    folder = runs.made(tmp_path / "out", **plan)
    weights = runs.weights(tmp_path / "start")
    weights["model.norm.weight"] += 1
    runs.safetensors.torch.save_file(weights, start / "model.safetensors", {"format": "pt"})
    assert runs.run(folder, **(plan | {"max_steps": 4})) == 2
    assert "are its reference" in capsys.readouterr().err
    assert runs.run(folder, **(plan | {"max_steps": 4, "resume": "force"})) == 0


def test_a_loss_without_reference_holds_no_second_model(tmp_path, files, monkeypatch):
    monkeypatch.setattr("shell.references.frozen", None)
    folder = runs.made(tmp_path / "out", **asked(files, "core.algorithms:simpo"))
    assert "rewards/margins" in first(folder)


def test_pairs_come_from_a_stream_as_from_a_file(tmp_path, files):
    plan = asked(files, "dpo", shuffle_dataset=False)
    one = runs.weights(runs.made(tmp_path / "file", **plan))
    other = runs.weights(runs.made(tmp_path / "stream", **plan, streaming=True))
    assert runs.apart(other, one) == 0.0


@pytest.fixture(scope="module")
def judged(tmp_path_factory, files):
    """A trained reward model."""
    return runs.made(tmp_path_factory.mktemp("reward") / "out", **asked(files, "reward", max_steps=20))


def scores(folder, texts):
    """Score texts with transformers alone, one batch of rows padded to the right."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    given = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        return model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits[:, 0]


def printed(answer):
    """Print a conversation and its answer."""
    talk = [words.user(TALKS[0][0]), words.assistant(answer)]
    return tiny.tokenizer().apply_chat_template(talk, tokenize=False)


def test_a_reward_model_learns_and_logs_what_dashboards_read(judged):
    lines = runs.metrics(judged)
    names = {"accuracy", "margin", "min_reward", "mean_reward", "max_reward"}
    assert all(names <= line.keys() for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["accuracy"] == 1.0


def test_a_reward_model_is_one_of_transformers_and_scores_the_last_token_of_each_row(judged):
    answers = ["Red is one.", "No.", "Blue, like the sea, or any other thing."]
    together = scores(judged, [printed(answer) for answer in answers])
    alone = torch.cat([scores(judged, [printed(answer)]) for answer in answers])
    assert together.tolist() == pytest.approx(alone.tolist(), abs=1e-5)
    assert together[0] > together[1]
    stored = runs.weights(judged)
    assert stored["score.weight"].shape == (1, 128)
    assert "lm_head.weight" not in stored


def test_what_the_reward_model_says_in_training_is_what_it_says_afterwards(tmp_path, files):
    still = asked(files, "reward", learning_rate=0, max_steps=1, batch_size=6)
    folder = runs.made(tmp_path / "out", **still)
    texts = [
        tiny.tokenizer().apply_chat_template([*row["prompt"], *row[side]], tokenize=False)
        for row in BOTH["reward"]
        for side in ("chosen", "rejected")
    ]
    found = scores(folder, texts)
    line = first(folder)
    assert line["max_reward"] == pytest.approx(found.max().item(), abs=1e-5)
    assert line["min_reward"] == pytest.approx(found.min().item(), abs=1e-5)
    assert line["margin"] == pytest.approx((found[::2] - found[1::2]).mean().item(), abs=1e-5)
    apart = found[::2] - found[1::2] - 0.5
    assert line["loss"] == pytest.approx(-torch.nn.functional.logsigmoid(apart).mean().item(), abs=1e-5)


def test_a_reward_model_goes_on_from_one_and_from_a_language_model(tmp_path, files, judged):
    again = first(runs.made(tmp_path / "again", **asked(files, "reward", model=str(judged / "model"))))
    assert again["accuracy"] == 1.0
    started = first(runs.made(tmp_path / "from", **asked(files, "reward", init_from=str(judged / "model"))))
    assert started["accuracy"] == 1.0
    language = runs.made(tmp_path / "sft", max_steps=1) / "model"
    fresh = first(runs.made(tmp_path / "fresh", **asked(files, "reward", model=str(language))))
    assert math.isfinite(fresh["loss"])


def test_where_padding_is_the_end_token_a_reward_model_gets_another(tmp_path, files):
    words_ = tiny.tokenizer()
    words_.pad_token = words_.eos_token
    words_.save_pretrained(tmp_path / "words")
    plan = asked(files, "reward", tokenizer=str(tmp_path / "words"), max_steps=1)
    folder = runs.made(tmp_path / "out", **plan)
    saved = transformers.AutoConfig.from_pretrained(folder / "model")
    assert saved.pad_token_id not in (None, words_.eos_token_id)
    text = "Name it.<|im_end|>"
    longer = scores(folder, [text, text + "And more of it, so that the first is padded."])
    assert longer[0].item() == pytest.approx(scores(folder, [text])[0].item(), abs=1e-5)


BASE = ("--model", "tiny", "--dataset", "rows.jsonl", "--output_dir", "out")


@pytest.mark.parametrize(
    ("algorithm", "given", "told"),
    [
        ("dpo", "--loss_type ipo --label_smoothing 0.1", "--label_smoothing: 0.1 came, and ipo has none"),
        ("dpo", "--loss_type exo_pair", "label_smoothing: 0.0 came; exo_pair is infinite at 0"),
        ("dpo", "--loss_type robust --label_smoothing 0.5", "robust divides by"),
        ("dpo", "--loss_type sigmoid sft --loss_weights [1]", "1 weights came for 2 losses"),
        ("dpo", "--discopop_tau 0.1", "only discopop reads it"),
        (
            "dpo",
            "--simpo_gamma 0.1",
            "--simpo_gamma: 0.1 came, and only simpo reads it; loss_type is sigmoid",
        ),
        ("dpo", "--loss_type orpo --cpo_alpha 0.1", "only cpo reads it"),
        ("dpo", "--loss_type orpo --label_smoothing 0.1", "orpo has none"),
        ("dpo", "--loss_type cpo --ref_model tiny", "cpo reads no reference; leave it out"),
        ("dpo", "--loss_type simpo sigmoid", "beta: nothing came; that of simpo is 2"),
        ("dpo", "--loss_type simpo --ld_alpha 0.5", "simpo imitates or averages whole answers"),
        ("dpo", "--loss_type sft --ld_alpha 0.5", "sft imitates or averages whole answers"),
        ("dpo", "--loss_type orpo --f_divergence_type forward_kl", "orpo is defined for the log-ratio alone"),
        ("reward", "--ref_model tiny", "ref_model is not read by reward"),
        (
            "dpo",
            "--loss_type bco_pair --f_divergence_type forward_kl",
            "bco_pair is defined for the log-ratio",
        ),
        ("dpo", "--f_alpha_divergence_coef 0.3", "only f_divergence_type alpha_divergence reads it"),
        ("dpo", "--loss_type aot --use_weighting", "aot compares ranks"),
        ("dpo", "--beta 0", "--beta: 0.0 came; above 0"),
        ("kto", "--batch_size 1", "--batch_size: 1 came; kto pairs"),
        ("kto", "--beta 0", "above 0 was wanted"),
        ("reward", "--beta 0.1", "beta is not read by reward"),
        ("kto", "--loss_type sigmoid", "one of kto, apo_zero_unpaired"),
    ],
)
def test_numbers_that_a_loss_cannot_take_or_does_not_read_are_refused(algorithm, given, told):
    with pytest.raises(mistake.Mistake) as caught:
        config.parse([algorithm, *BASE, *given.split()])
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_said_of_losses_before_torch_is_there_is_true():
    takes = {name: inspect.signature(one.loss).parameters for name, one in algorithms.preferences.items()}
    assert {n for n, p in takes.items() if "label_smoothing" in p} == set(loss_checks.SMOOTHED)
    assert {n for n, p in takes.items() if "divergence" in p} | {"sft"} == set(loss_checks.DIVERGING)
    assert {n for n, a in algorithms.preferences.items() if a.couples == "step"} == set(loss_checks.OVER_STEP)
    alone = {n for n, a in algorithms.preferences.items() if "reference_logprobs" not in a.needs}
    assert alone == set(loss_checks.ALONE)
    for number, name in loss_checks.OF_ONE.items():
        assert [n for n, p in takes.items() if number in p] == [name]
