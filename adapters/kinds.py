"""Which kinds of model can never be trained on trees, told from the config alone, before weights are read."""

from typing import Any

import transformers

WANTED = "a decoder with transformers' attention, such as Llama or Qwen, is wanted"


def unserved(config: transformers.PretrainedConfig, *, scalar: bool = False) -> str | None:
    """Say what about a model stands in the way; None: nothing that its config tells.

    Args:
        config: of the model.
        scalar: whether a scalar head is wanted in the place of the one over the vocabulary.
    """
    # An index, and not `get`: the mappings import what is asked for, and `in` looks at names alone.
    writers: Any = transformers.AutoModelForCausalLM._model_mapping
    fillers: Any = transformers.AutoModelForMaskedLM._model_mapping
    judges: Any = transformers.AutoModelForSequenceClassification._model_mapping
    kind, own = type(config), "auto_map" in config.to_dict()
    if config.is_encoder_decoder:
        return f"it is an encoder with a decoder; {WANTED}"
    if kind in fillers and not own:
        return f"it is an encoder, with a head to fill gaps; {WANTED}"
    if kind in writers and not own and (reason := _own_attention(config, writers[kind])):
        return f"{reason}; {WANTED}"
    if scalar and kind not in judges and not own:
        return "transformers has no classifier of its kind, so it takes no scalar head; Llama and Qwen do"
    return None


def check(config: transformers.PretrainedConfig, *, scalar: bool = False) -> None:
    """Refuse a model that can never be trained on trees; Args as of `unserved`.

    Raises:
        ValueError: says what the model is, and what was wanted.
    """
    if reason := unserved(config, scalar=scalar):
        raise ValueError(f"a {config.model_type} model cannot be trained on trees: {reason}.")


def _own_attention(config: transformers.PretrainedConfig, made: Any) -> str | None:
    """Say what is in the place of attention that can be exchanged."""
    if not made.__module__.startswith("transformers."):
        return None
    if not hasattr(config.get_text_config(), "num_attention_heads"):
        return "it is recurrent, and carries a state from token to token"
    if not (made._supports_attention_backend or made._supports_sdpa):
        return "its attention is one of its own"
    return None
