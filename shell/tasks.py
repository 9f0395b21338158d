"""Tasks by name: prompts made in place, and a score of their own.

`task:NAME` is built in and needs nothing; `reasoning_gym:NAME` comes from the package reasoning-gym, if it is
installed. Of every ten prompts one belongs to the split `test`: which, a hash of the prompt says, so none is
in both, whatever the size, the seed and the machine.
"""

import hashlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from shell import mistake, named_rewards, translate

SPLITS = ("train", "test")
GYM = "reasoning_gym"
SIZE = 2000
"""Prompts of a task, when nobody says how many."""

Row = dict[str, Any]


@attrs.frozen(kw_only=True)
class Task:
    """A task that is built in.

    Attributes:
        rows: `(size, seed) -> rows`, each with a `prompt` (messages), an `answer` and a `completion`.
        score: a reward function.
    """

    rows: Callable[[int, int], Iterator[Row]]
    score: Callable[..., Any]


def is_task(path: str) -> bool:
    """Say whether a dataset's name is that of a task.

    >>> is_task("reasoning_gym:chain_sum"), is_task("C:/rows.jsonl")
    (True, False)
    """
    return path.partition(":")[0] in (GYM, "task") and ":" in path


def rows(path: str, split: str, settings: Mapping[str, Any] | None = None) -> list[Row]:
    """Make the prompts of one split, none twice.

    Args:
        path: `task:NAME` or `reasoning_gym:NAME`.
        split: `train` or `test`.
        settings: `size` and `seed`, and what a task of the package takes.

    Raises:
        Mistake: there is no such task, split or setting, or the package is missing.
    """
    if split not in SPLITS:
        raise mistake.Mistake(f"dataset {path} has no split {split!r}; it has {' and '.join(SPLITS)}.")
    family, _, name = path.partition(":")
    given = {"size": SIZE, "seed": 0, **(settings or {})}
    for key in ("size", "seed"):
        if type(given[key]) is not int or given[key] < (key == "size"):
            raise mistake.Mistake(f"task_options: {key} is {given[key]!r}; a whole number was wanted.")
    made = _gym(name, given) if family == GYM else _built_in(name, given)
    seen: dict[str, Row] = {row["prompt"][-1]["content"]: row for row in made}
    return [row for text, row in seen.items() if (_key(text) % 10 == 0) == (split == "test")]


def scores(paths: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Return the scores that tasks bring, by the names that `reward_funcs` knows them by.

    Args:
        paths: of the datasets.
    """
    found: dict[str, Callable[..., Any]] = {}
    for path in filter(is_task, paths):
        family, _, name = path.partition(":")
        found[GYM if family == GYM else name] = gym_score if family == GYM else _known(name).score
    return found


def gym_score(completions: Sequence[Any], question: Sequence[str], answer: Sequence[Any],
              metadata: Sequence[Mapping[str, Any]]) -> list[float]:  # fmt: skip
    """Score completions as the package does; between `<answer>` tags, where there are any.

    Args:
        completions: text or messages.
        question, answer, metadata: columns of the rows.
    """
    package = _package()
    scored = []
    for said, asked, right, known in zip(completions, question, answer, metadata, strict=True):
        entry = {"question": asked, "answer": right, "metadata": known}
        score = package.get_score_answer_fn(known["source_dataset"])
        scored.append(float(score(_final(named_rewards.text(said)), entry)))
    return scored


def placed(completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    """Score letters: how many stand where they belong, over the longer of both texts.

    >>> placed(["cba", "cb", "xyz"], ["cba"] * 3)
    [1.0, 0.6666666666666666, 0.0]
    """
    texts = [named_rewards.text(each) for each in completions]
    return [
        sum(a == b for a, b in zip(said, right, strict=False)) / max(len(said), len(right))
        for said, right in zip(texts, answer, strict=True)
    ]


def _letters(size: int, seed: int) -> Iterator[Row]:
    """Ask for three letters the other way round."""
    for number in range(size):
        key = _key(f"letters {seed} {number}")
        word = "".join("abcdefghijklmnop"[key >> 4 * place & 15] for place in range(3))
        yield _row(word, word[::-1])


def _row(question: str, answer: str) -> Row:
    """Make a row of a built-in task."""
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
        "answer": answer,
    }


BUILT_IN: Mapping[str, Task] = {"letters": Task(rows=_letters, score=placed)}


def _known(name: str) -> Task:
    """Return a built-in task."""
    if name not in BUILT_IN:
        raise mistake.Mistake(
            f"dataset task:{name} does not exist; one of {', '.join(BUILT_IN)} was wanted."
            + translate.hint(name, BUILT_IN)
        )
    return BUILT_IN[name]


def _built_in(name: str, settings: Mapping[str, Any]) -> Iterator[Row]:
    """Make the rows of a built-in task."""
    task, strange = _known(name), sorted(settings.keys() - {"size", "seed"})
    if strange:
        raise mistake.Mistake(f"task_options: {strange[0]!r} came; task:{name} takes size and seed.")
    return task.rows(settings["size"], settings["seed"])


def _gym(name: str, settings: Mapping[str, Any]) -> Iterator[Row]:
    """Make the rows of a task of the package."""
    package = _package()
    if name not in package.factory.DATASETS:
        hint = translate.hint(f"{GYM}:{name}", [f"{GYM}:{known}" for known in package.factory.DATASETS])
        raise mistake.Mistake(f"dataset {GYM}:{name} is no task of the package reasoning-gym.{hint}")
    try:
        made = package.create_dataset(name, **settings)
    except (TypeError, ValueError, AssertionError) as problem:
        raise mistake.Mistake(
            f"task_options: {GYM}:{name} does not take {dict(settings)}: {problem}"
        ) from problem
    for entry in made:
        yield {
            "prompt": [{"role": "user", "content": entry["question"]}],
            "question": entry["question"],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
        }


def _package() -> Any:
    """Import the package, or say how to get it."""
    if importlib.util.find_spec(GYM) is None:
        raise mistake.Mistake(
            f"dataset: tasks of {GYM} need the package reasoning-gym, which is not installed; "
            "pip install reasoning-gym, or take a task that is built in, such as task:letters."
        )
    import reasoning_gym  # pyright: ignore[reportMissingImports] -- an extra

    return reasoning_gym


def _final(said: str) -> str:
    """Return what stands between the last pair of answer tags, else all that follows the thinking."""
    _, opened, rest = said.rpartition("<answer>")
    inside = rest.partition("</answer>")[0] if opened else said.rpartition("</think>")[2]
    return inside.strip()


def _key(text: str) -> int:
    """Return a number that a text decides, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
