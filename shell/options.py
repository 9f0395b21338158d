"""What can be asked of a run: one flat, typed, frozen field for every option, and what is known about it."""
# ruff: noqa: RUF009  (each default is an attrs field that a call declares)

import types
import typing
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import attrs

# True: the algorithm runs. A known name that is not built yet is refused as such, not as a misspelling.
ALGORITHMS = {
    "sft": True,
    "dpo": True,
    "kto": True,
    "reward": True,
    "grpo": True,
    "rloo": True,
    "distill": False,
}
# Any `module:name`: such an algorithm brings its loss and numbers, and reads options of data and rollouts.
OWN = "own"

# An entry that is a mapping has these keys, of which the path is needed.
ENTRY = ("path", "weight", "config", "split")
FILES = (".jsonl", ".json", ".parquet", ".csv")
"""What a file of rows ends in."""

Rows = tuple[str | dict[str, str | float | None], ...] | str | None


@attrs.frozen(kw_only=True)
class About:
    """What is known of an option beside its name, type and default.

    Attributes:
        group: the heading that help puts it under.
        text: one line of help.
        only: the algorithms that read it, with their defaults; None: every algorithm reads it.
        differs: defaults of algorithms for which the field's own is not right.
        choices: values that each algorithm takes; None: the type says it all.
        low, high: the least and the greatest value of a number.
        above, below: what a value must exceed, and what it must stay under.
        built: whether its part is built; before that only the default is taken.
        result: whether another value gives other weights, so that a run cannot be continued under it.
    """

    group: str
    text: str
    only: Mapping[str, Any] | None = None
    differs: Mapping[str, Any] = attrs.field(factory=dict)
    choices: Mapping[str, tuple[str, ...]] | None = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    built: bool = True
    result: bool = True


def _option(group: str, default: Any, text: str, **known: Any) -> Any:
    """Declare one option."""
    return attrs.field(default=default, metadata={"about": About(group=group, text=text, **known)})


_model = partial(_option, "model")
_data = partial(_option, "data")
_run = partial(_option, "run")
_step = partial(_option, "optimizer")
_batch = partial(_option, "batch")
_device = partial(_option, "device", built=False)
_lora = partial(_option, "adapters over frozen weights", built=False)
_loss = partial(_option, "loss")
_later = partial(_option, "loss", None, built=False)
_number = partial(_option, "loss", None)
_drawn = partial(_option, "rollouts", None)
_rollout = partial(_option, "rollouts", None, built=False)

_POLICY = ("grpo", "rloo")
_GENERATING = ("grpo", "rloo", "distill")


def _by(names: tuple[str, ...], default: Any) -> dict[str, Any]:
    """Give several algorithms one default."""
    return dict.fromkeys(names, default)


_LOSSES = {
    "sft": ("nll", "dft"),
    "dpo": (
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
        "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
    ),
    "kto": ("kto", "apo_zero_unpaired"),
    "grpo": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
}  # fmt: skip

_ROLLOUTS = (*_GENERATING, OWN)


@attrs.frozen(kw_only=True)
class Options:
    """Everything that was asked for, resolved. None: not set, or not read by the algorithm.

    Each field's meaning, range and readers stand in its metadata; `docs/options.md` lists them.
    """

    model: str | None = _model(None, "a folder, a hub id, or tiny: small random weights, no download")
    revision: str | None = _model(None, "branch, tag or commit of a model on the hub")
    trust_remote_code: bool = _model(False, "run the code that a model or dataset brings")
    tokenizer: str | None = _model(None, "a folder or hub id; the model's own when not set")
    chat_template: str | None = _model(
        None, "a Jinja template or a file with one; the tokenizer's own when not set"
    )
    chat_template_kwargs: dict[str, Any] | None = _model(None, "values passed to the chat template")
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = _model(
        "auto", "of the parameters; auto is float32 on CPU and bfloat16 elsewhere"
    )
    attn_implementation: Literal["auto", "eager", "sdpa"] = _model(
        "auto", "the attention kernel; every one is exact"
    )
    disable_dropout: bool = _model(
        False, "train without dropout", differs={"dpo": True, "kto": True, "reward": True}
    )

    dataset: Rows = _data(
        None,
        "a .jsonl .json .parquet .csv file, folder, hub id, task:name, demo; or a list [a, {path: b}]",
    )
    dataset_config: str | None = _data(None, "which configuration of a hub dataset")
    dataset_split: str = _data("train", "which split to train on")
    task_options: dict[str, Any] | None = _data(
        None, "of a task: size, seed, and what a task of reasoning_gym takes"
    )
    eval_dataset: Rows = _data(None, "what to evaluate on, written like dataset", result=False)
    eval_split: str | None = _data(
        None, "which split to evaluate on; not set: all of a file, test of anything else", result=False
    )
    streaming: bool = _data(False, "read rows as they come; needs max_steps")
    max_length: int | None = _data(
        1024, "most tokens of a sequence; null: what the model holds", low=2, differs=_by(_GENERATING, None)
    )
    truncation: Literal["keep_start", "keep_end", "drop", "split"] = _data(
        "keep_start", "what becomes of a longer sequence; cuts and drops are counted"
    )
    shuffle_dataset: bool = _data(True, "draw rows in a new order each epoch")

    output_dir: str | None = _run(
        None, "where everything is written; the same folder again continues", result=False
    )
    max_steps: int | None = _run(
        None, "optimizer steps; set, it wins over num_train_epochs", low=1, result=False
    )
    num_train_epochs: float = _run(3.0, "passes over the rows", above=0, result=False)
    seed: int = _run(42, "of initial weights, dropout and sampling", low=0)
    data_seed: int | None = _run(None, "of the order of rows; seed when not set", low=0)
    resume: Literal["auto", "never", "force"] = _run(
        "auto",
        "auto continues; never refuses a folder in use; force continues under new options",
        result=False,
    )
    init_from: str | None = _run(None, "a checkpoint or model folder whose weights a new run starts from")
    save_strategy: Literal["no", "steps", "epoch"] = _run(
        "steps", "when to save; the end always is", result=False
    )
    save_steps: int | float | None = _run(
        500, "steps between saves; below 1 a part of the run", above=0, result=False
    )
    save_total_limit: int | None = _run(None, "most checkpoints kept", low=1, result=False)
    metric_for_best_model: str | None = _run(None, "the metric whose best checkpoint is kept", result=False)
    greater_is_better: bool | None = _run(
        None, "not set: false for a metric that ends in loss, else true", result=False
    )
    logging_steps: int | float = _run(
        10, "steps between logged lines; below 1 a part of the run", above=0, result=False
    )
    eval_strategy: Literal["no", "steps", "epoch"] | None = _run(
        None,
        "when to evaluate; not set: steps with eval_steps, epoch with eval_dataset, else no",
        result=False,
    )
    eval_steps: int | float | None = _run(
        None, "steps between evaluations; below 1 a part of the run", above=0, result=False
    )
    eval_on_start: bool = _run(False, "evaluate before the first step", result=False)
    report_to: tuple[Literal["trackio", "tensorboard", "wandb"], ...] = _run(
        (), "trackers to log to", result=False
    )
    dry_run: bool = _run(False, "print the plan and stop before the model is loaded", result=False)
    price_per_hour: float | None = _run(
        None, "of one device, to report the cost of tokens", low=0, result=False
    )

    learning_rate: float = _step(
        2e-5,
        "at the top of the schedule",
        low=0,
        differs=_by(("dpo", "kto", *_GENERATING), 1e-6) | {"reward": 1e-4},
    )
    lr_scheduler_type: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr"
    ] = _step("linear", "how the learning rate falls")
    lr_scheduler_kwargs: dict[str, Any] | None = _step(None, "min_lr or min_lr_rate of cosine_with_min_lr")
    warmup_steps: int | None = _step(None, "steps of the rise from 0", low=0)
    warmup_ratio: float | None = _step(None, "the rise as a part of the run", low=0, high=1)
    weight_decay: float = _step(0.0, "AdamW's, times the learning rate", low=0)
    adam_beta1: float = _step(0.9, "decay of the mean of gradients", low=0, below=1)
    adam_beta2: float = _step(0.999, "decay of the mean of squares", low=0, below=1)
    adam_epsilon: float = _step(1e-8, "keeps the quotient finite", above=0)
    max_grad_norm: float = _step(1.0, "gradients are scaled down to this norm; 0: never", low=0)

    batch_size: int = _batch(8, "rows, pairs or completions in an optimizer step, over all ranks", low=1)
    token_budget: int | None = _batch(
        None, "most unique tokens in a forward on one device; not set: planned", low=1
    )
    packing: Literal["tree", "none"] = _batch(
        "tree", "tree shares common prefixes; true and false mean these"
    )
    gradient_checkpointing: bool = _batch(False, "keep less memory, run the forward twice")

    use_peft: bool = _lora(False, "train LoRA adapters over frozen weights")
    lora_r: int = _lora(16, "rank", low=1)
    lora_alpha: float = _lora(32.0, "scale, divided by the rank", above=0)
    lora_dropout: float = _lora(0.05, "dropout before the adapter", low=0, below=1)
    lora_target_modules: tuple[str, ...] | str | None = _lora(None, "names of the layers that get one")

    device: Literal["auto", "cpu", "cuda", "rocm", "neuron"] = _device(
        "auto", "where to run", built=True, result=False
    )
    compile: bool = _device(False, "compile the model")
    pad_to_multiple_of: int | None = _device(
        None, "pad every pack to a multiple of this; not set: planned", low=1
    )
    max_shapes: int | None = _device(None, "most sizes that a compiler may see", low=1)

    loss_type: tuple[str, ...] | str | None = _loss(
        None,
        "the loss; dpo takes a list",
        only={"sft": "nll", "dpo": "sigmoid", "kto": "kto", "grpo": "dapo"},
        choices=_LOSSES,
    )
    completion_only_loss: bool | None = _loss(
        None, "train completions alone; not set: of prompt-completion rows", only={"sft": None, OWN: None}
    )
    assistant_only_loss: bool | None = _loss(
        None, "train the assistant's turns alone", only={"sft": False, OWN: False}
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
        "let the reference follow", only=_by(("dpo", "kto", *_POLICY), False)
    )
    ref_model_mixup_alpha: float | None = _later(
        "how far the reference follows", only=_by(("dpo", "kto", *_POLICY), 0.6), low=0, high=1
    )
    ref_model_sync_steps: int | None = _later(
        "steps between its moves", only=_by(("dpo", "kto", *_POLICY), 512), low=1
    )
    teacher_model: str | None = _later("a folder or hub id", only={"distill": None})
    lmbda: float | None = _later(
        "part of the rows that the student writes", only={"distill": 1.0}, low=0, high=1
    )
    epsilon: float | None = _number("how far the ratio may fall", only=_by(_POLICY, 0.2), low=0)
    epsilon_high: float | None = _number(
        "how far it may rise; epsilon when not set", only=_by(_POLICY, None), low=0
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
    mask_truncated_completions: bool | None = _number("leave cut answers out", only=_by(_POLICY, False))
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

    num_generations: int | None = _drawn(
        "completions of a prompt", only={"grpo": 8, "rloo": 2, OWN: 8}, low=1
    )
    num_iterations: int | None = _drawn(
        "updates on the same completions", only=_by((*_POLICY, OWN), 1), low=1
    )
    steps_per_generation: int | None = _drawn(
        "optimizer steps whose prompts are drawn at once", only=_by((*_POLICY, OWN), 1), low=1
    )
    max_completion_length: int | None = _drawn("most tokens of a completion", only=_by(_ROLLOUTS, 512), low=1)
    temperature: float | None = _drawn("of sampling", only=_by(_ROLLOUTS, 1.0), above=0)
    top_p: float | None = _drawn(
        "keep the likeliest tokens up to this sum", only=_by(_ROLLOUTS, 1.0), above=0, high=1
    )
    top_k: int | None = _drawn("keep this many tokens; 0: all", only=_by(_ROLLOUTS, 0), low=0)
    min_p: float | None = _drawn("least part of the likeliest", only=_by(_ROLLOUTS, None), low=0, high=1)
    reward_funcs: tuple[str, ...] | str | None = _drawn(
        "names or module:function; a task brings its own", only=_by((*_POLICY, OWN), None)
    )
    reward_weights: tuple[float, ...] | None = _drawn("one for each reward", only=_by((*_POLICY, OWN), None))
    environment: str | None = _rollout("module:name of a class", only=_by(_ROLLOUTS, None))
    tools: tuple[str, ...] | None = _rollout("module:name of functions", only=_by(_ROLLOUTS, None))
    engine: Literal["built_in", "vllm"] | None = _rollout("what generates", only=_by(_ROLLOUTS, "built_in"))
    engine_url: str | None = _rollout("address of a vLLM server", only=_by(_ROLLOUTS, None))
    max_staleness: int | None = _rollout(
        "updates a rollout may lag; 0: none", only=_by((*_POLICY, OWN), 0), low=0
    )


FIELDS: dict[str, "attrs.Attribute[Any]"] = {field.name: field for field in attrs.fields(Options)}


def names() -> str:
    """List the algorithms."""
    return ", ".join(ALGORITHMS)


def about(name: str) -> About:
    """Return what is known of an option."""
    return FIELDS[name].metadata["about"]


def reader(algorithm: str) -> str:
    """Return the name under which an algorithm's options are known: its own, or `own` for a `module:name`."""
    return algorithm if algorithm in ALGORITHMS else OWN


def reads(algorithm: str, name: str) -> bool:
    """Say whether an algorithm reads an option."""
    only = about(name).only
    return only is None or reader(algorithm) in only


def default(algorithm: str, name: str) -> Any:
    """Return what an option is when nobody sets it; None where the algorithm does not read it."""
    known, who = about(name), reader(algorithm)
    if known.only is not None:
        return known.only.get(who)
    return known.differs.get(who, FIELDS[name].default)


def optional(name: str) -> bool:
    """Say whether null is a value of an option."""
    return types.NoneType in typing.get_args(FIELDS[name].type)


def choices(algorithm: str, name: str) -> tuple[str, ...]:
    """Return the values that an option takes, empty where they are not a list."""
    listed = about(name).choices
    if listed is not None:
        return listed.get(reader(algorithm), ())
    return _literals(FIELDS[name].type)


def _literals(kind: Any) -> tuple[str, ...]:
    """Return the values of the Literal inside an annotation."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    return tuple(value for part in typing.get_args(kind) for value in _literals(part))
