"""What PEFT's folders are called inside, and which of its adapters are plain LoRA.

Nothing here imports torch: whoever checks options reads folders before a model is.
"""

from collections.abc import Mapping
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Parts of PEFT's LoRA that change what an adapter computes, and the values with which they do not.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "velora_config": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    # The others begin from a base that they have changed, which is not the one that the folder names.
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}


def odd(told: Mapping[str, Any]) -> str | None:
    """Return what makes an adapter another than plain LoRA; None: nothing does.

    Args:
        told: its configuration.
    """
    found = [name for name, fine in PLAIN.items() if told.get(name) not in fine]
    return f"{found[0]} {told.get(found[0])!r}" if found else None
