"""The teacher of a distillation: whether it can teach this student, told before either is loaded; loaded."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import transformers
from torch import Tensor

from adapters import teacher, transformers_lm
from core import ports
from core.losses import distill
from core.plan import cost
from shell import adapter, choose, config, generate, keys, mistake, references, resume


def look(chosen: config.Options, device: ports.Device) -> cost.ModelShape | None:
    """Return the sizes of the teacher; None where there is none.

    Args:
        chosen: the options.
        device: where it runs.

    Raises:
        mistake.Mistake: there is no such model, or its weights cannot be read.
    """
    if chosen.teacher_model is None:
        return None
    with references.called("teacher_model"):
        asked = _asked(chosen)
        found = choose.shape(asked, choose.config(asked), choose.dtype(asked, device))
        choose.check_weights(asked)
    return found


def check(
    command: config.Command,
    tokenizer: transformers.PreTrainedTokenizerBase,
    shapes: tuple[cost.ModelShape, cost.ModelShape | None],
    limit: int | None,
    note: Callable[[str], None],
) -> int | None:
    """Refuse a teacher that reads other tokens, and return the most tokens that both models hold.

    Args:
        command: what was asked for.
        tokenizer: the student's.
        shapes: of the student and of the teacher; None: there is no teacher, and all is well.
        limit: most tokens of a sequence for the student; None: no limit.
        note: told when the teacher holds fewer.

    Raises:
        mistake.Mistake: names the first token that differs.
    """
    student, taught = shapes
    if taught is None:
        return limit
    if told := distill.fading(command.options.beta or 0.0):
        note(told)
    with references.called("teacher_model"):
        asked = _asked(command.options)
        theirs = choose.tokenizer(asked)
        holds = choose.max_length(attrs.evolve(command, options=asked), choose.config(asked), note)
    _same(asked, tokenizer, theirs)
    if references.is_base(asked, command.options) and command.options.init_from is None:
        note("teacher_model is what the student starts from: their divergence is 0, and nothing is learned")
    largest = max(tokenizer.get_vocab().values())
    if largest >= min(student.vocab, taught.vocab):
        raise mistake.Mistake(
            f"teacher_model {asked.model}: the tokenizer's ids go to {largest}; the student has embeddings "
            f"for {student.vocab} and the teacher for {taught.vocab}, so lower ids were wanted: take a "
            "teacher of the same family"
        )
    return min((number for number in (limit, holds) if number is not None), default=None)


def is_base(chosen: config.Options) -> bool:
    """Say whether the teacher is the base of the student's adapter, which runs with the adapter off.

    Where parameters are split each process would have to run it as often as the others: it is a copy.

    Args:
        chosen: the options.
    """
    asked = None if chosen.teacher_model is None or not chosen.use_peft or chosen.fsdp else _asked(chosen)
    return asked is not None and references.is_base(asked, chosen)


def load(
    chosen: config.Options,
    device: ports.Device,
    model: transformers_lm.TransformersLM,
    params: Mapping[str, Tensor],
) -> teacher.Teacher | None:
    """Load the teacher; None where there is none.

    Args:
        chosen: the options.
        device: where it runs.
        model, params: of the student: where its base is the teacher too, or what another adapter stands
            beside that teaches it, nothing is loaded twice.

    Raises:
        mistake.Mistake: it cannot be loaded.
    """
    if chosen.teacher_model is None:
        return None
    with references.called("teacher_model"):
        asked = _asked(chosen)
        found = None if chosen.fsdp else references.beside(asked, chosen, model, params)
        if found is None:
            model, found = choose.model(asked, device, training=False)
            found = found if asked.init_from is None else resume.weights(asked, model, found)
    base = references.digest(model.frozen) if model.adapter else ""
    return teacher.Teacher(
        model=generate.tempered(attrs.evolve(model, compiled=None), chosen),
        params=found,
        beta=1.0 if chosen.beta is None else chosen.beta,
        num_kept=chosen.loss_top_k or 0,
        fingerprint=base + (references.digest(found) if found else ""),
    )


def _asked(chosen: config.Options) -> config.Options:
    """Return the options that load the teacher, a model or an adapter, as the model."""
    asked_of = chosen.teacher_model_init_kwargs or {}
    told: dict[str, Any] = {name: value for name, value in asked_of.items() if value is not None}
    tiny = chosen.teacher_model == "tiny"
    dtype = told.get("dtype", told.get("torch_dtype", chosen.dtype))
    made = attrs.evolve(
        chosen,
        model=chosen.teacher_model,
        revision=told.get("revision", chosen.teacher_model_revision),
        dtype=keys.foreign("dtype", str(dtype).removeprefix("torch.")),
        tokenizer=chosen.tokenizer if tiny else None,
        seed=chosen.seed + tiny,  # of the same seed it would be a tiny student's very self
        init_from=None,
        use_peft=False,
        rope_scaling=None,
    )
    asked = adapter.opened(made)
    adapter.check_kind(asked, scalar=False)
    return asked


def _same(asked: config.Options, ours: Any, theirs: Any) -> None:
    """Refuse a tokenizer that gives a token another id."""
    vocab, other = ours.get_vocab(), theirs.get_vocab()
    if vocab == other:
        return
    odd = min(
        (token for token in {*vocab, *other} if vocab.get(token) != other.get(token)),
        key=lambda token: (vocab.get(token, len(vocab)), token),
    )
    ids = [f"id {each[odd]}" if odd in each else "no token" for each in (vocab, other)]
    raise mistake.Mistake(
        f"teacher_model {asked.model} has another tokenizer: {odd!r} is {ids[0]} for the student and "
        f"{ids[1]} there, so it predicts other tokens; take a teacher with the student's tokenizer"
    )
