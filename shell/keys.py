"""Keys of other people's files: those that run here, those that change nothing, and those with no equal.

They are the keys of TRL 1.16's configurations and script arguments, of transformers 5's TrainingArguments,
and a few older spellings in public recipes. Each is an option here or stands in exactly one table.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs


class Drop:
    """A value that asks for what is done anyway."""


@attrs.frozen
class Noted:
    """A value, and a line that says what became of the one that was given."""

    value: Any
    note: str


@attrs.frozen
class Run:
    """A key with the meaning of an option: its name here, and what turns its values into ours.

    `change` raises ValueError with what was wanted where a value has no equal; None leaves values alone.
    """

    name: str
    change: Callable[[Any], Any] | None = None


@attrs.frozen
class Refused:
    """A key with no equal: what to do instead, and the values that ask for what is done anyway."""

    instead: str
    fine: tuple[Any, ...] = (None, False)


def is_foreign(name: str) -> bool:
    """Say whether an option has other values elsewhere."""
    return name in _VALUES


def foreign(name: str, value: Any) -> Any:
    """Turn a value that an option has elsewhere into ours.

    Args:
        name: an option of ours.
        value: as YAML gives it.

    Returns:
        Ours, which may be `Noted`, or the value as it came.
    """
    return _VALUES[name](value) if name in _VALUES else value


def _swap(wanted: Mapping[Any, Any], otherwise: str = "") -> Callable[[Any], Any]:
    """Make a change of some values; the others stay as they are, or are refused with what was wanted."""

    def change(value: Any) -> Any:
        for known, ours in wanted.items():
            if value == known and isinstance(value, bool) == isinstance(known, bool):
                return ours
        if otherwise:
            raise ValueError(otherwise)
        return value

    return change


def _compiler(value: Any) -> Any:
    """Take the name of a compiler, or of its mode, as asking for one: ours is the device's."""
    if value is None:
        return Drop
    return True if value in ("inductor", "default") else Noted(True, "the device's own compiler is used")


def _shards(value: Any) -> Any:
    """Read what transformers calls full sharding."""
    words = value.split() if isinstance(value, str) else value
    whole = isinstance(words, list) and not {str(word) for word in words} - {"full_shard", "auto_wrap"}
    if not whole and not isinstance(words, bool) and words is not None:
        raise ValueError("full_shard auto_wrap was wanted, or true")
    return words if isinstance(words, bool) else bool(words)


def _kernel(value: Any) -> Any:
    """Leave kernels that know no trees for our own."""
    other = r"flash(?!_attention_2$)|flex(?!_attention$)|paged|kernels-community/|.*/flash"
    if isinstance(value, str) and re.match(other, value):
        return Noted("auto", f"{value} knows no trees: our own exact attention runs")
    return "auto" if value is None else value


def _trackers(value: Any) -> Any:
    """Read what stands for no tracker, and names in one text."""
    if value in (None, "none", ["none"]):
        return ()
    if value in ("all", ["all"]):
        raise ValueError("name the trackers that you want")
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


def _template(value: Any) -> Any:
    """Take a file; the template of another tokenizer comes with that tokenizer's tokens."""
    if value is None or str(value).endswith((".jinja", ".jinja2")):
        return value
    raise ValueError("a .jinja file was wanted; for the template of another tokenizer save that as a file")


def _mixture(value: Any) -> Any:
    """Read TRL's list of datasets as ours."""
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise ValueError("a list of mappings was wanted, as in dataset: [{path: a, split: s}, {path: b}]")
    ours = {"path": "path", "name": "config", "config": "config", "split": "split", "weight": "weight"}
    entries = []
    for entry in value:
        strange = [key for key in entry if key not in ours and key != "columns" and entry[key] is not None]
        if strange:
            raise ValueError(
                f"{strange[0]} of an entry has no equal; dataset takes path, config, split, weight"
            )
        entries.append({ours[key]: kept for key, kept in entry.items() if key in ours and kept is not None})
    return entries


def _reduced(value: Any) -> Any:
    """Keep learning rates that fall by the schedule alone."""
    if value in ("cosine_warmup_with_min_lr", "cosine_with_restarts", "reduce_lr_on_plateau"):
        raise ValueError("cosine_with_min_lr is the nearest that is here")
    return value


_STRATEGY = _swap({False: "no", "false": "no"})
_BUILT_IN = "the built-in engine generates: leave it out"
_UNSHARED = Noted("none", "prefixes are run once for every sample; leave packing out to share them")
_ADAMW = "AdamW is the optimizer that is here: adamw_torch"

# Values with which our own options stand in other people's files; YAML reads an unquoted `no` as false.
_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "fsdp": _shards,
    "attn_implementation": _kernel,
    "dtype": _swap(
        {None: "auto", "float": "float32", "fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
    ),
    "eval_strategy": _STRATEGY,
    "lr_scheduler_type": _reduced,
    "loss_type": _swap({"chunked_nll": "nll"}),
    "max_steps": _swap({-1: None}),
    "packing": _swap({True: "tree", False: _UNSHARED, None: _UNSHARED}),
    "truncation": _swap({"cut": "keep_start"}),
    "pad_to_multiple_of": _swap({None: "auto"}),
    "report_to": _trackers,
    "save_strategy": _STRATEGY,
    "scale_rewards": _swap({True: "group", False: "none"}),
    "trust_remote_code": _swap({None: False}),
}

RUN: Mapping[str, Run] = {
    "activation_checkpointing": Run("gradient_checkpointing", _swap({None: False})),
    "chat_template_path": Run("chat_template", _template),
    "dataset_name": Run("dataset"),
    "dataset_streaming": Run("streaming"),
    "dataset_test_split": Run("eval_split"),
    "dataset_train_split": Run("dataset_split"),
    "datasets": Run("dataset", _mixture),
    "evaluation_strategy": Run("eval_strategy", _STRATEGY),
    "gradient_accumulation_steps": Run("gradient_accumulation_steps"),
    "logging_strategy": Run("logging_steps", _swap({"steps": Drop}, "steps was wanted, with logging_steps")),
    "max_new_tokens": Run("max_completion_length"),
    "max_seq_length": Run("max_length"),
    "max_tool_calling_iterations": Run(
        "tools", _swap({None: Drop}, "nothing was wanted: tools are not built yet")
    ),
    "model_name_or_path": Run("model"),
    "model_revision": Run("revision"),
    "optim": Run(
        "optim", _swap(dict.fromkeys((None, "adamw_torch", "adamw_torch_fused", "adamw"), Drop), _ADAMW)
    ),
    "per_device_train_batch_size": Run("per_device_train_batch_size"),
    "reward_model_name_or_path": Run("reward_funcs"),
    "teacher_model_name_or_path": Run("teacher_model"),
    "tokenizer_name_or_path": Run("tokenizer"),
    "torch_compile": Run("compile"),
    "torch_compile_backend": Run("compile", _compiler),
    "torch_compile_mode": Run("compile", _compiler),
    "torch_dtype": Run("dtype", _VALUES["dtype"]),
    "train_sampling_strategy": Run(
        "shuffle_dataset", _swap({"random": True, "sequential": False}, "random or sequential was wanted")
    ),
    "truncation_mode": Run("truncation"),
    "use_cpu": Run("device", _swap({True: "cpu", False: Drop}, "true or false was wanted")),
    "use_vllm": Run("engine", _swap({True: "vllm", False: Drop}, "true or false was wanted")),
    "vllm_importance_sampling_cap": Run("vllm_importance_sampling_clip_max", _swap({None: Drop})),
    "vllm_mode": Run("engine", _swap({"server": Drop}, _BUILT_IN)),
    "vllm_server_base_url": Run("engine_url"),
}

_FORWARD = "one forward at a time is made of as many tokens as token_budget allows"
_NOTHING_PADDED = "batches are not padded"
_PUSH = "nothing is uploaded; `hf upload REPO OUTPUT_DIR/model` does it afterwards"
_PROCESSES = "rows are prepared without worker processes"
_LAUNCH = "gradients are summed without DistributedDataParallel"
_SERVER = "it belongs to the server's own command line"
_TRACKERS = "trackers name a run after output_dir"
_LINES = "logs are lines on the terminal and metrics.jsonl"
_DRAWN = "completions.jsonl holds all of them, and the terminal shows some at logged steps"
_METRICS = "metrics are sums over the whole evaluation"

HARMLESS: Mapping[str, str] = {
    "batch_eval_metrics": _METRICS,
    "bf16_full_eval": "evaluation runs in the dtype of training",
    "dataloader_in_order": _PROCESSES,
    "dataloader_multiprocessing_context": _PROCESSES,
    "dataloader_num_workers": _PROCESSES,
    "dataloader_persistent_workers": _PROCESSES,
    "dataloader_pin_memory": _PROCESSES,
    "dataloader_prefetch_factor": _PROCESSES,
    "dataset_num_proc": _PROCESSES,
    "ddp_backend": _LAUNCH,
    "ddp_broadcast_buffers": _LAUNCH,
    "ddp_bucket_cap_mb": _LAUNCH,
    "ddp_find_unused_parameters": _LAUNCH,
    "ddp_static_graph": _LAUNCH,
    "ddp_timeout": _LAUNCH,
    "disable_tqdm": _LINES,
    "do_eval": "eval_strategy says when to evaluate",
    "do_train": "this command trains",
    "ds3_gather_for_generation": "there is no DeepSpeed",
    "enable_jit_checkpoint": "SIGTERM always saves a checkpoint",
    "eval_accumulation_steps": _METRICS,
    "eval_do_concat_batches": _METRICS,
    "eval_packing": "evaluation is packed as training is, to the same result",
    "eval_use_gather_object": _METRICS,
    "full_determinism": "runs are deterministic anyway",
    "activation_checkpointing_kwargs": "every form of gradient_checkpointing is exact",
    "gradient_checkpointing_kwargs": "every form of gradient_checkpointing is exact",
    "hub_always_push": _PUSH,
    "hub_model_id": _PUSH,
    "hub_private_repo": _PUSH,
    "hub_revision": _PUSH,
    "hub_strategy": _PUSH,
    "hub_token": _PUSH,
    "ignore_bias_buffers": _LAUNCH,
    "include_num_input_tokens_seen": "tokens seen are always logged",
    "length_column_name": "lengths are counted",
    "local_rank": "the launcher sets it",
    "log_completions": _DRAWN,
    "log_completions_steps": _DRAWN,
    "log_level": _LINES,
    "log_level_replica": _LINES,
    "log_multimodal": _LINES,
    "log_on_each_node": _LINES,
    "log_unique_prompts": _LINES,
    "logging_first_step": "the first step is always logged",
    "logging_nan_inf_filter": "a NaN is logged as one",
    "lora_task_type": "the algorithm says it",
    "num_completions_to_print": _DRAWN,
    "overwrite_output_dir": "nothing is overwritten: a run found in output_dir is continued",
    "pad_token": _NOTHING_PADDED,
    "padding_free": _NOTHING_PADDED,
    "per_device_eval_batch_size": _FORWARD,
    "precompute_ref_batch_size": _FORWARD,
    "prediction_loss_only": _METRICS,
    "preprocessing_num_workers": _PROCESSES,
    "project": _TRACKERS,
    "push_to_hub": _PUSH,
    "remove_unused_columns": "columns that are not read are left alone",
    "restore_callback_states_from_checkpoint": "the whole state is always restored",
    "run_name": _TRACKERS,
    "save_on_each_node": "a checkpoint is written once",
    "skip_memory_metrics": _LINES,
    "torch_empty_cache_steps": "it changes no result",
    "trackio_bucket_id": _TRACKERS,
    "trackio_space_id": _TRACKERS,
    "trackio_static_space_id": _TRACKERS,
    "use_cache": "training keeps no cache",
    "vllm_enable_sleep_mode": _SERVER,
    "vllm_gpu_memory_utilization": _SERVER,
    "vllm_max_model_length": _SERVER,
    "vllm_model_impl": _SERVER,
    "vllm_server_timeout": _SERVER,
    "vllm_tensor_parallel_size": _SERVER,
}

_LORA = "LoRA in PEFT's plain form is what use_peft gives"
_QUANTIZED = "load the model in bfloat16: dtype: bfloat16"
_MODEL = "use the options dtype, attn_implementation, revision, trust_remote_code"
_SHARDING = "fsdp: true splits parameters; nothing else is sharded"
_MOE = "the router's loss is not built yet: leave it out for a dense model"
_HALF = "dtype: bfloat16 needs no loss scaling"
_DATASET = "write dataset: [{path: a, config: c, split: s, weight: 2}, ...] and eval_dataset"
_SAMPLING = "temperature, top_p, top_k and min_p shape sampling"

REFUSED: Mapping[str, Refused] = {
    "accelerator_config": Refused("batch_size and shuffle_dataset say it", (None,)),
    "auto_find_batch_size": Refused("token_budget is planned so that it fits"),
    "average_tokens_across_devices": Refused(
        "losses are always means over all devices' tokens", (None, True)
    ),
    "bnb_4bit_quant_storage": Refused(_QUANTIZED, (None,)),
    "bnb_4bit_quant_type": Refused(_QUANTIZED, (None, "nf4")),
    "cast_lm_head_to_fp32": Refused("log-probabilities are always summed in float32"),
    "dataloader_drop_last": Refused("every row is trained on"),
    "dataset_configs": Refused("use dataset_config, a text, or a list of datasets"),
    "dataset_kwargs": Refused("rows are always prepared; token rows are recognized", (None, {})),
    "dataset_mixer": Refused(_DATASET, (None,)),
    "dataset_mixture": Refused(_DATASET, (None,)),
    "dataset_prompt_column": Refused("rename the column to prompt", (None, "prompt")),
    "dataset_splits": Refused("use dataset_split and eval_split"),
    "dataset_text_field": Refused("rename the column to text", (None, "text")),
    "debug": Refused("leave it out", (None, "", [])),
    "deepspeed": Refused(_SHARDING),
    "do_predict": Refused("use python -m shell.evaluate"),
    "env": Refused("set environment variables in the shell that starts the run", (None, {})),
    "eos_token": Refused("set the end token in the tokenizer's folder, and name that as tokenizer", (None,)),
    "eval_delay": Refused("use eval_steps", (None, 0)),
    "fp16": Refused(_HALF),
    "fp16_full_eval": Refused(_HALF),
    "fsdp_config": Refused("fsdp: true splits every layer, and needs no more said", (None, {})),
    "generation_batch_size": Refused("use steps_per_generation", (None,)),
    "generation_kwargs": Refused(_SAMPLING, (None, {})),
    "ignore_data_skip": Refused("a continued run goes on at its place in the data"),
    "include_for_metrics": Refused("leave it out", (None, [])),
    "label_names": Refused("columns are found by their names", (None,)),
    "label_smoothing_factor": Refused("leave it out: sft trains on the rows as they are", (None, 0)),
    "liger_kernel_config": Refused("the vocabulary is never materialized anyway", (None,)),
    "load_in_4bit": Refused(_QUANTIZED),
    "load_in_8bit": Refused(_QUANTIZED),
    "log_completions_hub_repo": Refused("nothing is uploaded", (None,)),
    "loss_add_tail": Refused("all other tokens always count as one", (None, True)),
    "lora_target_parameters": Refused(_LORA, (None,)),
    "max_turns": Refused("completions have one turn, tools are not built yet: leave it out", (None, 1)),
    "model_init_kwargs": Refused(_MODEL, (None, {})),
    "neftune_noise_alpha": Refused("leave it out: embeddings get no noise", (None, 0)),
    "num_generations_eval": Refused("one completion a prompt is drawn in evaluation", (None,)),
    "optim_args": Refused("use adam_beta1, adam_beta2, adam_epsilon, weight_decay", (None, "")),
    "optim_target_modules": Refused(_ADAMW, (None,)),
    "packing_strategy": Refused(
        "truncation: split splits long rows, and rows are never merged", (None, "bfd")
    ),
    "parallelism_config": Refused(_SHARDING, (None,)),
    "repetition_penalty": Refused(_SAMPLING, (None, 1.0)),
    "resume_from_checkpoint": Refused(
        "the same output_dir continues; init_from starts from weights", (None, True)
    ),
    "reward_clip_range": Refused("clip inside the reward function", (None,)),
    "router_aux_loss_coef": Refused(_MOE, (None, 0)),
    "reverse_kl_top_1_mode": Refused("loss_top_k takes the student's own likeliest", (None, "argmax")),
    "max_prompt_length": Refused("max_length bounds prompt and completion together: lower that", (None,)),
    "rpo_alpha": Refused("loss_type: [sigmoid, sft] with loss_weights: [1.0, ALPHA] is its sum", (None,)),
    "save_only_model": Refused("checkpoints hold the whole state; OUTPUT_DIR/model holds the weights alone"),
    "teacher_model_server_url": Refused("name a folder or hub id as teacher_model: it runs here", (None,)),
    "seq_kd": Refused("let the teacher write the completions of a dataset, and take lmbda: 0"),
    "test_split_size": Refused("use eval_dataset, or a split as eval_split", (None,)),
    "tf32": Refused("set the precision of matrix products in the environment"),
    "transformers_continuous_batching_config": Refused(_BUILT_IN, (None,)),
    "use_bnb_nested_quant": Refused(_QUANTIZED),
    "use_dora": Refused(_LORA),
    "use_liger": Refused("leave it out: the vocabulary is never materialized anyway"),
    "use_liger_kernel": Refused("leave it out: the vocabulary is never materialized anyway"),
    "use_teacher_server": Refused("name a folder or hub id as teacher_model: it runs here"),
    "use_transformers_continuous_batching": Refused(_BUILT_IN),
    "use_transformers_paged": Refused(_BUILT_IN),
    "vllm_group_port": Refused("use engine_url", (None, 51216)),
    "vllm_server_host": Refused("use engine_url: http://HOST:PORT", (None, "0.0.0.0")),
    "vllm_server_port": Refused("use engine_url: http://HOST:PORT", (None, 8000)),
    "vllm_structured_outputs_regex": Refused(_SAMPLING, (None,)),
}

# What people call an option where its name is too far away for spelling to find it.
NICKNAMES: Mapping[str, str] = {
    "adapter": "use_peft",
    "data": "dataset",
    "epochs": "num_train_epochs",
    "grad_clip": "max_grad_norm",
    "lr": "learning_rate",
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "out": "output_dir",
    "scheduler": "lr_scheduler_type",
    "sequence_len": "max_length",
    "steps": "max_steps",
    "train_dataset": "dataset",
    "train_file": "dataset",
    "val_dataset": "eval_dataset",
}
