"""What the cost model knows of a Hugging Face model, read from its config."""

import torch
import transformers

from core.plan import cost, spans


def shape(
    config: transformers.PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> cost.ModelShape:
    """Read a model's shape; its parameters are counted on the meta device, so no memory is taken.

    Args:
        config: of a causal language model.
        dtype: of the parameters.
        trust_remote_code: run code that comes with the model.
    """
    text = config.get_text_config()
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    heads, hidden = text.num_attention_heads, text.hidden_size
    intermediate = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
    names = [name for name, _ in module.named_parameters()]
    return cost.ModelShape(
        layers=text.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=_width(text),
        intermediate=intermediate,
        vocab=text.vocab_size,
        parameters=sum(p.numel() for p in module.parameters()),
        gated=any("gate" in name for name in names),
        tied=module.get_output_embeddings().weight is module.get_input_embeddings().weight,
        element_bytes=dtype.itemsize,
    )


def rates(config: transformers.PretrainedConfig, price: spans.Price) -> spans.Rates:
    """Return what blocks of attention cost a model.

    Args:
        config: of a causal language model.
        price: of its device.
    """
    text = config.get_text_config()
    return spans.rates(price, heads=text.num_attention_heads, width=_width(text))


def _width(text: transformers.PretrainedConfig) -> int:
    """Return the numbers of a head."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
