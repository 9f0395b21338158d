"""A pack at planned sizes: its forests run on the device, its table and its loss stay on the host.

One forest is run once. Of several, none can be pulled back before the loss has seen them all: each runs
without gradients, the loss is differentiated by the scores at their edges, a small table, and each runs
again.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from adapters import in_pieces
from core import metrics, pack, precision

Run = Callable[[int], in_pieces.Fields]
"""Number of a forest to the fields at its edges, padding among them, on the device."""


def fields(each: pack.Pack, run: Run) -> in_pieces.Fields:
    """Return the fields at the true edges of all forests, on the host; nothing can be differentiated.

    Args:
        each: a pack with padded forests, in which somebody trains.
        run: runs one of them.
    """
    with torch.no_grad():
        found = [_host(part, run(number)) for number, part in enumerate(each.padded)]
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def pull_back(
    each: pack.Pack,
    run: Run,
    leaves: Mapping[str, Tensor],
    loss: in_pieces.Loss,
) -> tuple[Float[Tensor, ""], metrics.Metrics, dict[str, Tensor]]:
    """Return the loss, its metrics and the gradient of every parameter.

    Args:
        each: a pack with padded forests, in which somebody trains.
        run: runs one of them; what it returns hangs on the leaves.
        leaves: the parameters, inside the swap.
        loss: from the fields at the edges, on the host.
    """
    alone = len(each.padded) == 1
    ran = run(0) if alone else {}
    host = _host(each.padded[0], ran) if alone else fields(each, run)
    value, means, slopes = in_pieces.slopes(host, loss)
    grads: dict[str, Tensor] = {}
    start = 0
    for number, part in enumerate(each.padded if slopes else ()):
        ran = ran if alone else run(number)
        stop = start + len(part.term_edges)
        pulled = [_sent(part, slope[start:stop], ran[name]) for name, slope in slopes.items()]
        start = stop
        outputs = [ran[name] for name in slopes]
        found = list(torch.autograd.grad(outputs, list(leaves.values()), pulled, allow_unused=True))
        for name in reversed(list(leaves)):
            grad = found.pop()  # each is let go of as soon as it is added
            if grad is not None:
                grads[name] = grad if name not in grads else grads[name] + precision.widened(grad)
    return value, means, {n: grads[n] if n in grads else torch.zeros_like(p) for n, p in leaves.items()}


def sloped(each: pack.Pack) -> Float[Tensor, " edges"] | None:
    """Return the slopes of the one forest of a pack at all its edges, on the device; None: not known."""
    if each.slopes is None or len(each.padded) != 1:
        return None
    part = each.padded[0]
    return _filled(each.slopes, len(part.edge_nodes)).to(part.tokens.device)


def _host(part: pack.Pack, ran: in_pieces.Fields) -> in_pieces.Fields:
    """Bring fields to the host and leave padding behind there: on the device that would be a new shape."""
    return {name: values.detach().cpu()[: len(part.term_edges)] for name, values in ran.items()}


def _sent(part: pack.Pack, slope: Tensor, like: Tensor) -> Tensor:
    """Return a gradient at all edges of a forest, 0 at padding, where its scores are."""
    return _filled(slope.to(like.dtype), len(part.edge_nodes)).to(like.device)


def _filled(values: Tensor, size: int) -> Tensor:
    return torch.cat([values, values.new_zeros(size - len(values))])
