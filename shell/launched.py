"""What the configuration of a launcher asks for: honored, told of, or refused by name.

`accelerate launch` hands its YAML file on as variables of the environment.
"""

import os
from collections.abc import Mapping

import attrs

from shell import config, mistake

NO = ("", "no", "none", "false", "0")
# Variables of what is not built, and what to do instead.
REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": ("deepspeed_config", "fsdp_config splits parameters here"),
    "ACCELERATE_USE_MEGATRON_LM": ("megatron_lm_config", "fsdp_config splits parameters here"),
    "FSDP_OFFLOAD_PARAMS": (
        "fsdp_offload_params",
        "set it to false; activation_offloading moves activations",
    ),
    "FSDP_IGNORED_MODULES": ("fsdp_ignored_modules", "every parameter is split: leave it out"),
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo_backend", "set it to no; --compile compiles"),
}
STRATEGIES = ("FULL_SHARD", "1")
SIZES = ("TP_SIZE", "CP_SIZE", "SP_SIZE")


def applied(command: config.Command, variables: Mapping[str, str] = os.environ) -> config.Command:
    """Return a command with what its launcher asks for.

    What the command itself says wins.

    Args:
        command: what was asked for.
        variables: of the environment.

    Raises:
        mistake.Mistake: the launcher asks for something that is not built.
    """
    _check(variables)
    changes, notes = dict[str, object](), list[str]()
    if variables.get("ACCELERATE_MIXED_PRECISION") == "bf16" and not command.given & {"bf16", "dtype"}:
        changes |= {"bf16": True, "dtype": "float32"}  # as bf16 told alone means it
    if _on(variables, "ACCELERATE_USE_FSDP"):
        changes |= _sharded(command, variables, notes)
    if not changes:
        return command
    told = ", ".join(f"{name} {str(value).lower()}" for name, value in changes.items())
    return attrs.evolve(
        command,
        options=attrs.evolve(command.options, **changes),
        notes=(*command.notes, f"accelerate's configuration says {told}", *notes),
    )


def _sharded(command: config.Command, variables: Mapping[str, str], notes: list[str]) -> dict[str, object]:
    """Return the options that accelerate's fsdp_config stands for."""
    strategy = variables.get("FSDP_SHARDING_STRATEGY", "1")
    if variables.get("FSDP_VERSION", "1") == "1" and strategy not in STRATEGIES:
        raise mistake.Mistake(
            f"accelerate's fsdp_sharding_strategy: {strategy} came; FULL_SHARD is the one that is built"
        )
    if variables.get("FSDP_RESHARD_AFTER_FORWARD", "true") == "false":
        notes.append("accelerate's fsdp_reshard_after_forward false: layers are gathered twice all the same")
    changes: dict[str, object] = {} if "fsdp" in command.given else {"fsdp": True}
    again = _on(variables, "FSDP_ACTIVATION_CHECKPOINTING")
    if again and "gradient_checkpointing" not in command.given:
        changes["gradient_checkpointing"] = True
    moves = _on(variables, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD")
    if moves and "activation_offloading" not in command.given:
        changes["activation_offloading"] = True
    return changes


def _check(variables: Mapping[str, str]) -> None:
    """Refuse what is not built."""
    for name, (key, instead) in REFUSED.items():
        if _on(variables, name):
            raise mistake.Mistake(f"accelerate's {key}: {variables[name]} came; {instead}")
    for name in SIZES:
        size = variables.get(f"PARALLELISM_CONFIG_{name}", "1")
        if size not in ("", "0", "1"):
            raise mistake.Mistake(
                f"accelerate's parallelism_config: {name.lower()} {size} came; only data parallel and fully "
                "sharded runs are built: set it to 1"
            )
    half = variables.get("ACCELERATE_MIXED_PRECISION", "no")
    if half not in (*NO, "bf16"):
        raise mistake.Mistake(f"accelerate's mixed_precision: {half} came; bf16 or no was wanted")


def _on(variables: Mapping[str, str], name: str) -> bool:
    """Say whether a variable asks for something."""
    return variables.get(name, "").lower() not in NO
