"""What the options of rollouts and policy losses must be together, told before anything heavy is imported."""

from collections.abc import Mapping

from shell import entries, options

Told = tuple[str, str] | None
Given = Mapping[str, entries.Entry]

CLIPPED = ("grpo", "dapo", "bnpo", "dr_grpo", "luspo")
OF_SEQUENCES = ("grpo", "dapo", "bnpo", "luspo")


def grpo(chosen: options.Options, given: Given) -> Told:
    """Find what is wrong with the options of a policy loss and its rollouts."""
    return _unread(chosen, given) or _level(chosen) or _groups(chosen, chosen.scale_rewards != "none") or (
        _rollouts(chosen)
    )  # fmt: skip


def rloo(chosen: options.Options, given: Given) -> Told:
    """Find what is wrong with the options of RLOO and its rollouts."""
    return _groups(chosen, True) or _rollouts(chosen)


def own(chosen: options.Options, given: Given) -> Told:
    """Find what is wrong with the options of rollouts for somebody's own algorithm."""
    asked = {"num_generations", "reward_funcs", "steps_per_generation", "num_iterations"} & given.keys()
    return _groups(chosen, False) if asked else None


def _unread(chosen: options.Options, given: Given) -> Told:
    """Find a number that the loss does not read."""
    loss = str(chosen.loss_type)
    readers = {
        "delta": CLIPPED,
        "epsilon": CLIPPED,
        "epsilon_high": (*CLIPPED, "cispo"),
        **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), ("sapo",)),
        **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), ("vespo",)),
    }
    for name, names in readers.items():
        if name in given and loss not in names and given[name].read() is not None:
            return name, f"it is not read by loss_type {loss}; {' '.join(names)} read it."
    if loss == "cispo" and chosen.epsilon_high is None:
        return "epsilon_high", "nothing came; cispo bounds the ratio itself by it, and 5.0 is recommended."
    if chosen.use_bias_correction_kl and not chosen.beta:
        return "use_bias_correction_kl", "beta is 0, so nothing is corrected; set beta above 0."
    if chosen.top_entropy_quantile == 0:
        return "top_entropy_quantile", "0 came; above 0 was wanted: no token would be trained."
    return None


def _level(chosen: options.Options) -> Told:
    """Find a ratio of whole sequences in a loss that has one a token."""
    loss, level = str(chosen.loss_type), chosen.importance_sampling_level
    if level == "sequence" and loss not in OF_SEQUENCES:
        return "importance_sampling_level", (
            f"sequence came, and loss_type {loss} has a ratio a token; {' '.join(OF_SEQUENCES)} have both."
        )
    if level == "token" and loss == "luspo":
        return "importance_sampling_level", "token came, and luspo has one ratio a sequence; set sequence."
    return None


def _groups(chosen: options.Options, compared: bool) -> Told:
    """Find groups that cannot be compared or do not fit a step."""
    size, batch = chosen.num_generations or 1, chosen.batch_size
    if compared and size < 2:
        return "num_generations", f"{size} came; answers are compared with others, so at least 2 were wanted."
    if batch % size:
        near = max(size, batch // size * size)
        return "batch_size", (
            f"{batch} completions a step came, and {size} of a prompt (num_generations); whole groups were "
            f"wanted, as {near}."
        )
    return None


def _rollouts(chosen: options.Options) -> Told:
    """Find what rollouts cannot do."""
    if chosen.streaming:
        return "streaming", "prompts are read whole; leave it out."
    return None
