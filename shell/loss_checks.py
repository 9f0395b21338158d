"""What the options of a loss must be together, told before anything heavy is imported."""

from collections.abc import Callable, Mapping

from shell import about, entries, idle, mistake, options, reference_checks, rollout_checks

# Which losses read which number; the others would ignore it without a word.
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo_pair", "aot", "aot_unpaired", "cpo", "simpo")
DIVERGING = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
OVER_STEP = ("aot", "aot_unpaired")
ALONE = ("sft", "orpo", "cpo", "simpo")
"""Losses that read no reference."""
OF_ONE = {"discopop_tau": "discopop", "cpo_alpha": "cpo", "simpo_gamma": "simpo"}
KTO_LEAST = 2


def check(algorithm: str, chosen: options.Options, given: Mapping[str, entries.Entry]) -> None:
    """Refuse numbers that a loss cannot take or does not read.

    Raises:
        Mistake: names the option, what came and what was wanted.
    """
    wrong = _CHECKS.get(options.reader(algorithm))
    told = idle.find(algorithm, chosen, given) or (wrong(chosen, given) if wrong else None)
    told = told or _referred(algorithm, chosen)
    if told:
        name, why = told
        where = given[name].where if name in given else name
        raise mistake.Mistake(f"{where}: {why}")


def _dpo(chosen: options.Options, given: Mapping[str, entries.Entry]) -> tuple[str, str] | None:
    """Find what is wrong with the numbers of preference losses."""
    names = (chosen.loss_type,) if isinstance(chosen.loss_type, str) else chosen.loss_type or ()
    told = ", ".join(names)
    if not names:
        return "loss_type", "an empty list came; at least one loss was wanted."
    if chosen.loss_weights is not None and len(chosen.loss_weights) != len(names):
        return (
            "loss_weights",
            f"{len(chosen.loss_weights)} weights came for {len(names)} losses ({told}); "
            "one for each was wanted.",
        )
    return (
        _beta(chosen) or _smoothing(chosen, names) or _unread(chosen, given, names)
        or _compared(chosen, given, names)
    )  # fmt: skip


def _smoothing(chosen: options.Options, names: tuple[str, ...]) -> tuple[str, str] | None:
    """Find a smoothing that a loss cannot take, or that none of them reads."""
    smoothing, told = chosen.label_smoothing, ", ".join(names)
    if smoothing and not set(names) & set(SMOOTHED):
        return "label_smoothing", f"{smoothing} came, and {told} has none; {' '.join(SMOOTHED)} read it."
    if not smoothing and "exo_pair" in names:
        return (
            "label_smoothing",
            f"{smoothing} came; exo_pair is infinite at 0: above 0 was wanted, as 0.001.",
        )
    if smoothing == 0.5 and "robust" in names:
        return "label_smoothing", "0.5 came; robust divides by 1 - 2 label_smoothing: below 0.5 was wanted."
    return None


def _unread(
    chosen: options.Options, given: Mapping[str, entries.Entry], names: tuple[str, ...]
) -> tuple[str, str] | None:
    """Find an option that the losses do not read."""
    told = ", ".join(names)
    for number, reader in OF_ONE.items():
        if options.asked("dpo", chosen, given, number) and reader not in names:
            came = getattr(chosen, number)
            return number, f"{came} came, and only {reader} reads it; loss_type is {told}."
    alone = [name for name in names if name not in DIVERGING]
    if chosen.f_divergence_type != "reverse_kl" and alone:
        return (
            "f_divergence_type",
            f"{chosen.f_divergence_type} came, and {alone[0]} is defined for the log-ratio alone; "
            f"reverse_kl, or a loss of {' '.join(DIVERGING)} was wanted.",
        )
    if (
        options.asked("dpo", chosen, given, "f_alpha_divergence_coef")
        and chosen.f_divergence_type != "alpha_divergence"
    ):
        return "f_alpha_divergence_coef", "only f_divergence_type alpha_divergence reads it; set both."
    over = [name for name in names if name in OVER_STEP]
    if chosen.use_weighting and over:
        return (
            "use_weighting",
            f"{over[0]} compares ranks, not pairs, so its pairs cannot be weighed; leave it out.",
        )
    return None


def _compared(
    chosen: options.Options, given: Mapping[str, entries.Entry], names: tuple[str, ...]
) -> tuple[str, str] | None:
    """Find what compares with a reference where no loss has one, and a beta that means two things."""
    told = ", ".join(names)
    if chosen.ref_model is not None and set(names) <= set(ALONE):
        return "ref_model", f"{chosen.ref_model} came, and {told} reads no reference; leave it out."
    own = options.known("beta").under
    if "beta" not in given and len(names) > 1 and set(names) & own.keys():
        kind = next(name for name in names if name in own)
        return "beta", f"nothing came; that of {kind} is {own[kind]:g} and of the others .1: set one for all."
    cut = [name for name in names if name in ALONE]
    if chosen.ld_alpha is not None and cut:
        return (
            "ld_alpha",
            f"{chosen.ld_alpha} came, and {cut[0]} imitates or averages whole answers; leave it out.",
        )
    return None


def _referred(algorithm: str, chosen: options.Options) -> tuple[str, str] | None:
    """Find what is wrong with a reference that moves, or is kept."""
    if not options.reads(algorithm, "sync_ref_model"):
        return None
    names = (chosen.loss_type,) if isinstance(chosen.loss_type, str) else chosen.loss_type or ()
    compared = not set(names) <= set(ALONE) if algorithm == "dpo" else bool(chosen.beta)
    return reference_checks.reference(chosen, compared=compared)


def _kto(chosen: options.Options, given: Mapping[str, entries.Entry]) -> tuple[str, str] | None:
    """Find what is wrong with the numbers of losses over labeled answers."""
    if chosen.loss_type == "kto" and chosen.batch_size < KTO_LEAST:
        return (
            "batch_size",
            f"{chosen.batch_size} came; kto pairs a prompt with the answer of another row, so at least "
            f"{KTO_LEAST} was wanted, or loss_type apo_zero_unpaired.",
        )
    if not chosen.desirable_weight and not chosen.undesirable_weight:
        why = "it and undesirable_weight are 0, so nothing is trained; one above 0 was wanted."
        return "desirable_weight", why
    return _beta(chosen)


def _beta(chosen: options.Options) -> tuple[str, str] | None:
    """Find a beta under which nothing is learned."""
    return None if chosen.beta else ("beta", f"{chosen.beta} came; above 0 was wanted.")


_CHECKS: Mapping[str, Callable[[options.Options, Mapping[str, entries.Entry]], tuple[str, str] | None]] = {
    "dpo": _dpo,
    "kto": _kto,
    "grpo": rollout_checks.grpo,
    "rloo": rollout_checks.rloo,
    "distill": reference_checks.distill,
    about.OWN: rollout_checks.own,
}
