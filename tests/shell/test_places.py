"""What a run writes stays apart from what it reads, and takes the place of nobody else's files."""

import json
import shutil

import pytest

from shell import config, mistake, places, resume, written
from tests.shell import runs


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One step, its checkpoint removed."""
    folder = runs.made(tmp_path_factory.mktemp("run") / "out", max_steps=1)
    shutil.rmtree(folder / "checkpoint-1")
    return folder


def chosen(folder, **named):
    """Return options of a run into a folder."""
    values = {"model": "tiny", "dataset": "demo", "output_dir": folder, **named}
    return config.from_values(values.pop("algorithm", "sft"), values)


def told(folder, **named):
    """Return the line that refuses a place before anything is imported or loaded."""
    command = chosen(folder, **named)

    def begun():
        places.placed(command.options)
        resume.find(command, folder, lambda text: None)

    with pytest.raises(mistake.Mistake) as refused:
        begun()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def refused(folder, capsys, **named):
    """Return the line that refuses a run which must leave everything as it was."""
    before = runs.content(folder)
    assert runs.run(folder, **named) == 2
    assert runs.content(folder) == before
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("algorithm", "option"),
    [
        ("sft", "model"),
        ("sft", "tokenizer"),
        ("sft", "init_from"),
        ("dpo", "ref_model"),
        ("distill", "teacher_model"),
    ],
)
@pytest.mark.parametrize("inside", ["model", "checkpoint-3"])
def test_what_a_run_starts_from_is_not_in_its_own_folder(tmp_path, algorithm, option, inside):
    (tmp_path / "out" / inside).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    line = told(tmp_path / "out", algorithm=algorithm, **{option: tmp_path / "link" / inside})
    assert line.startswith(f"{option}: ")
    assert "another output_dir" in line


@pytest.mark.parametrize("name", [*written.FILES, "prepared/rows.jsonl", "model/rows.jsonl"])
@pytest.mark.parametrize("option", ["dataset", "eval_dataset"])
def test_rows_are_not_read_from_files_that_the_run_writes(tmp_path, option, name):
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text('{"text": "precious"}\n')
    for named in (file, [{"path": str(file)}]):
        assert told(tmp_path / "out", **{option: named}).startswith(f"{option}: ")
    assert file.read_text() == '{"text": "precious"}\n'


def test_rows_are_not_read_from_the_output_folder_as_a_whole(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    assert "output_dir, too" in told(tmp_path, dataset=tmp_path)
    places.placed(chosen(tmp_path, dataset=tmp_path / "rows.jsonl").options)


def test_a_run_from_its_own_model_is_refused_before_torch_and_loses_nothing(done, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    shutil.copytree(done / "model", tmp_path / "out" / "model")
    assert "lies in output_dir" in refused(
        tmp_path / "out", capsys, model=tmp_path / "out" / "model", max_steps=1
    )


@pytest.mark.parametrize("name", ["model", "metrics.jsonl", "completions.jsonl", "run.json"])
def test_what_no_run_wrote_is_not_written_over(tmp_path, name):
    mine = tmp_path / name / "mine.txt" if name == "model" else tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    for resuming in ("auto", "force"):
        assert name in told(tmp_path, resume=resuming)
    (tmp_path / "config.yaml").write_text("model: mine\n")
    assert name in told(tmp_path)


@pytest.mark.parametrize("name", [*written.FILES, *written.FOLDERS])
def test_a_folder_in_the_place_of_a_file_and_the_reverse_are_told(tmp_path, name):
    (tmp_path / name).mkdir() if name in written.FILES else (tmp_path / name).write_text("x")
    assert f"{name} there is no" in told(tmp_path)


def test_a_link_in_the_place_of_the_model_is_told(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "elsewhere")
    assert "model there is a link, and a run writes a folder" in told(tmp_path)


def test_a_finished_run_without_checkpoints_is_neither_repeated_nor_overwritten(done, capsys):
    before = runs.content(done)
    assert runs.run(done, max_steps=1) == 0
    assert "is finished (1 steps)" in capsys.readouterr().err
    for named in (
        {"learning_rate": 1},
        {"learning_rate": 1, "resume": "force"},
        {"seed": 5, "resume": "force"},
    ):
        line = refused(done, capsys, max_steps=1, **named)
        name = next(iter(named))
        assert f"of a run with {name} " in line
    assert "of a run with algorithm sft; dpo came" in told(done, algorithm="dpo")
    assert "without its checkpoints, so 2 cannot be reached" in refused(done, capsys, max_steps=2)
    assert runs.content(done) == before


def test_a_model_whose_run_did_not_end_is_not_overwritten(done, tmp_path):
    shutil.copytree(done, tmp_path / "out")
    (tmp_path / "out" / "run.json").unlink()
    assert "holds a model and no checkpoint" in told(tmp_path / "out")


def test_a_config_written_by_hand_is_kept_and_files_beside_the_model_are(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    by_hand = "# mine\nmodel: tiny\n"
    (tmp_path / "out" / "config.yaml").write_text(by_hand)
    runs.made(tmp_path / "out", max_steps=1)
    assert "is now config.yaml.old-1" in capsys.readouterr().err
    assert (tmp_path / "out" / "config.yaml.old-1").read_text() == by_hand
    (tmp_path / "out" / "model" / "README.md").write_text("mine")
    runs.made(tmp_path / "out", max_steps=2)
    assert "it is now model.old-1" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.old-1" / "README.md").read_text() == "mine"
    assert json.loads((tmp_path / "out" / "run.json").read_text())["step"] == 2
    runs.made(tmp_path / "out", max_steps=3)
    assert not (tmp_path / "out" / "model.old-2").exists()
    assert not (tmp_path / "out" / "config.yaml.old-2").exists()


def test_the_base_beside_an_adapter_takes_the_place_of_nobody_elses(tmp_path, capsys):
    adapter = {"use_peft": True, "model": "tiny"}
    mine = tmp_path / "out" / "base" / "config.json"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert "lies in output_dir" in told(tmp_path / "out", init_from=mine.parent, **adapter)
    for steps in (1, 2):
        runs.made(tmp_path / "out", max_steps=steps, **adapter)
    assert capsys.readouterr().err.count("it is now base.old-") == 1
    assert (tmp_path / "out" / "base.old-1" / "config.json").read_text() == "mine"
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "base").touch()
    assert "base there is no folder" in told(tmp_path / "file", **adapter)
    places.placed(chosen(tmp_path / "file").options)
