"""Completions of one prompt against generate on copies: `python -m tests.benchmarks.sampling [--json FILE]`.

A Llama of SmolLM2-135M's shape with random weights, or the model of a folder (`--model`). Both draw the same
number of tokens from the whole distribution at temperature 1: generate on a batch that holds the prompt once
a completion, the sampler on the prompt and the size of the group. Pairs are interleaved. `--parts` also times
prefill, one token from it included, alone; what is left is decoding. The first case with two pairs takes
about two minutes.
"""

import argparse
import functools

import numpy as np
import torch
import transformers

from adapters import loading, sampling, tree_attention
from core import ports
from tests.benchmarks import timing

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# Name: lengths of the prompts, completions of each, tokens of each.
CASES = {
    "prompt 512, 8 x 64": ([512], 8, 64),
    "prompt 32, 8 x 64": ([32], 8, 64),
    "4 prompts of 128 to 512, 4 x 32": ([128, 512, 256, 384], 4, 32),
    "16 prompts of 64, 1 x 32": ([64] * 16, 1, 32),
}


def modules(folder: str | None) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedModel]:
    """Return the same model twice: for generate, and for the sampler."""
    if folder:
        load = transformers.AutoModelForCausalLM.from_pretrained
        kinds = ("sdpa", tree_attention.NAME)
        plain, bound = (load(folder, dtype=torch.float32, attn_implementation=kind) for kind in kinds)
        return plain, bound
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    config = transformers.LlamaConfig(**SHAPE, attn_implementation=tree_attention.NAME)
    bound = transformers.LlamaForCausalLM(config)
    bound.load_state_dict(plain.state_dict())
    return plain, bound


class Sides:
    """Both contenders on one model."""

    def __init__(self, folder: str | None) -> None:
        plain, bound = modules(folder)
        self.plain = plain.eval()
        model, self.params = loading.bind(bound)
        self.sampler = sampling.Sampler(model)

    def prompts(self, lengths: list[int]) -> list[np.ndarray]:
        draw = np.random.default_rng(0)
        return [draw.integers(3, self.plain.config.vocab_size, n) for n in lengths]

    def ours(self, lengths: list[int], num_samples: int, num_tokens: int) -> None:
        """Draw; nothing ends early."""
        prompts = self.prompts(lengths)
        found = self.sampler.generate(
            self.params,
            prompts,
            range(len(prompts)),
            num_samples=num_samples,
            sampling=ports.Sampling(max_tokens=num_tokens),
            key=0,
        )
        assert all(len(c.tokens) == num_tokens for group in found for c in group)

    def copies(self, lengths: list[int], num_samples: int, num_tokens: int) -> None:
        """Draw from left-padded copies with transformers."""
        rows = [p for p in self.prompts(lengths) for _ in range(num_samples)]
        tokens = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for i, row in enumerate(rows):
            tokens[i, -len(row) :], mask[i, -len(row) :] = torch.from_numpy(row), 1
        options = transformers.GenerationConfig(
            max_new_tokens=num_tokens, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0
        )
        made = self.plain.generate(tokens, attention_mask=mask, generation_config=options)
        assert made.shape[1] == max(lengths) + num_tokens


def _times(
    sides: Sides, lengths: list[int], num_samples: int, num_tokens: int, *, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each round by contender, after two tokens that do not count."""
    contenders = {"sampler": sides.ours, "copies": sides.copies}
    for draw in contenders.values():
        draw([32], num_samples, 2)
    return timing.by_turns(
        {n: functools.partial(draw, lengths, num_samples, num_tokens) for n, draw in contenders.items()},
        rounds=rounds,
        warm=False,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--model", help="a folder; random weights without")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--case", choices=CASES, default=next(iter(CASES)))
    parser.add_argument("--parts", action="store_true", help="prefill and decoding, too")
    chosen = parser.parse_args()
    sides = Sides(chosen.model)
    sides.plain.generation_config = transformers.GenerationConfig(pad_token_id=0)
    size = CASES[chosen.case]
    times = _times(sides, *size, rounds=chosen.rounds)
    found = {
        "machine": timing.machine(),
        "case": chosen.case,
        "speed_up": timing.ratio(times["copies"], times["sampler"]),
        "seconds": times,
    }
    if chosen.parts:
        first = _times(sides, *size[:2], 1, rounds=chosen.rounds)
        decoding = {
            side: [a - b for a, b in zip(times[side], first[side], strict=True)]
            for side in ("copies", "sampler")
        }
        found["speed_up_of_prefill"] = timing.ratio(first["copies"], first["sampler"])
        found["speed_up_of_decoding"] = timing.ratio(decoding["copies"], decoding["sampler"])
    timing.report(found, chosen.json)


if __name__ == "__main__":
    main()
