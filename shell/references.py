"""The parameters that a policy is compared with: those that it starts from, or another model's.

They are frozen, or they follow the policy now and then (`sync_ref_model`); then they are state, and part of a
checkpoint.
"""

import hashlib
import pathlib
from collections.abc import Callable, Mapping

import attrs
import torch
from torch import Tensor

from adapters import scalar_head
from core import ports, steps
from shell import checkpoint, choose, config, entries, mistake, resume

PREFIX = "reference/"
# What makes the weights that a run starts from.
_STARTS = ("model", "revision", "init_from", "seed", "tokenizer")


@attrs.frozen(kw_only=True, eq=False)
class Reference:
    """Parameters that a run begins with.

    Where they are frozen a checkpoint does not hold them: a run that goes on loads them from where the policy
    started, and the fingerprint tells whether they are still the same.

    Attributes:
        params: by name; None: they were asked once for all rows, and are not needed any more.
        fingerprint: names them to the bit.
    """

    params: Mapping[str, Tensor] | None
    fingerprint: str


def frozen(params: Mapping[str, Tensor], *, base: str = "") -> Reference:
    """Copy parameters, so that no update of the policy reaches them.

    Args:
        params: that the policy starts from; none where that is the base of its adapter.
        base: names the weights below an adapter to the bit.
    """
    copied = {n: p.detach().clone() for n, p in params.items()}
    return Reference(params=copied, fingerprint=f"{base}{digest(params)}")


def of(
    params: Mapping[str, Tensor],
    origin: config.Options | None,
    device: ports.Device,
    *,
    below: Mapping[str, Tensor],
    base: str,
) -> Reference:
    """Return the reference of a policy.

    Args:
        params: that the policy starts from, as `frozen` takes them.
        origin: whose `model` and `init_from` the reference is loaded from; None: it is `params`.
        device: where it runs.
        below: the frozen weights under an adapter; none without one.
        base: names these to the bit.

    Raises:
        mistake.Mistake: it is another kind of model.
    """
    if origin is None:
        return frozen(params, base=base)
    if origin.use_peft:
        return frozen({}, base=base)  # the policy's own base
    params = below or params
    model, found = choose.model(origin, device, scalar=scalar_head.WEIGHT in params, training=False)
    odd = sorted(found.keys() ^ params.keys()) or [n for n in params if found[n].shape != params[n].shape]
    if odd:
        raise mistake.Mistake(
            f"reference {origin.model} is another kind of model ({odd[0]} differs); one with the layers and "
            "the vocabulary of the policy was wanted"
        )
    found = found if origin.init_from is None else resume.weights(origin, model, found)
    found = {n: found[n].to(device=p.device, dtype=p.dtype) for n, p in params.items()}
    return Reference(params=found, fingerprint=digest(found))


def named(chosen: config.Options) -> config.Options:
    """Return the options that load the reference that `ref_model` names."""
    return attrs.evolve(chosen, model=chosen.ref_model, revision=None, init_from=None, use_peft=False)


def look(chosen: config.Options) -> None:
    """Refuse a `ref_model` that cannot be read, before rows are tokenized.

    Args:
        chosen: the options.

    Raises:
        mistake.Mistake: it is no model.
    """
    if chosen.ref_model is None:
        return
    try:
        choose.config(named(chosen))
        choose.check_weights(named(chosen))
    except mistake.Mistake as told:
        raise mistake.Mistake(str(told).replace("--model", "--ref_model")) from told


def origin(chosen: config.Options, note: Callable[[str], None]) -> config.Options:
    """Return the options that load what an evaluated model is compared with; a line says what that is.

    In this order: what `ref_model` names; `model`, where `init_from` brings the weights that are evaluated;
    what the run began with that left the model folder. The model itself would be at a distance of 0.

    Args:
        chosen: the options.
        note: told.

    Raises:
        mistake.Mistake: none of these is there.
    """
    if chosen.ref_model is not None:
        return named(chosen)
    if chosen.init_from is not None:
        note(f"the reference is {chosen.model}, under the weights of {chosen.init_from}")
        return attrs.evolve(chosen, init_from=None)
    folder = pathlib.Path(str(chosen.model))
    file = folder.parent / "config.yaml"
    if folder.name != "model" or not file.is_file():
        raise mistake.Mistake(
            f"model {chosen.model}: this loss compares it with a reference, and nothing says which; name the "
            "model that its training began with, as in --ref_model BASE"
        )
    written = {one.key: one.value for one in entries.from_file(str(file))}
    usual = config.Options()
    began = attrs.evolve(chosen, **{name: written.get(name, getattr(usual, name)) for name in _STARTS})
    if written.get("ref_model"):
        began = attrs.evolve(began, model=written["ref_model"], revision=None, init_from=None)
    note(f"the reference is {began.init_from or began.model}, which the run in {folder.parent} began with")
    return began


def moved(
    reference: ports.Params | None, params: ports.Params, step: int, chosen: config.Options
) -> ports.Params | None:
    """Return the reference after a step: where it follows the policy, a part of the way at every so many.

    Args:
        reference: before; where it moves it must not be used again.
        params: of the policy, after the step.
        step: steps done.
        chosen: the options.
    """
    if reference is None or not chosen.sync_ref_model or step % (chosen.ref_model_sync_steps or 1):
        return reference
    return steps.synced(reference, params, alpha=chosen.ref_model_mixup_alpha or 0.0, donate=True)


def split(reference: ports.Params | None, chosen: config.Options) -> dict[str, Tensor]:
    """Return what a checkpoint holds of a reference: all of one that moves, nothing of a frozen one.

    Args:
        reference: where it stands.
        chosen: the options.
    """
    moves = chosen.sync_ref_model and reference is not None
    return {f"{PREFIX}{n}": p for n, p in reference.items()} if moves and reference else {}


def join(
    reference: ports.Params | None, tensors: Mapping[str, Tensor], chosen: config.Options
) -> ports.Params | None:
    """Return where a reference stood when a checkpoint was written.

    Args:
        reference: as it was loaded.
        tensors: of the checkpoint, by path.
        chosen: the options.

    Raises:
        KeyError: it follows the policy, and the checkpoint does not hold it.
    """
    if reference is None or not chosen.sync_ref_model:
        return reference
    return {n: tensors[f"{PREFIX}{n}"].to(device=p.device, dtype=p.dtype) for n, p in reference.items()}


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
    if chosen.sync_ref_model:  # the checkpoint holds it
        return
    source = chosen.ref_model or chosen.init_from or chosen.model
    raise mistake.Mistake(
        f"{source} holds other weights than when the run in {chosen.output_dir} began, and they are its "
        "reference. Put the old ones back, name another output_dir to begin anew, or say --resume force to "
        "go on with the new ones as the reference"
    )


def digest(params: Mapping[str, Tensor]) -> str:
    """Hash names, shapes and bytes.

    Args:
        params: by name.
    """
    made = hashlib.blake2b(digest_size=16)
    for name in sorted(params):
        tensor = params[name].detach().contiguous().cpu()
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        made.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()
