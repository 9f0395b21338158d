"""The parameters that a policy is compared with: those that it starts from, or another model's.

They are frozen, or they follow the policy now and then (`sync_ref_model`); then they are state, and part of a
checkpoint.
"""

import contextlib
import hashlib
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping

import attrs
import torch
from torch import Tensor

from adapters import scalar_head, transformers_lm
from core import ports, precision, steps
from shell import adapter, choose, config, entries, low_rank, mistake, resume, states

PREFIX = "reference/"
# What of a config changes the numbers that a model gives, and no shape of its weights.
_RECKONED = re.compile(
    "rope|rotary|alibi|_eps|epsilon|^sliding_window|softcap|clip|scal|multiplier|hidden_act|activation|layer_types"
    "|heads|topk|experts_per"
)
# What makes the weights that a run starts from.
_STARTS = ("model", "revision", "init_from", "seed", "tokenizer", *adapter.OWN)


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
    model: transformers_lm.TransformersLM,
    params: Mapping[str, Tensor],
    origin: config.Options | None,
    device: ports.Device,
    *,
    chosen: config.Options,
    base: str,
) -> Reference:
    """Return the reference of a policy.

    Args:
        model: the policy's.
        params: that the policy starts from.
        origin: what loads the reference; None: it is what the policy starts from.
        device: where it runs.
        chosen: the policy's options.
        base: names the weights under its adapter to the bit; empty without one.

    Raises:
        mistake.Mistake: it is another kind of model.
    """
    start = low_rank.start(model, params)
    found = start if origin is None else beside(origin, chosen, model, params)
    follows = bool(chosen.sync_ref_model and model.adapter)
    if found is not None:
        return frozen(low_rank.off(model, params) if follows and not found else found, base=base)
    assert origin is not None
    whole = model.frozen or params
    with contextlib.nullcontext() if chosen.ref_model is None else called("ref_model"):
        other, found = choose.model(origin, device, scalar=scalar_head.WEIGHT in whole, training=False)
        found = found if origin.init_from is None else resume.weights(origin, other, found)
    found = low_rank.merged(other, found, f"reference {origin.init_from}")
    odd = sorted(found.keys() ^ whole.keys()) or [n for n in whole if found[n].shape != whole[n].shape]
    if odd:
        raise mistake.Mistake(
            f"reference {origin.init_from or origin.model} is another kind of model ({odd[0]} differs); one "
            "with the layers and the vocabulary of the policy was wanted"
        )
    if odd := _otherwise(model, other):
        raise mistake.Mistake(
            f"reference {origin.init_from or origin.model}: its {odd}. A reference runs by the policy's "
            "config; one with the same was wanted"
        )
    if follows:
        raise mistake.Mistake(
            f"sync_ref_model and ref_model {chosen.ref_model}: a reference that follows an adapter is one of "
            f"the same layers, rank and scale over {chosen.model}; leave one out"
        )
    found = {n: found[n].to(device=p.device, dtype=p.dtype) for n, p in whole.items()}
    return Reference(params=found, fingerprint=digest(found))


def _otherwise(policy: transformers_lm.TransformersLM, other: transformers_lm.TransformersLM) -> str:
    """Say what of two configs makes other numbers of the same weights; empty: nothing."""
    own, its = (m.module.config.get_text_config().to_dict() for m in (policy, other))
    for name in sorted(own.keys() & its.keys()):
        if _RECKONED.search(name) and own[name] != its[name]:
            return f"{name} is {its[name]} there and {own[name]} here"
    return ""


def moving(reference: Reference) -> Reference:
    """Hold parameters in float32 or better: in a narrower type small moves would be rounded away.

    Args:
        reference: as it was loaded.
    """
    held = {n: precision.widened(p) for n, p in (reference.params or {}).items()}
    return attrs.evolve(reference, params=states.aligned(held))


def rounded(reference: ports.Params | None, params: ports.Params) -> ports.Params | None:
    """Return a reference as a model reads it: where it moves it is held wider than the policy is.

    Args:
        reference: where it stands.
        params: of the policy.
    """
    if reference is None:
        return None
    return {n: p.to(params[n].dtype) if n in params else p for n, p in reference.items()}


def beside(
    asked: config.Options,
    chosen: config.Options,
    model: transformers_lm.TransformersLM,
    params: Mapping[str, Tensor],
) -> dict[str, Tensor] | None:
    """Return the parameters with which a policy's own module is another model, so that none is loaded.

    Args:
        asked: what would load the other model.
        chosen: the policy's options.
        model, params: of the policy.

    Returns:
        None of them, where it is the base of the policy's adapter; those of another adapter of the same
        layers, rank and scale over that base; None where it is neither.
    """
    if model.adapter is None or not is_base(attrs.evolve(asked, init_from=None, use_peft=False), chosen):
        return None
    if asked.init_from is None:
        return {}
    if not asked.use_peft or low_rank.settings(asked).scale != model.adapter.settings.scale:
        return None
    try:
        return resume.weights(asked, model, params)
    except mistake.Mistake:
        return None  # its layers are others


def is_base(asked: config.Options, chosen: config.Options) -> bool:
    """Say whether options load the weights that others put an adapter on, or start from without one.

    Args:
        asked: of a reference or a teacher.
        chosen: of the policy.
    """
    names = ["revision", "dtype", "rope_scaling", *(("seed", "tokenizer") if chosen.model == "tiny" else ())]
    same = all(getattr(asked, name) == getattr(chosen, name) for name in names)
    return same and asked.init_from is None and not asked.use_peft and _place(asked) == _place(chosen)


def _place(chosen: config.Options) -> str:
    """Return where a model is, the same for every way to write a folder."""
    folder = pathlib.Path(str(chosen.model))
    return str(folder.resolve()) if folder.is_dir() else str(chosen.model)


def named(chosen: config.Options) -> config.Options:
    """Return the options that load the reference that `ref_model` names, a model or an adapter."""
    asked = attrs.evolve(chosen, model=chosen.ref_model, revision=None, init_from=None, use_peft=False)
    made = adapter.opened(asked)
    adapter.check_kind(made, scalar=False)
    return made


def look(chosen: config.Options) -> None:
    """Refuse a `ref_model` that cannot be read, before rows are tokenized.

    Args:
        chosen: the options.

    Raises:
        mistake.Mistake: it is no model.
    """
    if chosen.ref_model is None:
        return
    with called("ref_model"):
        asked = named(chosen)
        choose.config(asked)
        choose.check_weights(asked)


@contextlib.contextmanager
def called(option: str) -> Iterator[None]:
    """Tell a mistake about a model as one about what an option names.

    Args:
        option: `ref_model` or `teacher_model`.
    """
    try:
        yield
    except mistake.Mistake as told:
        text = str(told).removeprefix("model ").removeprefix("init_from ")
        for other in ("--model", "--tokenizer"):
            text = text.replace(other, f"--{option}")
        raise mistake.Mistake(f"{option} {text}") from told


def origin(command: config.Command, note: Callable[[str], None]) -> config.Options:
    """Return the options that load what an evaluated model is compared with; a line says what that is.

    In this order: what `ref_model` names; `model`, where `init_from` brings the weights that are evaluated;
    what the run began with that left the folder, be it a model or an adapter; of another adapter the base.
    The model itself would be at a distance of 0.

    Args:
        command: what was asked for.
        note: told.

    Raises:
        mistake.Mistake: none of these is there.
    """
    chosen = command.options
    if chosen.ref_model is not None:
        return named(chosen)
    if chosen.init_from is not None and "init_from" in command.given:
        note(f"the reference is {chosen.model}, under the weights of {chosen.init_from}")
        return attrs.evolve(chosen, init_from=None, use_peft=False)
    folder = pathlib.Path(chosen.init_from or str(chosen.model))  # of an adapter, or of a model
    file = adapter.run_file(folder)
    if file is not None:
        return _began(chosen, file, note)
    if chosen.init_from is not None:
        note(f"the reference is {chosen.model}, the base of the adapter {folder}")
        return attrs.evolve(chosen, init_from=None, use_peft=False)
    raise mistake.Mistake(
        f"model {chosen.model}: this loss compares it with a reference, and nothing says which; name the "
        "model that its training began with, as in --ref_model BASE"
    )


def _began(chosen: config.Options, file: pathlib.Path, note: Callable[[str], None]) -> config.Options:
    """Return the options that load the reference that a run began with."""
    written = {one.key: one.value for one in entries.from_file(str(file))}
    usual = config.Options()
    began = attrs.evolve(chosen, **{name: written.get(name, getattr(usual, name)) for name in _STARTS})
    if written.get("ref_model"):
        began = named(attrs.evolve(began, ref_model=written["ref_model"]))
    elif began.init_from is None:
        began = attrs.evolve(began, use_peft=False)  # a new adapter is its base
    note(f"the reference is {began.init_from or began.model}, which the run in {file.parent} began with")
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
