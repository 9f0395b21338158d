"""A module or a folder that is not what it is taken for is refused with what would be."""

import pytest
import torch
import transformers

from adapters import loading, tree_attention
from tests.adapters import zoo

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


def test_a_folder_with_layers_that_its_config_does_not_have_is_refused(tmp_path):
    zoo.build("llama", dtype=torch.float32).save_pretrained(tmp_path)
    described = zoo.config("llama", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"of layers that its config does not have, model\.layers\.1"):
        loading.load(str(tmp_path), dtype=torch.float32, config=described)
    loading.load(str(tmp_path), dtype=torch.float32)
