"""Options to preference losses: the loss that was named with its numbers, and files that bring both back."""

import math

import pytest

from shell import config, methods, options
from tests.core import pair_rows

BASE = ("--model", "tiny", "--dataset", "rows.jsonl", "--output_dir", "out")


def near(name, *words):
    """Return the loss of one pair by hand: chosen tokens -1 -2 (mean -1.5), rejected -3 (mean -3)."""
    made = methods.dpo(config.parse(["dpo", *BASE, "--loss_type", name, *words]).options)
    sides = [pair_rows.side([-1.0, -2.0], [9.0, 9.0]), pair_rows.side([-3.0], [9.0])]
    scores, batch = pair_rows.scored(sides)
    return pytest.approx(made.reduce(made.loss(scores, batch)[0], batch).item(), abs=1e-6)


def test_losses_without_a_reference_take_their_own_numbers_from_the_options():
    def soft(x):
        return math.log1p(math.exp(-x))

    assert near("simpo") == soft(2.0 * 1.5 - 0.5)
    assert near("simpo", "--beta", "10", "--simpo_gamma", "5") == soft(10 * 1.5 - 5)
    assert near("cpo") == soft(0.1 * 0.0) + 1.5
    assert near("cpo", "--cpo_alpha", "0", "--beta", "1") == soft(0.0)
    odds = [m - math.log1p(-math.exp(m)) for m in (-1.5, -3.0)]
    assert near("orpo") == 1.5 + 0.1 * soft(odds[0] - odds[1])
    assert near("orpo", "--beta", "0.5") == 1.5 + 0.5 * soft(odds[0] - odds[1])


def test_a_runs_own_file_of_options_starts_the_same_run(tmp_path):
    ways = [("sft", "nll"), ("kto", "kto"), ("reward", None), ("rloo", None)]
    ways += [(name, loss) for name in ("dpo", "grpo") for loss in options.choices(name, "loss_type")]
    extra = {"exo_pair": ["--label_smoothing", "0.1"], "cispo": ["--epsilon_high", "5"]}
    for algorithm, loss in ways:
        words = [*BASE, *(("--loss_type", loss) if loss else ()), *extra.get(str(loss), ())]
        first = config.parse([algorithm, *words]).options
        file = tmp_path / f"{algorithm}-{loss}.yaml"
        file.write_text(config.to_yaml(first))
        assert config.parse([algorithm, "--config", str(file)]).options == first
