"""The caller's mistakes, told in one line."""


class Mistake(ValueError):
    """Something the caller can mend: where it is, what came, what was wanted, what to do.

    Entry points print it as one line on standard error and exit with status 2.
    """


def line(error: BaseException) -> str:
    r"""Return what an error says as a part of a line: without breaks, and without the period at its end.

    >>> line(ValueError("one\n  two."))
    'one two'
    """
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
