"""The console command dispatches and tells mistakes in one line."""

import importlib
import importlib.metadata
import types

import pytest

from shell import main


@pytest.mark.parametrize("command", sorted(main.COMMANDS))
def test_a_subcommand_gets_the_words_after_it_and_its_status_is_returned(command, monkeypatch):
    seen = []
    stand_in = types.SimpleNamespace(main=lambda argv: seen.append(argv) or 7)
    monkeypatch.setattr(importlib, "import_module", {main.COMMANDS[command][0]: stand_in}.__getitem__)
    assert main.main([command, "--json"]) == 7
    assert seen == [["--json"]]


def test_an_unknown_subcommand_is_told_with_the_nearest_right_one(capsys):
    assert main.main(["trian"]) == 2
    told = capsys.readouterr().err
    assert "command 'trian' does not exist" in told
    assert told.endswith("Did you mean train?\n")


def test_help_names_every_subcommand(capsys):
    assert main.main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(command in told for command in main.COMMANDS)


def test_no_words_print_the_help_and_are_a_mistake(capsys):
    assert main.main([]) == 2
    assert "usage: espalier" in capsys.readouterr().out


def test_version_is_the_installed_one(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == importlib.metadata.version("espalier-lm")
