"""Reward functions by name: what people ask for again and again, each a few lines.

Each takes some of what `rewards.score` hands over and returns one number a completion, or None to
abstain. A column of the dataset goes to the parameter of its name, so numbers of a function are not
parameters of it: they are bound by the maker of the function.
"""

import fractions
import importlib.util
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shell import mistake

Function = Callable[..., Any]
Scores = list[float | None]

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?|[-+]?\.\d+")
_THINK = re.compile(r"<think>(?!.*<think>).*?</think>.*", re.DOTALL)
_FORMAT = re.compile(r"\s*<think>(?!.*<think>).*?</think>\s*<answer>(?!.*<answer>).*?</answer>\s*", re.DOTALL)


def text(completion: Any) -> str:
    """Return what a completion says, be it text or messages.

    >>> text([{"role": "assistant", "content": "4"}])
    '4'
    """
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def length(target: int = 200) -> Function:
    """Make the reward of completions near a length.

        -|target - characters| / 100

    Args:
        target: characters.
    """

    def rewarded(completions: Sequence[Any]) -> Scores:
        return [-abs(target - len(text(each))) / 100 for each in completions]

    return rewarded


def exact_answer(completions: Sequence[Any], answer: Sequence[Any]) -> Scores:
    r"""Give 1 where the completion's answer is the row's `answer`, else 0.

    A completion's answer is the inside of its last `\boxed{...}`; without one the last number, where the
    row's answer is a number, and else the whole text. `42`, `42.0` and `42` after `####` are the same answer.
    A row without one abstains.

    >>> exact_answer(["It is 41, no, 42.", r"\boxed{x}", "?"], ["42", "y", None])
    [1.0, 0.0, None]
    """
    return [
        None if wanted is None else float(_same(_answer(text(each), wanted), wanted))
        for each, wanted in zip(completions, answer, strict=True)
    ]


def think_format(completions: Sequence[Any]) -> Scores:
    """Give 1 where the completion begins with one `<think>...</think>`, else 0."""
    return [float(_THINK.fullmatch(text(each)) is not None) for each in completions]


def tagged_format(completions: Sequence[Any]) -> Scores:
    """Give 1 where the completion is one `<think>...</think>` and one `<answer>...</answer>`, else 0."""
    return [float(_FORMAT.fullmatch(text(each)) is not None) for each in completions]


def repetition(size: int = 3) -> Function:
    """Make the penalty of saying the same again.

        -(1 - distinct n-grams / n-grams), over words

    Args:
        size: words of an n-gram; a completion that is shorter gets 0.
    """

    def rewarded(completions: Sequence[Any]) -> Scores:
        return [_repeated(text(each).lower().split(), size) for each in completions]

    return rewarded


def overlong(limit: int, margin: int | None = None) -> Function:
    """Make the penalty of completions that come near the limit.

        0 up to limit - margin tokens, from there falling in a line to -1 at the limit

    Yu et al. 2025, DAPO (arXiv:2503.14476), eq. 13.

    Args:
        limit: most tokens of a completion.
        margin: tokens; None: a fifth of the limit, as in the paper.
    """
    width = max(1, limit // 5) if margin is None else margin

    def rewarded(completion_ids: Sequence[Sequence[int]]) -> Scores:
        return [-min(1.0, max(0.0, (len(ids) - (limit - width)) / width)) for ids in completion_ids]

    return rewarded


def reasoning_accuracy() -> Function:
    """Make the reward of answers that a checker of mathematics finds equal to the row's `solution`.

    What stands before `</think>` is left out; a completion that never ends to think gets 0. A solution that
    the checker cannot read abstains.

    Raises:
        Mistake: the checker is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise mistake.Mistake(
            "reward_funcs: reasoning_accuracy needs the package math-verify, which is not installed; "
            "pip install math-verify, or take exact_answer."
        )
    import math_verify  # pyright: ignore[reportMissingImports] -- an extra

    def rewarded(completions: Sequence[Any], solution: Sequence[Any]) -> Scores:
        # The checker's time limit is a signal, which only the main thread can set.
        seconds: Any = 5 if threading.current_thread() is threading.main_thread() else None
        scores: Scores = []
        for each, wanted in zip(completions, solution, strict=True):
            gold = math_verify.parse(str(wanted), parsing_timeout=seconds)
            _, ended, said = text(each).rpartition("</think>")
            found = math_verify.parse(said, parsing_timeout=seconds) if ended else []
            scores.append(float(math_verify.verify(gold, found, timeout_seconds=seconds)) if gold else None)
        return scores

    return rewarded


def makers(limit: int) -> Mapping[str, Callable[[], Function]]:
    """Return what makes each function that has a name.

    Args:
        limit: most tokens of a completion.
    """
    return {
        "exact_answer": lambda: exact_answer,
        "format": lambda: tagged_format,
        "length": length,
        "overlong": lambda: overlong(limit),
        "reasoning_accuracy": reasoning_accuracy,
        "repetition": repetition,
        "think_format": lambda: think_format,
    }


def _repeated(words: Sequence[str], size: int) -> float:
    """Return the penalty of one text."""
    grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def _answer(said: str, wanted: Any) -> str:
    """Return the answer that a completion gives."""
    boxed = _boxed(said)
    if boxed is not None:
        return boxed
    numbers = _NUMBER.findall(said)
    if _number(_final(wanted)) is not None:
        return numbers[-1] if numbers else ""
    return said


def _boxed(said: str) -> str | None:
    """Return the inside of the last box, braces inside of it and all; None where none is closed."""
    start = said.rfind("\\boxed{")
    depth = 0
    for place in range(start + 6, len(said)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(said[place], 0)
        if not depth:
            return said[start + 7 : place]
    return None


def _final(wanted: Any) -> str:
    """Return the answer itself where a dataset gives a worked solution."""
    written = str(wanted)
    boxed = _boxed(written)
    return boxed if boxed is not None else written.rpartition("####")[2].strip()


def _same(said: str, wanted: Any) -> bool:
    """Compare as numbers where both are, else as text, blanks aside."""
    right = _final(wanted)
    numbers = _number(said), _number(right)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return " ".join(said.split()) == " ".join(right.split())


def _number(written: str) -> fractions.Fraction | None:
    """Read a number, None where it is none."""
    try:
        return fractions.Fraction(written.strip().strip("$").replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None
