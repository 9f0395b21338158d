"""The teacher of a distillation: whether it can teach this student, told before either is loaded; loaded."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import transformers

from adapters import teacher
from core import ports
from core.losses import distill
from core.plan import cost
from shell import checkpoint, choose, config, generate, keys, mistake, references


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
    asked = _asked(chosen)
    with _named():
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
    asked = _asked(command.options)
    with _named():
        theirs = choose.tokenizer(asked)
        holds = choose.max_length(attrs.evolve(command, options=asked), choose.config(asked), note)
    _same(asked, tokenizer, theirs)
    largest = max(tokenizer.get_vocab().values())
    if largest >= min(student.vocab, taught.vocab):
        raise mistake.Mistake(
            f"teacher_model {asked.model}: the tokenizer's ids go to {largest}; the student has embeddings "
            f"for {student.vocab} and the teacher for {taught.vocab}, so lower ids were wanted: take a "
            "teacher of the same family"
        )
    return min((number for number in (limit, holds) if number is not None), default=None)


def load(chosen: config.Options, device: ports.Device) -> teacher.Teacher | None:
    """Load the teacher; None where there is none.

    Args:
        chosen: the options.
        device: where it runs.
    """
    if chosen.teacher_model is None:
        return None
    with _named():
        model, params = choose.model(_asked(chosen), device, training=False)
    return teacher.Teacher(
        model=generate.tempered(model, chosen),
        params=params,
        beta=1.0 if chosen.beta is None else chosen.beta,
        num_kept=chosen.loss_top_k or 0,
        fingerprint=references.digest(params),
    )


def recheck(found: teacher.Teacher | None, saved: checkpoint.Saved, chosen: config.Options) -> None:
    """Refuse to go on with another teacher than the one a run began with.

    Args:
        found: what was loaded.
        saved: the checkpoint that the run goes on from.
        chosen: the options.

    Raises:
        mistake.Mistake: the parameters differ.
    """
    before = saved.values.get("teacher")
    if found is None or chosen.resume == "force" or before in (None, found.fingerprint):
        return
    raise mistake.Mistake(
        f"teacher_model {chosen.teacher_model} holds other weights than when the run in {chosen.output_dir} "
        "began. Put the old ones back, name another output_dir to begin anew, or say --resume force to go on "
        "under the new teacher"
    )


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Tell a mistake about a model as one about the teacher."""
    try:
        yield
    except mistake.Mistake as told:
        text = str(told).removeprefix("model ")
        for option in ("--model", "--tokenizer"):
            text = text.replace(option, "--teacher_model")
        raise mistake.Mistake(f"teacher_model {text}") from told


def _asked(chosen: config.Options) -> config.Options:
    """Return the options that load the teacher as the model."""
    asked: dict[str, Any] = dict(chosen.teacher_model_init_kwargs or {})
    tiny = chosen.teacher_model == "tiny"
    dtype = asked.get("dtype", asked.get("torch_dtype", chosen.dtype))
    return attrs.evolve(
        chosen,
        model=chosen.teacher_model,
        revision=asked.get("revision", chosen.teacher_model_revision),
        dtype=keys.foreign("dtype", str(dtype).removeprefix("torch.")),
        tokenizer=chosen.tokenizer if tiny else None,
        seed=chosen.seed + tiny,  # of the same seed it would be a tiny student's very self
        init_from=None,
        use_peft=False,
        rope_scaling=None,
    )


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
