"""What options of shapes and graphs must be together, told before anything heavy is imported."""

from collections.abc import Mapping

from shell import entries, mistake, options


def check(chosen: options.Options, given: Mapping[str, entries.Entry]) -> None:
    """Take a number of sizes where there are sizes, and what belongs to graphs where there are graphs.

    Args:
        chosen: the options.
        given: where those that were written stand.

    Raises:
        mistake.Mistake: names both.
    """
    clashes = {
        ("pad_to_multiple_of", "max_shapes"): (
            chosen.pad_to_multiple_of == "none" and chosen.max_shapes is not None,
            "none pads nothing; keep one.",
        ),
        ("count_signatures", "compile"): (
            chosen.count_signatures and chosen.compile,
            "a graph has no operators to count; keep one.",
        ),
        ("compile_beyond", "compile"): (
            chosen.compile_beyond != "stop" and not chosen.compile,
            "nothing is compiled; set compile.",
        ),
    }
    for names, (clash, why) in clashes.items():
        if clash:
            places = " and ".join(given[name].where if name in given else name for name in names)
            raise mistake.Mistake(f"{places}: {why}")
