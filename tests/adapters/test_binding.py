"""A module that was loaded for another attention is refused with what to load it with."""

import pytest
import transformers

from adapters import loading, tree_attention

SMALL = transformers.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_a_module_for_another_attention_is_told_by_both_names(kind):
    module = transformers.AutoModelForCausalLM.from_config(SMALL, attn_implementation=kind)
    wanted = (
        f"attn_implementation '{kind}', which knows no trees.*attn_implementation='{tree_attention.NAME}'"
    )
    with pytest.raises(ValueError, match=wanted):
        loading.bind(module)
