"""Options of losses, each read by the algorithms that it names."""
# ruff: noqa: RUF009  (each default is an attrs field that a call declares)

from functools import partial
from typing import Any, Literal

import attrs

from shell import about, run_options

_loss = partial(about.option, "loss")
_number = partial(about.option, "loss", None)

_TAUGHT = ("distill", about.OWN)
_LOSSES = {
    "sft": ("nll", "dft"),
    "dpo": (
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
        "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm", "orpo", "cpo", "simpo",
    ),
    "kto": ("kto", "apo_zero_unpaired"),
    "grpo": (
        "grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo", "gspo", "gmpo", "dapo_prompts",
    ),
}  # fmt: skip


@attrs.frozen(kw_only=True)
class LossOptions(run_options.RunOptions):
    """And what losses read."""

    loss_type: tuple[str, ...] | str | None = _loss(
        None,
        "the loss; dpo takes a list",
        only={"sft": "nll", "dpo": "sigmoid", "kto": "kto", "grpo": "dapo"},
        choices=_LOSSES,
    )
    completion_only_loss: bool | None = _loss(
        None,
        "train completions alone; not set: of prompt-completion rows",
        only={"sft": None, "distill": None, about.OWN: None},
    )
    assistant_only_loss: bool | None = _loss(
        None, "train the assistant's turns alone", only={"sft": False, "distill": False, about.OWN: False}
    )
    loss_weights: tuple[float, ...] | None = _loss(
        None, "one for each loss_type", only={"dpo": None}, low=-1e6, high=1e6
    )
    beta: float | None = _loss(
        None,
        "how much leaving the reference costs; orpo: weight of the odds; simpo: scale of rewards; distill: 0 "
        "forward, 1 reverse",
        only={"dpo": 0.1, "kto": 0.1, "grpo": 0.0, "rloo": 0.05, "distill": 1.0, about.OWN: None},
        under={"simpo": 2.0},
        low=0,
    )
    cpo_alpha: float | None = _loss(
        None, "weight of the chosen answers' likelihood in cpo", only={"dpo": 1.0}, low=0
    )
    simpo_gamma: float | None = _loss(None, "margin of simpo", only={"dpo": 0.5}, low=0)
    label_smoothing: float | None = _loss(
        None, "how often labels are wrong", only={"dpo": 0.0}, low=0, high=0.5
    )
    discopop_tau: float | None = _loss(None, "temperature of discopop", only={"dpo": 0.05}, above=0)
    ld_alpha: float | None = _loss(
        None, "weight of the longer answer's surplus", only={"dpo": None}, low=0, high=1
    )
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] | None = (
        _loss(None, "the divergence from the reference", only={"dpo": "reverse_kl"})
    )
    f_alpha_divergence_coef: float | None = _loss(None, "exponent of alpha_divergence", only={"dpo": 0.5})
    use_weighting: bool | None = _loss(None, "weigh pairs by their likelihood", only={"dpo": False})
    desirable_weight: float | None = _loss(None, "weight of good answers", only={"kto": 1.0}, low=0)
    undesirable_weight: float | None = _loss(None, "weight of bad answers", only={"kto": 1.0}, low=0)
    center_rewards_coefficient: float | None = _loss(
        None, "pulls the mean reward to 0", only={"reward": None}, low=0
    )
    ref_model: str | None = _loss(
        None,
        "a folder or hub id whose weights are the reference; not set: those that the policy starts from",
        only=about.by(("dpo", "kto", *about.POLICY, about.OWN), None),
    )
    sync_ref_model: bool | None = _number(
        "let the reference follow the policy", only=about.by(("dpo", "kto", *about.POLICY), False)
    )
    ref_model_mixup_alpha: float | None = _number(
        "the policy's part when the reference moves; 1: it becomes the policy",
        only=about.by(("dpo", "kto", *about.POLICY), 0.6),
        above=0,
        high=1,
    )
    ref_model_sync_steps: int | None = _number(
        "steps between its moves", only=about.by(("dpo", "kto", *about.POLICY), 512), low=1
    )
    precompute_ref_log_probs: bool | None = _number(
        "score all rows with the reference once, and train without a copy of it",
        only=about.by(("dpo", "kto"), False),
    )
    teacher_model: str | None = _loss(
        None,
        "what the student is drawn to: a folder or hub id with its tokenizer",
        only=about.by(_TAUGHT, None),
    )
    teacher_model_revision: str | None = _loss(
        None, "branch, tag or commit of a teacher on the hub", only=about.by(_TAUGHT, None)
    )
    teacher_model_init_kwargs: dict[str, Any] | None = _loss(
        None, "dtype or revision of the teacher; not set: the student's dtype", only=about.by(_TAUGHT, None)
    )
    lmbda: float | None = _number(
        "part of the answers that the student writes; the rows bring the others",
        only={"distill": 1.0},
        low=0,
        high=1,
    )
    loss_top_k: int | None = _number(
        "compare so many of the likeliest tokens, and all others as one; 0: the whole vocabulary",
        only=about.by(_TAUGHT, 0),
        low=0,
    )
    epsilon: float | None = _number(
        "how far the ratio may fall; gmpo: its logarithm",
        only=about.by(about.POLICY, 0.2),
        under={"gspo": 3e-4, "luspo": 2e-3, "gmpo": 0.4},
        low=0,
    )
    epsilon_high: float | None = _number(
        "how far it may rise; epsilon when not set",
        only=about.by(about.POLICY, None),
        under={"gspo": 4e-4, "luspo": 2.5e-3},
        low=0,
    )
    delta: float | None = _number("bound on the ratio of bad answers", only={"grpo": None}, above=1)
    importance_sampling_level: Literal["token", "sequence"] | None = _number(
        "what has a ratio", only={"grpo": "token"}, under={"gspo": "sequence", "luspo": "sequence"}
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] | None = _number(
        "which comes first when rewards become advantages; normalize_then_sum is GDPO",
        only={"grpo": "sum_then_normalize"},
    )
    off_policy_mask_threshold: float | None = _number(
        "leave out bad answers that the generator finds likelier than the policy by more nats a token",
        only={"grpo": None},
        low=0,
    )
    vllm_importance_sampling_correction: bool | None = _number(
        "weigh answers by trainer over generator; not set: of a vLLM server's", only={"grpo": None}
    )
    vllm_importance_sampling_mode: (
        Literal[
            "sequence_mask",
            "sequence_truncate",
            "token_mask",
            "token_truncate",
            "sequence_mean_mask",
            "sequence_mean_truncate",
        ]
        | None
    ) = _number(
        "what has a weight, and whether one out of bounds is cut to them or 0",
        only={"grpo": "sequence_mask"},
        under={"vespo": "token_truncate"},
    )
    vllm_importance_sampling_clip_max: float | None = _number(
        "the weight's upper bound", only={"grpo": 3.0}, above=0
    )
    vllm_importance_sampling_clip_min: float | None = _number(
        "the weight's lower bound; 0 when not set", only={"grpo": None}, low=0
    )
    scale_rewards: Literal["group", "batch", "none"] | None = _number(
        "what divides advantages", only={"grpo": "group"}
    )
    use_bias_correction_kl: bool | None = _number(
        "multiply the divergence by the ratio", only={"grpo": False}
    )
    normalize_advantages: bool | None = _number("to mean 0, deviation 1", only={"rloo": False})
    mask_truncated_completions: bool | None = _number(
        "leave cut answers out", only=about.by(about.POLICY, False)
    )
    keep_masked_in_baseline: bool | None = _number(
        "compare with cut answers that are left out", only=about.by(about.POLICY, False)
    )
    top_entropy_quantile: float | None = _number(
        "part of tokens kept, by entropy", only={"grpo": 1.0}, low=0, high=1
    )
    entropy_coef: float | None = _number("weight of the entropy bonus", only={"grpo": 0.0})
    use_adaptive_entropy: bool | None = _number(
        "raise entropy_coef while entropy is at most entropy_target, else lower it", only={"grpo": False}
    )
    entropy_target: float | None = _number("nats a token", only={"grpo": 0.2}, low=0)
    entropy_coef_delta: float | None = _number("change of entropy_coef a step", only={"grpo": 0.005}, above=0)
    entropy_coef_min: float | None = _number("least entropy_coef", only={"grpo": 0.0}, low=0)
    entropy_coef_max: float | None = _number("most entropy_coef", only={"grpo": 1.0}, above=0)
    sapo_temperature_neg: float | None = _number("of sapo, bad answers", only={"grpo": 1.05}, low=1e-4)
    sapo_temperature_pos: float | None = _number("of sapo, good answers", only={"grpo": 1.0}, low=1e-4)
    vespo_k_pos: float | None = _number("shape of vespo, good answers", only={"grpo": 2.0}, above=0)
    vespo_lambda_pos: float | None = _number("rate of vespo, good answers", only={"grpo": 3.0}, above=0)
    vespo_k_neg: float | None = _number("shape of vespo, bad answers", only={"grpo": 3.0}, above=0)
    vespo_lambda_neg: float | None = _number("rate of vespo, bad answers", only={"grpo": 2.0}, above=0)
