"""The frozen parameters that a policy is compared with: those that it starts from."""

import hashlib
from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from shell import checkpoint, config, mistake


@attrs.frozen(kw_only=True, eq=False)
class Reference:
    """Parameters that are never updated.

    A checkpoint does not hold them: a run that goes on loads them from where the policy started, and the
    fingerprint tells whether they are still the same.

    Attributes:
        params: by name.
        fingerprint: names them to the bit.
    """

    params: Mapping[str, Tensor]
    fingerprint: str


def frozen(params: Mapping[str, Tensor]) -> Reference:
    """Copy parameters, so that no update of the policy reaches them.

    Args:
        params: that the policy starts from.
    """
    return Reference(params={n: p.detach().clone() for n, p in params.items()}, fingerprint=_digest(params))


def check(found: Reference | None, saved: checkpoint.Saved, chosen: config.Options) -> None:
    """Refuse to go on with another reference than the one a run began with.

    Args:
        found: what was loaded.
        saved: the checkpoint that the run goes on from.
        chosen: the options.

    Raises:
        mistake.Mistake: the parameters differ.
    """
    before = saved.values.get("reference")
    if found is None or chosen.resume == "force" or before in (None, found.fingerprint):
        return
    source = chosen.init_from or chosen.model
    raise mistake.Mistake(
        f"{source} holds other weights than when the run in {chosen.output_dir} began, and they are its "
        "reference. Put the old ones back, name another output_dir to begin anew, or say --resume force to "
        "go on with the new ones as the reference"
    )


def _digest(params: Mapping[str, Tensor]) -> str:
    """Hash names, shapes and bytes."""
    made = hashlib.blake2b(digest_size=16)
    for name in sorted(params):
        tensor = params[name].detach().contiguous().cpu()
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        made.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()
