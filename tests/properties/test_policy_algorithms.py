"""What every algorithm must have, checked on policy losses with something put around them."""

from functools import partial

import pytest

from core import algorithms, check, kl, ratios
from core.losses import composition, policy


def around(name, function, **numbers):
    """Return an algorithm with something put around its loss."""
    base = getattr(algorithms, name)
    return base.evolve(loss=partial(function, loss=base.loss, **numbers))


BONUS = partial(composition.with_entropy, loss=policy.clipped, coefficient=0.1, by=algorithms.grpo.reduce)
MADE = {
    "k1": around("grpo", composition.with_kl, beta=0.1, divergence=kl.k1),
    "k2": around("grpo", composition.with_kl, beta=0.1, divergence=kl.k2),
    "k3": around("gspo", composition.with_kl, beta=0.1),
    "corrected k3": around("dapo", composition.with_corrected_kl, beta=0.1),
    "token_truncate": around("dapo", composition.weighted, weights=ratios.token_truncate),
    "token_mask": around("dapo", composition.weighted, weights=ratios.token_mask),
    "sequence_truncate": around("gspo", composition.weighted, weights=ratios.sequence_truncate),
    "sequence_mask": around("gspo", composition.weighted),
    "observed": around("grpo", composition.observed),
    "strayed left out": around("grpo", composition.off_policy_masked, threshold=0.1).evolve(couples="sample"),
    "entropy bonus": algorithms.grpo.evolve(loss=BONUS, needs=("entropies",)),
    "surest left out": around("dapo", composition.top_entropy).evolve(needs=("entropies",), couples="step"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_forest_a_split_and_an_order_change_nothing(name):
    check.check(MADE[name], seeds=range(3))


@pytest.mark.parametrize("name", ["gspo", "luspo", "gmpo", "rloo"])
def test_what_couples_samples_is_not_a_sum_over_tokens(name):
    with pytest.raises(ValueError, match=r"additive over units|couples"):
        check.check(getattr(algorithms, name).evolve(couples="token"))
