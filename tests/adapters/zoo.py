"""Tiny models of many families with random weights, built in place."""

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from adapters import transformers_lm, tree_attention
from core import pack
from core.plan import sample

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# A window shorter than the sequences, so that it matters.
SLIDING = {"sliding_window": 5}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
SERVED = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "mistral": SLIDING,
    "gemma": {},
    "gemma2": {**SLIDING, **LAYERS, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
    "gemma3_text": {**SLIDING, **LAYERS, "query_pre_attn_scalar": 8},
    "smollm3": {},
    "phi3": SLIDING,
    "olmo2": {},
    "olmo3": {**SLIDING, **LAYERS},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**SLIDING, **LAYERS, "logit_scale": 0.25},
    "starcoder2": SLIDING,
    "phi": {},
    "helium": {"head_dim": 4},
    "glm4": {},
    "seed_oss": {},
    "ministral": {**SLIDING, **LAYERS},
    "exaone4": {**SLIDING, **LAYERS},
    "gpt_bigcode": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": {"word_embed_proj_dim": 16, "ffn_dim": 24},
    "biogpt": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**SLIDING, **LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
}
# Recurrence, convolution, chunks, position by bias, or attention of their own.
REFUSED = {
    "mamba": {},
    "rwkv": {},
    "qwen3_next": {},
    "falcon_h1": {},
    "recurrent_gemma": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {},
    "bloom": {},
    "mpt": {},
    "gptj": {},
    "xglm": {},
    "stablelm": {},
    "nemotron": {},
}


def config(kind: str, **changes):
    """Return a tiny config of a family."""
    sizes = {**SIZES, **SERVED.get(kind, {}), **REFUSED.get(kind, {}), **changes}
    return transformers.AutoConfig.for_model(kind, **sizes)


def build(kind: str, *, attention: str = tree_attention.NAME, dtype=torch.float64, **changes):
    """Return a random model of a family; the same weights for every attention implementation."""
    made = AutoModelForCausalLM.from_config(config(kind, **changes), attn_implementation=attention)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=torch.float64) * 0.3)
    made = made.to(dtype).eval()
    if any(name.endswith("experts") for name, _ in made.named_modules()):
        made.set_experts_implementation("eager")  # the grouped product has no float64
    return made


def rows(seed: int = 0, stem: int = 7):
    """Draw samples that share a prefix, fork inside each other, and repeat."""
    draw = np.random.default_rng(seed)
    a = draw.integers(3, VOCAB, stem)
    b = np.concatenate([a, draw.integers(3, VOCAB, 5)])
    tokens = [b, np.concatenate([a[:4], draw.integers(3, VOCAB, 6)]), np.concatenate([b[:9], [3, 4]]), b]
    tokens.append(draw.integers(3, VOCAB, 6))
    return [sample.Sample(tokens=t, trained=np.arange(len(t)) > 1, group=i) for i, t in enumerate(tokens)]


def packed(samples, **options) -> pack.Pack:
    """Merge all samples into one pack of float64 columns."""
    return pack.build(samples, pack.count(samples), dtype=torch.float64, **options)


def nll(scores: pack.Scores) -> tuple[Tensor, dict]:
    """The sum over all rows."""
    return -scores.logprobs.sum(), {}


def alone(module, samples) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of each sample by itself, by the module's own plain forward."""
    total = torch.zeros((), dtype=torch.float64)
    with transformers_lm.KeepDouble():
        for s in samples:
            tokens = torch.from_numpy(s.tokens)
            logits = module(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            chosen = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
            total = total - chosen[torch.from_numpy(s.trained[1:])].sum()
        leaves = dict(module.named_parameters())
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return total.detach(), dict(zip(leaves, found, strict=True))


def gap(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Return the largest relative error of a parameter's gradient.

    A bias of keys moves no softmax: where the true gradient is 0, what rounding leaves is no error.
    """
    assert got.keys() == want.keys()
    floor = 1e-5 * max(g.norm().item() for g in want.values())
    return max(((got[n] - want[n]).norm() / max(want[n].norm().item(), floor)).item() for n in want)
