"""What the options of references and teachers must be together, told before anything heavy is imported."""

from shell import about, entries, keys, options

Told = tuple[str, str] | None
Given = entries.Given

ASKED = ("teacher_model_revision", "teacher_model_init_kwargs", "beta", "loss_top_k")
"""What says which teacher, and how it is compared with."""
TAUGHT = ("dtype", "torch_dtype", "revision", "attn_implementation")
"""Keys of `teacher_model_init_kwargs`, each with a text; which kernel runs changes nothing."""


def reference(chosen: options.Options, *, compared: bool) -> Told:
    """Find what is wrong with how a reference moves or is kept.

    Args:
        chosen: the options.
        compared: whether the loss reads a reference at all.
    """
    for name in ("sync_ref_model", "precompute_ref_log_probs"):
        if getattr(chosen, name) and not compared:
            return name, "true came, and this loss compares with no reference; leave it out."
    if chosen.sync_ref_model and chosen.use_peft and chosen.ref_model_mixup_alpha != 1:
        return "ref_model_mixup_alpha", (
            f"{chosen.ref_model_mixup_alpha:g} came, and with use_peft what is between two adapters is none "
            "of their rank; 1 was wanted: the reference becomes the policy."
        )
    return _cached(chosen) if chosen.precompute_ref_log_probs else None


def _cached(chosen: options.Options) -> Told:
    """Find why a reference cannot be asked once for all."""
    if chosen.sync_ref_model:
        why = "sync_ref_model moves the reference, so what it said once is not what it says; keep one."
    elif chosen.streaming:
        why = "a stream's rows are not known beforehand; leave out one of the two."
    elif chosen.loss_type == "kto":
        why = (
            "loss_type kto compares prompts with the answers of other rows, new ones each step; "
            "apo_zero_unpaired does not."
        )
    else:
        return None
    return "precompute_ref_log_probs", f"true came; {why}"


def distill(chosen: options.Options, given: Given) -> Told:
    """Find what is wrong with a teacher and what it is asked."""
    if not chosen.teacher_model:
        return (
            "--teacher_model",
            "nothing came; a folder or hub id was wanted, as in --teacher_model BASE"
            + (f"; {chosen.model} is its adapter's own base." if chosen.use_peft else "."),
        )
    return taught(chosen) or _written(chosen)


def own(chosen: options.Options, given: Given) -> Told:
    """Find what is wrong with a teacher of a caller's own algorithm, or is asked of none."""
    for name in ASKED:
        if chosen.teacher_model is None and options.asked(about.OWN, chosen, given, name):
            return name, (
                "a teacher reads it, and there is none; set teacher_model, or leave it out: the numbers of "
                "a loss of one's own stand in its code."
            )
    return taught(chosen)


def taught(chosen: options.Options) -> Told:
    """Find what a teacher cannot be loaded with, or asked for."""
    if (chosen.beta or 0.0) > 1:
        return "beta", f"{chosen.beta:g} came; 0 (forward) to 1 (reverse) was wanted."
    asked = chosen.teacher_model_init_kwargs or {}
    for name, value in asked.items():
        if name not in TAUGHT:
            return "teacher_model_init_kwargs", f"{name} came; {', '.join(TAUGHT)} were wanted."
        if value is None:
            continue  # as if it were not there
        if not isinstance(value, str):
            return "teacher_model_init_kwargs", f"{name} {value!r} came; a text was wanted, as {name}: '...'."
        known = options.choices("distill", "dtype")
        if "dtype" in name and keys.foreign("dtype", str(value).removeprefix("torch.")) not in known:
            return "teacher_model_init_kwargs", f"{name} {value} came; one of {', '.join(known)} was wanted."
    return None


def _written(chosen: options.Options) -> Told:
    """Find what answers of the student, or of the rows, cannot be."""
    share, num, size = chosen.lmbda or 0.0, chosen.num_generations or 1, chosen.batch_size
    if not share:
        return None
    if chosen.streaming:
        return "streaming", f"with lmbda {share:g} rows are prompts, which are read whole; leave it out."
    if (told := whole_groups(size, num)) is not None:
        return told
    if share < 1 and num > 1:
        return "num_generations", (
            f"{num} came; with lmbda {share:g} a row is answered once, by the student or by itself: 1 was "
            "wanted."
        )
    return None


def whole_groups(batch: int, size: int) -> Told:
    """Find a step that ends inside of a group.

    Args:
        batch: completions of a step.
        size: completions of a prompt.
    """
    if batch % size == 0:
        return None
    return "batch_size", (
        f"{batch} completions a step came, and {size} of a prompt (num_generations); whole groups were "
        f"wanted, as {max(size, batch // size * size)}."
    )
