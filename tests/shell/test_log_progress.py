import io

import pytest

from shell import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def test_only_a_terminal_that_nobody_automates_gets_a_bar(monkeypatch):
    assert progress.interactive(Terminal())
    assert not progress.interactive(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not progress.interactive(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("CI", "true")
    assert not progress.interactive(Terminal())


def test_without_a_terminal_logged_steps_are_plain_lines_with_the_time_left():
    seconds = iter([100.0, 102.0, 104.0])
    stream = io.StringIO()
    display = progress.Display(stream=stream, clock=lambda: next(seconds))
    display.start(100)
    display.step(1, {"loss": 2.34567, "perf/trained_tok_s": 12345.6, "grad_norm": 1.0})
    display.step(2)
    display.step(3, {"loss": float("nan")})
    display.close()
    assert stream.getvalue() == "step 1/100  loss 2.3457  12,346 tok/s\nstep 3/100  loss nan  left 0:03:14\n"


def test_time_left_counts_the_steps_of_this_process_only():
    seconds = iter([0.0, 10.0])
    stream = io.StringIO()
    display = progress.Display(stream=stream, clock=lambda: next(seconds))
    display.start(100, done=89)
    display.step(90)
    display.step(91, {"loss": 1.0})
    assert stream.getvalue() == "step 91/100  loss 1.0000  left 0:01:30\n"


def test_a_terminal_gets_a_bar_that_ends_at_the_last_step():
    stream = Terminal()
    display = progress.Display(stream=stream)
    display.start(12, done=10)
    display.step(11)
    display.note("2 rows were dropped [bold]as they are[/bold]")
    display.step(12, {"loss": 0.5})
    display.close()
    shown = stream.getvalue()
    assert "12/12" in shown
    assert "loss 0.5000" in shown
    assert "2 rows were dropped [bold]as they are[/bold]" in shown


def test_a_note_is_told_once_and_kept():
    stream = io.StringIO()
    display = progress.Display(stream=stream)
    for text in ("a", "b", "a"):
        display.note(text)
    assert stream.getvalue() == "a\nb\n"
    assert display.notes == ["a", "b"]


def test_other_ranks_show_nothing():
    stream = Terminal()
    display = progress.Display(shown=False, stream=stream)
    display.start(2)
    display.step(1, {"loss": 1.0})
    display.note("kept")
    display.close()
    assert stream.getvalue() == ""
    assert display.notes == ["kept"]


def test_a_run_of_unknown_length_has_no_time_left():
    stream = io.StringIO()
    display = progress.Display(stream=stream)
    display.start(None)
    display.step(1, {"loss": 1.0})
    display.step(2, {"loss": 1.0})
    assert stream.getvalue() == "step 1  loss 1.0000\nstep 2  loss 1.0000\n"
