"""Distillation from end to end: on whose answers, from which teacher, and how a run goes on."""

import json
import shutil

import pytest
import torch
import transformers

from core import keys
from shell import checkpoint, config, loop, prompts, rounds, sources, teachers, tiny
from tests import warm
from tests.shell import runs, words

SMALL = {
    "algorithm": "distill", "teacher_model": "tiny", "max_completion_length": 8, "max_steps": 3,
    "temperature": 0.8,
}  # fmt: skip
HELD_OUT = {"eval_dataset": "demo", "eval_split": "test[:5]"}
TALKS = [("Name a color.", "Red."), ("Say hi.", "Hi!"), ("Count.", "1, 2."), ("Is it wet?", "Yes.")]
FORMATS = {
    "messages": [{"messages": [words.user(q), words.assistant(a)]} for q, a in TALKS],
    "from and value": [
        {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in TALKS
    ],
    "prompt and completion": [{"prompt": q, "completion": a} for q, a in TALKS],
    "prompt and completion of messages": [
        {"prompt": [words.user(q)], "completion": [words.assistant(a)]} for q, a in TALKS
    ],
}


def asked(**more):
    """Return a small run's options; where the student answers nothing, no length of its answers."""
    few = {n: v for n, v in SMALL.items() if n != "max_completion_length" or more.get("lmbda") != 0}
    return {**few, **more}


def made(folder, **more):
    return runs.made(folder, **asked(**more))


def small(path, *, vocab=320, seed=0, **changes):
    """Write a small model with the built-in tokenizer."""
    sizes = {
        "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "eos_token_id": 258, "max_position_embeddings": 512, **changes,
    }  # fmt: skip
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A folder with a model of other sizes than the student's."""
    return small(tmp_path_factory.mktemp("teacher") / "model")


@pytest.mark.parametrize("lmbda", [0.0, 0.5, 1.0])
def test_a_student_comes_nearer_to_its_teacher_on_whoever_answers(tmp_path, lmbda):
    folder = made(tmp_path / "out", lmbda=lmbda, max_steps=4, **HELD_OUT, eval_on_start=True, eval_steps=4)
    lines = runs.metrics(folder)
    assert lines[-1]["eval_loss"] < 0.5 * lines[0]["eval_loss"]
    assert all({"loss", "grad_norm", "entropy", "num_tokens"} <= line.keys() for line in lines[1:])
    assert not any(name for line in lines for name in line if "reward" in name)
    assert ("completions/mean_length" in lines[1]) == (lmbda > 0)
    assert ("on_policy_frac" in lines[1]) == (lmbda == 0.5)
    assert (folder / "completions.jsonl").exists() == (lmbda > 0)


@pytest.mark.parametrize("numbers", [{"beta": 0.0}, {"beta": 0.5}, {"loss_top_k": 4}, {"temperature": 2.0}])
def test_every_number_of_the_divergence_reaches_it(tmp_path, numbers, teacher):
    plan = {"lmbda": 0.0, "max_steps": 1, "teacher_model": teacher}
    base, other = (made(tmp_path / str(i), **plan, **more) for i, more in enumerate(({}, numbers)))
    losses = [runs.metrics(folder)[0]["loss"] for folder in (base, other)]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    assert min(losses) > 0


@pytest.mark.parametrize("lmbda", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_of_rows_with_answers_is_a_prompt_and_a_completion(tmp_path, kind, lmbda):
    file = words.write(tmp_path / "rows.jsonl", FORMATS[kind])
    plan = {"dataset": file, "dataset_split": "train", "batch_size": 4, "max_steps": 1, "lmbda": lmbda}
    folder = made(tmp_path / "out", **plan)
    rows = runs.facts(folder)["rows"]["train"]
    assert (rows["read"], rows["used"]) == (4, 4)
    if lmbda == 0.0:
        ends = sum(len(answer) + 1 for _, answer in TALKS)
        assert rows["trained"] == ends + (4 if kind != "prompt and completion" else 0)


def test_rows_of_conversations_train_the_same_tokens_as_rows_of_prompts(tmp_path):
    found = {}
    for kind in ("messages", "from and value", "prompt and completion of messages"):
        file = words.write(tmp_path / f"{len(found)}.jsonl", FORMATS[kind])
        plan = {"dataset": file, "dataset_split": "train", "batch_size": 4, "lmbda": 0.0}
        found[kind] = runs.metrics(made(tmp_path / kind, **plan))
    assert len({json.dumps(lines) for lines in found.values()}) == 1


def planned(tmp_path, lmbda, num=400):
    rows = [{"prompt": f"{n} ", "completion": str(n)} for n in range(num)]
    opened = prompts.look(sources.find(str(words.write(tmp_path / "rows.jsonl", rows))))
    bound = prompts.rules(opened, tokenizer=tiny.tokenizer())
    kept = prompts.prepare(opened, bound, folder=tmp_path / "kept")
    return rounds.Plan(
        prompts=kept, batch_size=8, num_generations=1, steps_per_generation=1, num_iterations=1,
        max_tokens=4, seed=None, lmbda=lmbda,
    )  # fmt: skip


def test_the_student_answers_its_part_of_the_rows_by_draws_that_hang_on_key_and_row_alone(tmp_path):
    plan = planned(tmp_path, 0.3)
    drawn = [plan.writes(keys.key(1), number) for number in range(2000)]
    assert drawn == [plan.writes(keys.key(1), number) for number in range(2000)]
    assert drawn != [plan.writes(keys.key(2), number) for number in range(2000)]
    assert sum(drawn) == pytest.approx(600, abs=80)
    for lmbda in (0.0, 1.0):
        assert {planned(tmp_path, lmbda).writes(keys.key(1), n) for n in range(200)} == {bool(lmbda)}


def test_a_mixed_step_trains_what_the_student_wrote_and_what_the_rows_bring(tmp_path, monkeypatch):
    seen, take = [], loop.feed.packs

    def packs(samples, *args, **more):
        seen.append([bytes(t for t in one.tokens.tolist() if t < 256) for one in samples])
        return take(samples, *args, **more)

    monkeypatch.setattr(loop.feed, "packs", packs)
    rows = [{"prompt": f"<{n}>", "completion": f"[{n}]"} for n in range(8)]
    file = words.write(tmp_path / "rows.jsonl", rows)
    plan = {"dataset": file, "dataset_split": "train", "batch_size": 8, "max_steps": 1, "lmbda": 0.5}
    folder = made(tmp_path / "out", **plan)
    (step,) = seen
    own = [text for text in step if text.endswith(b"]") and b">[" in text]
    written = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    assert len(step) == 8
    assert {text[1:2] for text in step} == {str(n).encode() for n in range(8)}
    assert 0 < len(own) < 8
    assert len(own) + len(written) == 8
    assert runs.metrics(folder)[0]["on_policy_frac"] == len(written) / 8
    assert not {row["prompt"].encode() for row in written} & {text[:3] for text in own}


@pytest.mark.parametrize("lmbda", [0.5])
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_is_not(tmp_path, lmbda):
    plan = asked(lmbda=lmbda, max_steps=8, logging_steps=3)
    code, out, err = warm.program(
        "tests.shell.killed", str(tmp_path), "3", "lines=3", "moments=1", OPTIONS=json.dumps(plan)
    )
    assert code == 0, err
    assert out.split() == ["lines", "3", "moments", "1"]


def test_two_ranks_train_the_weights_of_one_process(tmp_path):
    options = asked(lmbda=0.5, max_steps=2, batch_size=6, **HELD_OUT)
    alone = runs.made(tmp_path / "alone", **options)
    (tmp_path / "plan.json").write_text(json.dumps({str(tmp_path / "together"): options}))
    code, _, err = warm.program("tests.shell.ranked", str(tmp_path / "plan.json"), ranks=2)
    assert code == 0, err
    assert runs.apart(runs.weights(tmp_path / "together"), runs.weights(alone)) < 1e-5
    losses = [runs.metrics(tmp_path / name)[-1]["eval_loss"] for name in ("alone", "together")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("packing", ["tree", "none"])
@pytest.mark.parametrize("budget", [None, 24])
def test_neither_packing_nor_budget_nor_pieces_change_a_step_in_float64(tmp_path, packing, budget, teacher):
    plan = {"dtype": "float64", "lmbda": 0.0, "max_steps": 1, "teacher_model": teacher, "beta": 0.5}
    base = runs.metrics(made(tmp_path / "base", **plan))[0]
    more = {} if budget is None else {"token_budget": budget}
    found = runs.metrics(made(tmp_path / "out", **plan, packing=packing, **more))[0]
    for name in ("loss", "grad_norm", "entropy"):
        assert found[name] == pytest.approx(base[name], rel=1e-10)


def test_a_teacher_whose_head_has_more_rows_teaches_the_tokens_that_both_have(tmp_path):
    plan = {"lmbda": 0.0, "max_steps": 1}
    plain, padded = (small(tmp_path / str(rows), vocab=rows) for rows in (320, 384))
    wide = transformers.LlamaForCausalLM.from_pretrained(padded)
    narrow = transformers.LlamaForCausalLM.from_pretrained(plain)
    narrow.resize_token_embeddings(384)
    narrow.save_pretrained(padded)
    assert wide.config.vocab_size == 384
    one, other = (made(tmp_path / f"out{path.name}", teacher_model=path, **plan) for path in (plain, padded))
    assert runs.metrics(one)[0]["loss"] == pytest.approx(runs.metrics(other)[0]["loss"], rel=1e-5)


def test_a_teacher_in_bfloat16_teaches_a_student_in_float32(tmp_path, teacher):
    plan = {"lmbda": 0.0, "max_steps": 1, "teacher_model": teacher}
    exact = made(tmp_path / "exact", **plan)
    narrow = made(tmp_path / "narrow", teacher_model_init_kwargs="{torch_dtype: bf16}", **plan)
    losses = [runs.metrics(folder)[0]["loss"] for folder in (exact, narrow)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def another_tokenizer(path):
    """Give a model folder a tokenizer in which two tokens changed places."""
    file = path / "tokenizer.json"
    told = json.loads(file.read_text())
    vocab = told["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    file.write_text(json.dumps(told))
    return path


def without_weights(path):
    (path / "model.safetensors").unlink()
    return path


def without_tokenizer(path):
    for file in path.glob("tokenizer*"):
        file.unlink()
    return path


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (another_tokenizer, "has another tokenizer: 'A' is id 65 for the student and id 66 there"),
        (without_weights, "has a config and no weights"),
        (without_tokenizer, "has no tokenizer that can be loaded"),
        (lambda path: path / "nowhere", "cannot be loaded"),
        (lambda path: small(path, vocab=200), "ids go to 258; the student has embeddings for 320"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_before_any_model_is_loaded(
    tmp_path, capsys, monkeypatch, change, told
):
    monkeypatch.setattr("shell.choose.model", None)
    path = change(small(tmp_path / "teacher"))
    assert runs.run(tmp_path / "out", **asked(teacher_model=path)) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert "teacher_model" in err
    assert told in err
    assert "--model" not in err


def test_a_teacher_that_holds_fewer_tokens_bounds_the_length_or_is_refused(tmp_path, capsys):
    path = small(tmp_path / "teacher", max_position_embeddings=50)
    assert runs.run(tmp_path / "out", **asked(teacher_model=path, lmbda=0.0)) == 2
    assert "holds 50" in capsys.readouterr().err
    plan = {"max_length": "null", "lmbda": 0.0, "max_steps": 1, "truncation": "drop"}
    assert runs.run(tmp_path / "out", **asked(teacher_model=path, **plan)) == 0
    assert runs.facts(tmp_path / "out")["rows"]["train"]["dropped"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"teacher_model": "null"}, "--teacher_model BASE"),
        ({"beta": 1.5}, "0 (forward) to 1 (reverse)"),
        ({"lmbda": 1.5}, "at most 1"),
        ({"lmbda": 0.5, "streaming": True}, "prompts, which are read whole"),
        (
            {"lmbda": 0.5, "dataset": "asked.jsonl", "dataset_split": "train"},
            "the rows bring 50% of the answers, so a column completion",
        ),
        ({"lmbda": 0.0, "dataset": "asked.jsonl", "dataset_split": "train"}, "the columns are prompt"),
        ({"lmbda": 0.0, "num_generations": 2}, "the student answers nothing"),
        ({"lmbda": 0.5, "num_generations": 2}, "a row is answered once"),
        ({"batch_size": 5, "num_generations": 2}, "whole groups"),
        ({"teacher_model_init_kwargs": "{load_in_8bit: true}"}, "load_in_8bit came"),
        ({"teacher_model_init_kwargs": "{dtype: int8}"}, "dtype int8 came"),
        ({"completion_only_loss": False}, "the student's answers are what is trained"),
        ({"reward_funcs": "length"}, "not read by distill"),
        ({"use_teacher_server": True}, "it runs here"),
    ],
)
def test_what_cannot_be_is_refused_before_any_model_is_loaded(tmp_path, capsys, monkeypatch, options, told):
    monkeypatch.setattr("shell.choose.model", None)
    monkeypatch.chdir(tmp_path)
    words.write(tmp_path / "asked.jsonl", [{"prompt": "a"}])
    assert runs.run(tmp_path / "out", **asked(**options)) == 2
    assert told in capsys.readouterr().err


def test_a_beta_near_an_end_is_cautioned_against(tmp_path, capsys):
    made(tmp_path / "out", beta=0.999, lmbda=0.0, max_steps=1)
    assert "beta 0.999 is within 0.01 of 1, where the divergence shrinks" in capsys.readouterr().err


def test_a_run_does_not_go_on_under_another_teacher(tmp_path, capsys):
    path = small(tmp_path / "teacher")
    plan = {"teacher_model": path, "lmbda": 0.0, "save_steps": 1}
    made(tmp_path / "out", **plan)
    shutil.rmtree(tmp_path / "out" / "checkpoint-3")
    small(path, seed=1)
    assert runs.run(tmp_path / "out", **asked(**plan)) == 2
    assert "holds other weights than when the run" in capsys.readouterr().err
    assert runs.run(tmp_path / "out", **asked(**plan, resume="force")) == 0


def test_neither_checkpoint_nor_model_holds_the_teacher(tmp_path, teacher):
    folder = made(tmp_path / "out", lmbda=0.0, teacher_model=teacher)
    student = set(runs.weights(folder))
    held = checkpoint.load(folder / "checkpoint-3")
    assert {name.removeprefix("params/") for name in held.tensors if name.startswith("params/")} == student
    assert len(held.values["teacher"]) == 32


def test_rows_can_be_streamed_and_several_completions_drawn(tmp_path):
    made(tmp_path / "stream", lmbda=0.0, streaming=True)
    folder = made(tmp_path / "several", num_generations=3)
    lines = (folder / "completions.jsonl").read_text().splitlines()
    assert len({json.dumps(json.loads(line)["prompt"]) for line in lines}) * 3 == len(lines) == 18


def test_keys_of_other_peoples_files_are_options_here(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model_name_or_path: tiny\nteacher_model_name_or_path: big\nteacher_model_revision: v1\n"
        "teacher_model_init_kwargs: {dtype: bfloat16, revision: null}\n"
        "dataset_name: demo\nmax_new_tokens: 9\nlmbda: 0.5\n"
        "beta: 0.5\nloss_top_k: 4\nloss_add_tail: true\nseq_kd: false\nuse_teacher_server: false\n"
    )
    chosen = config.parse(["distill", "--config", str(file), "--output_dir", "x"]).options
    assert (chosen.teacher_model, chosen.teacher_model_revision) == ("big", "v1")
    assert (chosen.max_completion_length, chosen.lmbda, chosen.beta, chosen.loss_top_k) == (9, 0.5, 0.5, 4)
    assert chosen.disable_dropout
    usual = config.parse(
        ["distill", *["--model", "a", "--teacher_model", "b", "--dataset", "c", "--output_dir", "d"]]
    ).options
    assert (usual.lmbda, usual.beta, usual.loss_top_k, usual.num_generations) == (1.0, 1.0, 0, 1)
    assert teachers._asked(chosen).dtype == "bfloat16"
