"""The caller's mistakes, told in one line."""


class Mistake(ValueError):
    """Something the caller can mend: where it is, what came, what was wanted, what to do.

    Entry points print it as one line on standard error and exit with status 2.
    """
