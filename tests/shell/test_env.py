"""The report that people paste says what matters and nothing that is theirs alone."""

import json
import sys

import pytest
import torch

from core import attention
from shell import env


def test_json_and_text_say_the_same(capsys):
    assert env.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert env.main([]) == 0
    told = capsys.readouterr().out
    for section, entries in report.items():
        assert section in told.splitlines()
        assert all(str(value) in told for value in entries.values())


def test_the_versions_are_the_imported_ones():
    assert env.report()["packages"]["torch"] == torch.__version__


def test_the_device_and_the_reason_for_it_are_told(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert env.report()["device"]["picked"] == "cpu (no accelerator seen)"


def test_looking_at_the_device_tells_what_each_check_found_and_a_run_does_not_look():
    assert "checks" not in env.report()
    looked = env.report(looking=True)
    assert looked["checks"]["instructions"].startswith("ok: ")
    assert looked["device"]["tree attention"].startswith("blocks")


def test_an_attention_that_fails_its_self_test_is_told(monkeypatch):
    monkeypatch.setattr(attention, "rectangles", lambda query, *_, **__: query)
    looked = env.report(looking=True)
    assert looked["device"]["tree attention"] == "mask"
    assert "attention blocks fails its self-test on cpu" in looked["checks"]["attention"]


def test_a_package_that_is_missing_is_said_to_be(monkeypatch):
    monkeypatch.setattr(env, "PACKAGES", ("no-such-package-as-this",))
    assert env.report()["packages"] == {"no-such-package-as-this": "not installed"}


def test_listed_variables_are_shown_and_all_others_are_not(monkeypatch, capsys):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("HF_TOKEN", "hf_this_is_a_secret")
    assert env.main([]) == 0
    told = capsys.readouterr().out
    assert "3,5" in told
    assert "hf_this_is_a_secret" not in told


def test_an_installation_whose_torch_does_not_import_still_reports(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert env.main([]) == 0
    assert "import failed" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--yaml"], ["--json", "x"]])
def test_an_unknown_word_is_told_in_one_line(words, capsys):
    assert env.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
