"""The built-in `demo` dataset: short questions about numbers, with answers, made in place.

Four kinds of question, about numbers below 100 or 1,000: add two, what comes after, which is larger, write
in words. A tenth of the questions is the split `test`; none of them is in `train`, so a right answer there
was not learned by heart.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

SPLITS = ("train", "test")

_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def rows(split: str) -> list[dict[str, Any]]:
    """Return the conversations of one split, in a fixed mixed order.

    >>> [message["content"] for message in rows("test")[0]["messages"]]
    ['What is 8 + 5?', '8 + 5 = 13']
    """
    keyed = sorted((_key(question), question, answer) for question, answer in _pairs())
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for key, question, answer in keyed
        if (key % 10 == 0) == (split == "test")
    ]


def words(number: int) -> str:
    """Write a number from 0 to 999 in words.

    >>> words(342)
    'three hundred forty-two'
    """
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_SMALL[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{_SMALL[hundreds]} hundred" + (f" {words(rest)}" if rest else "")


def _pairs() -> Iterator[tuple[str, str]]:
    """Yield every question with its answer."""
    for first in range(40):
        for second in range(40):
            yield f"What is {first} + {second}?", f"{first} + {second} = {first + second}"
    for number in range(1000):
        yield f"What comes after {number}?", str(number + 1)
        yield f"Write {number} in words.", words(number)
    for first in range(100):
        for step in range(7, 100, 9):
            second = (first + step) % 100
            yield f"Which is larger, {first} or {second}?", str(max(first, second))


def _key(question: str) -> int:
    """Return a number that decides a question's place and split, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(question.encode(), digest_size=8).digest(), "big")
