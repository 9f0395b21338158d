"""Groups whose rewards are all alike teach nothing: they are left out, and further prompts drawn instead.

Yu et al. 2025, DAPO (arXiv:2503.14476), sec. 3.2, dynamic sampling. What is drawn is a function of the
prompts' places in the run and of the policy alone, so it can be drawn again.
"""

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from core import metrics
from shell import answers


@attrs.frozen(kw_only=True, eq=False)
class Filled:
    """What a round is made of.

    Attributes:
        drawn: all that was drawn.
        chosen: as many groups as were wanted: those that teach, in the order they were drawn, and where they
            are too few, others behind them.
        teaches: of `chosen`, bool `[samples]`; what does not is left out of the loss.
        more: prompts that were drawn in the place of others.
        means: what is logged about it.
    """

    drawn: answers.Answered
    chosen: answers.Answered
    teaches: Tensor
    more: int
    means: metrics.Metrics


def fill(
    first: answers.Answered,
    draw: Callable[[int, int], answers.Answered],
    *,
    tries: int,
    teaches: Callable[[answers.Answered], Tensor],
) -> Filled:
    """Replace groups that teach nothing, as often as is allowed.

    Args:
        first: the groups of the round's own prompts.
        draw: `(prompts used so far, count) -> answers` to the prompts that come next.
        tries: how often more are drawn; 0: everything is taken as it is.
        teaches: says of each sample whether its group does.
    """
    everybody = torch.ones(len(first.texts), dtype=torch.bool)
    if not tries:
        return Filled(drawn=first, chosen=first, teaches=everybody, more=0, means={})
    drawn, wanted = first, len(first.groups.unique())
    size, missing, used = len(first.texts) // wanted, wanted, wanted
    for turn in range(tries + 1):
        missing = wanted - int(teaches(drawn).sum()) // size
        if not missing or turn == tries:
            break
        drawn = answers.joined([drawn, draw(used, missing)])
        used += missing
    good = teaches(drawn)
    order = torch.argsort((~good).long(), stable=True)[: wanted * size]
    counted = {"left_out": used - wanted + missing, "missing": missing}
    return Filled(
        drawn=drawn,
        chosen=answers.taken(drawn, order.tolist()),
        teaches=good.index_select(0, order),
        more=used - wanted,
        means={f"dynamic_sampling/{name}": metrics.Sum(total=float(n)) for name, n in counted.items()},
    )
