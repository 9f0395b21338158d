"""What the options of rollouts and policy losses must be together, told before anything heavy is imported."""

from shell import about, entries, options, reference_checks

Told = reference_checks.Told
Given = entries.Given

CLIPPED = ("grpo", "dapo", "bnpo", "dr_grpo", "luspo", "gspo", "dapo_prompts")
OF_SEQUENCES = ("grpo", "dapo", "bnpo", "luspo", "gspo")
ALWAYS = ("luspo", "gspo")


def grpo(chosen: options.Options, given: Given) -> Told:
    """Find what is wrong with the options of a policy loss and its rollouts."""
    compared = chosen.scale_rewards != "none" or chosen.multi_objective_aggregation == "normalize_then_sum"
    return (
        _unread(chosen, given) or _level(chosen) or _weights(chosen, given) or _reference(chosen)
        or _groups(chosen, compared) or _rollouts(chosen)
    )  # fmt: skip


def rloo(chosen: options.Options, given: Given) -> Told:
    """Find what is wrong with the options of RLOO and its rollouts."""
    return _reference(chosen) or _groups(chosen, True) or _rollouts(chosen) or _baseline(chosen)


def own(chosen: options.Options, given: Given) -> Told:
    """Find what is wrong with the options of rollouts for an algorithm that seems to have some, by them."""
    names = ("num_generations", "reward_funcs", "steps_per_generation", "num_iterations")
    seems = any(options.asked(about.OWN, chosen, given, name) for name in names)
    return reference_checks.own(chosen, given) or (prompts(chosen) if seems else None)


def prompts(chosen: options.Options) -> Told:
    """Find what is wrong with the options of rollouts for somebody's own algorithm that has some."""
    return _groups(chosen, False) or _rollouts(chosen)


def _unread(chosen: options.Options, given: Given) -> Told:
    """Find a number that the loss does not read."""
    loss = str(chosen.loss_type)
    readers = {
        "delta": CLIPPED,
        "epsilon": (*CLIPPED, "gmpo"),
        "epsilon_high": (*CLIPPED, "gmpo", "cispo"),
        **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), ("sapo",)),
        **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), ("vespo",)),
    }
    for name, names in readers.items():
        if options.asked("grpo", chosen, given, name) and loss not in names:
            return name, f"it is not read by loss_type {loss}; {' '.join(names)} read it."
    if loss == "cispo" and chosen.epsilon_high is None:
        return "epsilon_high", "nothing came; cispo bounds the ratio itself by it, and 5.0 is recommended."
    if chosen.use_bias_correction_kl and not chosen.beta:
        return "use_bias_correction_kl", "beta is 0, so nothing is corrected; set beta above 0."
    if chosen.multi_objective_aggregation == "normalize_then_sum" and chosen.scale_rewards != "group":
        return "scale_rewards", "normalize_then_sum divides by the deviation of each reward; leave it out."
    if chosen.top_entropy_quantile == 0:
        return "top_entropy_quantile", "0 came; above 0 was wanted: no token would be trained."
    return _entropy(chosen, given) or _baseline(chosen)


def _entropy(chosen: options.Options, given: Given) -> Told:
    """Find bounds that do not hold the coefficient of entropy."""
    low, high = chosen.entropy_coef_min or 0.0, chosen.entropy_coef_max or 0.0
    first = chosen.entropy_coef or 0.0
    if low > high:
        return "entropy_coef_min", f"{low:g} came, above entropy_coef_max, {high:g}."
    if chosen.use_adaptive_entropy and first > high:
        return "entropy_coef", f"{first:g} came, above entropy_coef_max, {high:g}."
    if options.asked("grpo", chosen, given, "entropy_coef") and first < low:
        return "entropy_coef", f"{first:g} came, below entropy_coef_min, {low:g}; left out, it is that."
    return None


def _baseline(chosen: options.Options) -> Told:
    """Find masked answers that are kept in the baseline where none are masked."""
    if chosen.keep_masked_in_baseline and not chosen.mask_truncated_completions:
        return "keep_masked_in_baseline", "no answer is masked; set mask_truncated_completions, too."
    return None


def _level(chosen: options.Options) -> Told:
    """Find a ratio of whole sequences in a loss that has one a token."""
    loss, level = str(chosen.loss_type), chosen.importance_sampling_level
    if level == "sequence" and loss not in OF_SEQUENCES:
        return "importance_sampling_level", (
            f"sequence came, and loss_type {loss} has a ratio a token; {' '.join(OF_SEQUENCES)} have both."
        )
    if level == "token" and loss in ALWAYS:
        return "importance_sampling_level", f"token came, and {loss} has one ratio a sequence; leave it out."
    return None


def _weights(chosen: options.Options, given: Given) -> Told:
    """Find weights of trainer over generator that are not there, or that a loss cannot take."""
    asked = chosen.vllm_importance_sampling_correction
    weighed = chosen.engine == "vllm" if asked is None else asked
    mode, low = str(chosen.vllm_importance_sampling_mode), chosen.vllm_importance_sampling_clip_min or 0.0
    if chosen.loss_type == "vespo" and not mode.startswith("token_"):
        return "vllm_importance_sampling_mode", f"{mode} came; vespo takes token_truncate or token_mask."
    if low > (chosen.vllm_importance_sampling_clip_max or low):
        return "vllm_importance_sampling_clip_min", f"{low:g} came, above vllm_importance_sampling_clip_max."
    if asked is False or weighed:
        return None
    for name in ("mode", "clip_min", "clip_max"):
        name = f"vllm_importance_sampling_{name}"
        if options.asked("grpo", chosen, given, name):
            return name, "nothing is weighed; set vllm_importance_sampling_correction."
    return None


def _reference(chosen: options.Options) -> Told:
    """Find a reference that nothing is compared with."""
    if chosen.ref_model is None or chosen.beta:
        return None
    return "ref_model", f"{chosen.ref_model} came, and beta is 0, so nothing is compared with it; set beta."


def _groups(chosen: options.Options, compared: bool) -> Told:
    """Find groups that cannot be compared or do not fit a step."""
    compared = compared or bool(chosen.dynamic_sampling)
    size, batch = chosen.num_generations or 1, chosen.batch_size
    if compared and size < 2:
        return "num_generations", f"{size} came; answers are compared with others, so at least 2 were wanted."
    return reference_checks.whole_groups(batch, size)


def _rollouts(chosen: options.Options) -> Told:
    """Find what rollouts cannot do."""
    if chosen.streaming:
        return "streaming", "prompts are read whole; leave it out."
    return None
