"""`import espalier as es` shows every public name, and imports it when asked."""

import subprocess
import sys

import pytest

import espalier


@pytest.mark.parametrize("name", sorted(espalier.PUBLIC))
def test_every_public_name_resolves_to_what_the_table_says(name):
    module, _, member = espalier.PUBLIC[name].partition(":")
    found = getattr(espalier, name)
    assert found is (getattr(sys.modules[module], member) if member else sys.modules[module])


def test_an_unknown_name_is_refused_with_the_right_ones():
    with pytest.raises(AttributeError, match=r"has no 'prefix_trie'; its names are .*prefix_tree"):
        _ = espalier.prefix_trie


def test_names_are_offered_for_completion():
    assert set(espalier.PUBLIC) <= set(dir(espalier))


def test_a_folder_that_shadows_the_core_is_told_at_the_first_name(tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "__init__.py").touch()
    code = "import espalier; espalier.prefix_tree"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "The current folder's own core hides Espalier's" in done.stderr


def test_a_folder_that_shadows_the_shell_is_told_before_its_code_runs(tmp_path):
    (tmp_path / "shell").mkdir()
    (tmp_path / "shell" / "__init__.py").write_text("raise SystemExit('a stranger ran')")
    code = "import espalier; espalier.prefix_tree"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "ImportError: package shell: found" in done.stderr
    assert "a stranger ran" not in done.stderr
