"""Options of every run: model, data, optimizer, batch, adapters, device."""
# ruff: noqa: RUF009  (each default is an attrs field that a call declares)

from functools import partial
from typing import Any, Literal

import attrs

from shell import about

MAX_SEED = 2**32 - 1
"""Most that every generator takes, NumPy's too."""
_model = partial(about.option, "model")
_data = partial(about.option, "data")
_run = partial(about.option, "run")
_step = partial(about.option, "optimizer")
_batch = partial(about.option, "batch")
_device = partial(about.option, "device", built=False)
_lora = partial(about.option, "adapters over frozen weights")


@attrs.frozen(kw_only=True)
class RunOptions:
    """What every algorithm reads."""

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
    bf16: bool = _model(False, "run float32 parameters' products in bfloat16 (autocast)")
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "flex_attention"] = _model(
        "auto", "the attention kernel, where the device has it; every one is exact"
    )
    rope_scaling: dict[str, Any] | None = _model(
        None, "rotary positions beyond the model's own, as in {rope_type: yarn, factor: 4.0}"
    )
    disable_dropout: bool = _model(
        False, "train without dropout", differs=about.by(("dpo", "kto", "reward", "distill"), True)
    )

    dataset: about.Rows = _data(
        None,
        "a .jsonl .json .parquet .csv file, folder, hub id, task:name, demo; or a list [a, {path: b}]",
    )
    dataset_config: str | None = _data(None, "which configuration of a hub dataset")
    dataset_split: str = _data("train", "which split to train on")
    task_options: dict[str, Any] | None = _data(
        None, "of a task: size, seed, and what a task of reasoning_gym takes"
    )
    eval_dataset: about.Rows = _data(None, "what to evaluate on, written like dataset", result=False)
    eval_split: str | None = _data(
        None, "which split to evaluate on; not set: all of a file, test of anything else", result=False
    )
    streaming: bool = _data(False, "read rows as they come; needs max_steps")
    max_length: int | None = _data(
        1024,
        "most tokens of a sequence; null: what the model holds",
        low=2,
        differs=about.by(about.GENERATING, None),
    )
    truncation: Literal["keep_start", "keep_end", "drop", "split"] = _data(
        "keep_start",
        "what becomes of a longer sequence; prompts that the policy answers are dropped and never cut",
    )
    shuffle_dataset: bool = _data(True, "draw rows in a new order each epoch")

    output_dir: str | None = _run(
        None, "where everything is written; the same folder again continues", result=False
    )
    max_steps: int | None = _run(
        None, "optimizer steps; set, it wins over num_train_epochs", low=1, result=False
    )
    num_train_epochs: float = _run(3.0, "passes over the rows", above=0, high=1e9, result=False)
    seed: int = _run(42, "of initial weights, dropout and sampling", low=0, high=MAX_SEED)
    data_seed: int | None = _run(None, "of the order of rows; seed when not set", low=0, high=MAX_SEED)
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
    metric_for_best_model: str | None = _run(
        None, "the metric whose best checkpoint is kept and named; the last weights are written", result=False
    )
    load_best_model_at_end: bool = _run(
        False,
        "write the best checkpoint's weights in the end; by loss where no metric is named",
        result=False,
    )
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
    memory_report: bool = _run(
        False, "tell what takes what of the memory, promised and reached; counting slows a CPU", result=False
    )
    price_per_hour: float | None = _run(
        None, "of one device, to report the cost of tokens", low=0, result=False
    )

    learning_rate: float = _step(
        2e-5,
        "at the top of the schedule",
        low=0,
        differs=about.by(("dpo", "kto", *about.GENERATING), 1e-6) | {"reward": 1e-4},
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

    batch_size: int = _batch(
        8, "rows, pairs or completions in an optimizer step, over all ranks", low=1, high=2**24
    )
    token_budget: int | None = _batch(
        None, "most unique tokens in a forward on one device; not set: planned", low=1
    )
    packing: Literal["tree", "none"] = _batch(
        "tree", "tree shares common prefixes; true and false mean these"
    )
    gradient_checkpointing: bool | Literal["selective"] = _batch(
        False, "keep less memory, run the forward twice; selective runs attention once"
    )
    activation_offloading: bool = _batch(
        False, "keep activations in host memory until the backward", result=False
    )
    chunk_size_feed_forward: int = _batch(0, "tokens that a feed-forward part runs at a time; 0: all", low=0)

    use_peft: bool = _lora(False, "train LoRA adapters over frozen weights")
    lora_r: int = _lora(16, "rank", low=1)
    lora_alpha: float = _lora(32.0, "scale, divided by the rank", above=0)
    lora_dropout: float = _lora(0.0, "dropout before the adapter; above 0 nothing is shared", low=0, below=1)
    lora_target_modules: tuple[str, ...] | str | None = _lora(
        "all-linear", "layers that get one: names, patterns, or all-linear: all but the output head"
    )
    lora_modules_to_save: tuple[str, ...] | None = _lora(None, "modules trained whole beside it, by name")
    use_rslora: bool = _lora(False, "divide alpha by the root of the rank")

    device: Literal["auto", "cpu", "cuda", "rocm", "neuron"] = _device(
        "auto", "where to run", built=True, result=False
    )
    fsdp: bool = _device(
        False,
        "split parameters, gradients and the optimizer's state over the processes",
        built=True,
        result=False,
    )
    compile: bool = _device(False, "compile the decoder, with the device's own compiler", built=True)
    count_signatures: bool = _device(
        False, "count new (operator, shapes, dtypes) a step; slower", built=True, result=False
    )
    compile_beyond: Literal["stop", "eager"] = _device(
        "stop", "what a shape beyond the planned graphs does: stop the run, or run uncompiled", built=True
    )
    pad_to_multiple_of: int | Literal["auto", "none"] = _device(
        "auto",
        "pad forwards to planned sizes, multiples of this; auto: where the device compiles each new shape",
        low=1,
        built=True,
    )
    max_shapes: int | None = _device(
        None, "most sizes that forwards are padded to; set, they are padded", low=1, built=True
    )
