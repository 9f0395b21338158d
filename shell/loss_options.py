"""Options of losses, each read by the algorithms that it names."""

from functools import partial
from typing import Literal

import attrs

from shell import about, run_options

_loss = partial(about.option, "loss")
_later = partial(about.option, "loss", None, built=False)
_number = partial(about.option, "loss", None)

_LOSSES = {
    "sft": ("nll", "dft"),
    "dpo": (
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
        "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
    ),
    "kto": ("kto", "apo_zero_unpaired"),
    "grpo": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
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
        only={"sft": None, about.OWN: None},
    )
    assistant_only_loss: bool | None = _loss(
        None, "train the assistant's turns alone", only={"sft": False, about.OWN: False}
    )
    loss_weights: tuple[float, ...] | None = _loss(None, "one for each loss_type", only={"dpo": None})
    beta: float | None = _loss(
        None,
        "how much leaving the reference costs; distill: 0 forward, 1 reverse",
        only={"dpo": 0.1, "kto": 0.1, "grpo": 0.0, "rloo": 0.05, "distill": 1.0},
        low=0,
    )
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
    sync_ref_model: bool | None = _later(
        "let the reference follow", only=about.by(("dpo", "kto", *about.POLICY), False)
    )
    ref_model_mixup_alpha: float | None = _later(
        "how far the reference follows", only=about.by(("dpo", "kto", *about.POLICY), 0.6), low=0, high=1
    )
    ref_model_sync_steps: int | None = _later(
        "steps between its moves", only=about.by(("dpo", "kto", *about.POLICY), 512), low=1
    )
    teacher_model: str | None = _later("a folder or hub id", only={"distill": None})
    lmbda: float | None = _later(
        "part of the rows that the student writes", only={"distill": 1.0}, low=0, high=1
    )
    epsilon: float | None = _number("how far the ratio may fall", only=about.by(about.POLICY, 0.2), low=0)
    epsilon_high: float | None = _number(
        "how far it may rise; epsilon when not set", only=about.by(about.POLICY, None), low=0
    )
    delta: float | None = _number("bound on the ratio of bad answers", only={"grpo": None}, above=1)
    importance_sampling_level: Literal["token", "sequence"] | None = _number(
        "what has a ratio", only={"grpo": "token"}
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
    top_entropy_quantile: float | None = _number(
        "part of tokens kept, by entropy", only={"grpo": 1.0}, low=0, high=1
    )
    entropy_coef: float | None = _number("weight of the entropy bonus", only={"grpo": 0.0})
    sapo_temperature_neg: float | None = _number("of sapo, bad answers", only={"grpo": 1.05}, above=0)
    sapo_temperature_pos: float | None = _number("of sapo, good answers", only={"grpo": 1.0}, above=0)
    vespo_k_pos: float | None = _number("shape of vespo, good answers", only={"grpo": 2.0}, above=0)
    vespo_lambda_pos: float | None = _number("rate of vespo, good answers", only={"grpo": 3.0}, above=0)
    vespo_k_neg: float | None = _number("shape of vespo, bad answers", only={"grpo": 3.0}, above=0)
    vespo_lambda_neg: float | None = _number("rate of vespo, bad answers", only={"grpo": 2.0}, above=0)
