"""The page of algorithms is current, and every loss stands in the tables that test all losses."""

import inspect

import pytest

from core.losses import margins
from shell import config, methods
from tests.api import algorithms as page
from tests.core import test_policy_loops, test_preference
from tests.properties import test_algorithms, test_policy_algorithms

SHARED = (margins,)
"""Modules of what losses are made of; no loss stands there."""


def every():
    """Return each public loss, and whether it is put around others."""
    for module in page.modules():
        for function in page.of_module(module).values():
            yield function, page._wraps(function)


def reached(tables):
    """Return the functions that the losses of some algorithms are made of."""
    return {function for one in tables for function, _ in page.chain(one.loss)}


def test_the_page_of_algorithms_is_what_its_command_prints():
    assert page.FILE.read_text() == page.page(), "run: python -m tests.api.algorithms > docs/algorithms.md"


def test_every_loss_stands_in_the_table_of_all_properties():
    lacking = {f.__name__ for f, wraps in every() if not wraps} - {
        f.__name__ for f in reached(test_algorithms.ALL.values())
    }
    assert not lacking, f"give each an Algorithm in core/algorithms.py: {lacking}"


def test_all_that_is_put_around_losses_is_tested_around_one():
    composed = [*test_policy_algorithms.MADE.values(), *test_preference.COMPOSED.values()]
    seen = reached(composed) | reached(test_algorithms.ALL.values())
    seen |= {f for loss, _ in test_policy_loops.LOSSES.values() for f, _ in page.chain(loss)}
    lacking = {f.__name__ for f, wraps in every() if wraps} - {f.__name__ for f in seen}
    assert not lacking, f"put each around a loss in tests/properties/test_policy_algorithms.py: {lacking}"


def test_every_loss_has_right_values():
    assert [name for name, files in page.right_values().items() if not files] == []


def test_modules_without_losses_have_none():
    assert [page.of_module(module) for module in SHARED] == [{}]
    assert all(inspect.getdoc(function) for function, _ in every())


def test_every_algorithm_is_on_the_page_and_has_its_source():
    told = page.sources()
    for name, one in page.named().items():
        assert f"`{name}`" in page.FILE.read_text()
        assert told.get(name) or page._source(list(page.chain(one.loss))[-1][0])


@pytest.mark.parametrize("name", page.named())
def test_what_the_page_says_to_run_is_the_published_algorithm_number_by_number(name):
    words, wanted = page.run(name), page.named()[name]
    assert words
    few = ("--model", "tiny", "--dataset", "demo")
    few += ("--teacher_model", "tiny") if name == "distill" else ()
    made = methods.BUILT[words[0]](config.parse([words[0], *few, *words[1:]]).options)
    assert page.parts(made.loss) == page.parts(wanted.loss)
    assert page.parts(made.reduce) == page.parts(wanted.reduce)
    assert (made.columns is None) == (wanted.columns is None)
    assert not wanted.columns or page.parts(made.columns) == page.parts(wanted.columns)
    assert (made.rows, made.needs, made.couples) == (wanted.rows, wanted.needs, wanted.couples)


def test_a_new_line_of_the_record_of_algorithms_is_on_the_page(monkeypatch):
    from core import algorithms

    monkeypatch.setattr(algorithms, "brand_new", algorithms.sft.evolve(), raising=False)
    assert "| `brand_new` |" in page.page()
