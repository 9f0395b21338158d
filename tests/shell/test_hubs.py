"""Adapters that are named by hub ids: what the cache holds is read as a folder, what it lacks is fetched."""

import json
import pathlib
import shutil

import pytest
from huggingface_hub import constants, errors

from adapters import peft_format
from shell import adapter, config, evaluate, hubs, merge, mistake, sample
from tests.shell import runs
from tests.shell.test_beside import DISTILLED
from tests.shell.test_low_rank import LORA

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def kept(cache, name, folder, revision="main"):
    """Lay a folder into a cache as the hub's client does: blobs, and links to them below a commit."""
    place = cache / f"models--{name.replace('/', '--')}"
    shot = place / "snapshots" / COMMIT
    for part in (place / "blobs", place / "refs", shot):
        part.mkdir(parents=True)
    (place / "refs" / revision).write_text(COMMIT)
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = place / "blobs" / f"{number:040x}"
        shutil.copy(file, blob)
        (shot / file.name).symlink_to(pathlib.Path("..", "..", "blobs", blob.name))
    return shot


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    return runs.made(tmp_path_factory.mktemp("started") / "out", **LORA | {"max_steps": 1})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache that is looked into, and no hub beyond it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


def test_an_adapter_in_the_cache_is_started_from_evaluated_merged_and_taught_by(
    tmp_path, started, cache, capsys
):
    shot = kept(cache, "some/adapter", started / "model")
    folder = runs.made(tmp_path / "out", model="some/adapter", learning_rate=0, max_steps=1)
    assert runs.apart(runs.weights(folder), runs.weights(started)) == 0.0
    named = json.loads((folder / "model" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(started / "base")
    rows = ("--dataset", "demo", "--dataset_split", "test[:4]", "--max_length", "64")
    found = []
    for model in ("some/adapter", str(started / "model")):
        capsys.readouterr()
        assert evaluate.main([model, *rows]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]
    assert merge.main(["some/adapter", str(tmp_path / "merged")]) == 0
    plan = {**DISTILLED, "model": started / "base", "tokenizer": started / "model"}
    taught = [
        runs.metrics(runs.made(tmp_path / str(i), **plan, teacher_model=name))
        for i, name in enumerate(("some/adapter", started / "model"))
    ]
    assert taught[0] == taught[1]
    assert adapter.is_one("some/adapter")
    assert hubs.folder("some/adapter") == shot


def test_a_revision_is_of_the_adapter_and_its_base_has_the_one_that_it_says(tmp_path, started, cache):
    shutil.copytree(started / "model", tmp_path / "model")
    file = tmp_path / "model" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"revision": "v3"}))
    shot = kept(cache, "one", tmp_path / "model", revision="v1")
    line = ["sft", "--model", "one", "--dataset", "demo"]
    chosen = config.parse([*line, "--revision", "v1"]).options
    assert (chosen.model, chosen.revision, chosen.init_from) == (str(started / "base"), "v3", str(shot))
    assert config.parse(line).options.model == "one"
    reference = ["dpo", "--model", "tiny", "--dataset", "demo", "--ref_model", "one"]
    assert config.parse(reference).options.ref_model == "one"


@pytest.mark.parametrize("name", ["no/such", "tiny", ".", "a b", "x/y/z", "a..b/--c"])
def test_what_is_no_adapter_is_left_to_whoever_loads_it(cache, name):
    assert hubs.folder(name) is None
    assert not hubs.fetched(config.Options(model=name, ref_model=name, teacher_model=name))


def test_a_whole_model_in_the_cache_is_not_asked_for_again(started, cache, monkeypatch):
    kept(cache, "some/base", started / "base")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", None)
    assert not hubs.fetched(config.Options(model="some/base"))
    assert not adapter.is_one("some/base")


def test_an_adapter_that_the_cache_lacks_is_fetched_and_the_options_are_read_again(
    started, cache, monkeypatch, capsys
):
    asked = []

    def download(name, file, *, revision):
        if name == "whole/model":
            raise errors.EntryNotFoundError("there is no adapter_config.json")
        asked.append((name, file, revision))
        kept(cache, name, started / "model")

    def snapshot(name, *, revision, allow_patterns):
        asked.append((name, revision, "adapter_*" in allow_patterns))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    line = ["sft", "--model", "far/adapter", "--dataset", "demo"]
    command = config.fetched(lambda: config.parse(line))
    assert (command.options.model, command.options.lora_r) == (str(started / "base"), 4)
    assert asked == [("far/adapter", peft_format.CONFIG, None), ("far/adapter", None, True)]
    asked.clear()
    shutil.rmtree(cache / "models--far--adapter")
    short = ("--prompt", "x", "--max_completion_length", "1", "--temperature", "0")
    for model in ("far/adapter", str(started / "model")):
        assert sample.main([model, *short]) == 0
    assert len(asked) == 2
    assert len({*capsys.readouterr().out.splitlines()}) == 1
    whole = config.fetched(lambda: config.parse(["sft", "--model", "whole/model", "--dataset", "demo"]))
    assert whole.options.model == "whole/model"


def test_a_hub_that_cannot_be_reached_is_told_in_a_line_with_the_option(cache, monkeypatch):
    def download(*args, **more):
        raise errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(mistake.Mistake, match=r"teacher_model far/away: .* the hub cannot be reached"):
        hubs.fetched(config.Options(model="tiny", teacher_model="far/away"))
