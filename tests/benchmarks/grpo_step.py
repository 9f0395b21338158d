"""A whole GRPO step, rollout and update, against one written by hand: `python -m tests.benchmarks.grpo_step
[--json FILE]`.

An 11-million-parameter Llama, two prompts of some 400 tokens, a group of eight completions of 64 tokens each,
one AdamW update with the gradient clipped. By hand: transformers' `generate` on left-padded copies of the
prompts, then one padded forward under sdpa whose logits are made for completions alone, the clipped loss,
backward, torch.optim.AdamW. Ours: the sampler, which runs a prompt once a group, and `steps.train_step` on
the forest. Nothing ends early. Pairs are interleaved; the median of their ratios is reported, and of the
ratios of rollout and update alone. At the start both update the same weights on the same completions, and the
norms of their gradients are compared.
"""

import argparse
import statistics
import time

import numpy as np
import torch
import transformers

from adapters import sampling
from core import advantages, algorithms, pack, ports, steps
from core.plan import sample
from tests.benchmarks import plain_step, timing

GROUP, LENGTHS, TOKENS = 8, (411, 389), 64


def prompts(turn: int) -> list[np.ndarray]:
    """Draw the prompts of a step; they share nothing."""
    draw = np.random.default_rng(turn)
    return [np.concatenate([[i], draw.integers(3, 512, n - 1)]) for i, n in enumerate(LENGTHS)]


def rewards(completions: list[np.ndarray]) -> torch.Tensor:
    """Reward even tokens."""
    return torch.tensor([float((c % 2 == 0).mean()) for c in completions])


GROUPS = torch.arange(len(LENGTHS)).repeat_interleave(GROUP)


class Ours(plain_step.Ours):
    """Our step."""

    def rollout(self, rows: list[np.ndarray], turn: int) -> list[ports.Completion]:
        rule = ports.Sampling(max_tokens=TOKENS)
        engine = sampling.Sampler(self.model)
        numbers = range(len(rows))
        drawn = engine.generate(self.state.params, rows, numbers, num_samples=GROUP, sampling=rule, key=turn)
        return [completion for group in drawn for completion in group]

    def update(self, rows: list[np.ndarray], drawn: list[ports.Completion]) -> float:
        columns = algorithms.grpo.columns(rewards([c.tokens for c in drawn]), GROUPS)["advantage"]
        made = [
            sample.Sample(
                tokens=np.concatenate([rows[i // GROUP], c.tokens]),
                trained=np.arange(len(rows[i // GROUP]) + TOKENS) >= len(rows[i // GROUP]),
                columns={
                    "sampled_logprobs": np.concatenate(
                        [np.zeros(len(rows[i // GROUP]), np.float32), c.logprobs]
                    ),
                    "advantage": float(columns[i]),
                },
                group=i // GROUP,
                unit=i,
            )
            for i, c in enumerate(drawn)
        ]
        packs = [pack.build(made, pack.count(made), needs=("entropies",))]
        self.state, means = steps.train_step(
            self.model, algorithms.grpo, self.optimizer, self.state, packs, donate=True
        )
        return float(means["grad_norm"].total / means["grad_norm"].weight)


class Padded(plain_step.Padded):
    """The step that one writes by hand."""

    def rollout(self, rows: list[np.ndarray], turn: int) -> list[np.ndarray]:
        tokens, mask = _left(rows)
        options = transformers.GenerationConfig(
            max_new_tokens=TOKENS, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0
        )
        made = self.model.generate(tokens, attention_mask=mask, generation_config=options)
        return list(made[:, tokens.shape[1] :].numpy())

    def update(self, rows: list[np.ndarray], drawn: list[np.ndarray]) -> float:
        tokens, mask = _left(rows)
        answers = torch.from_numpy(np.stack(drawn))
        ids = torch.cat([tokens, answers], 1)
        mask = torch.cat([mask, torch.ones_like(answers)], 1)
        logits = self.model(
            input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False, logits_to_keep=TOKENS + 1,
        ).logits[:, :-1]  # fmt: skip
        logprobs = logits.float().log_softmax(-1).gather(-1, answers[..., None])[..., 0]
        gain = advantages.group_normalized(rewards(drawn), GROUPS)[:, None]
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean(1).mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(norm)


def _left(rows: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad copies of the prompts on their left, as generate wants them."""
    copies = [row for row in rows for _ in range(GROUP)]
    tokens = torch.zeros(len(copies), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(copies):
        tokens[i, -len(row) :], mask[i, -len(row) :] = torch.from_numpy(row), 1
    return tokens, mask


def _step(side: Ours | Padded, turn: int) -> tuple[float, float]:
    """Make a step; seconds of its rollout and of its update."""
    rows, start = prompts(turn), time.perf_counter()
    drawn = side.rollout(rows, turn)
    between = time.perf_counter()
    side.update(rows, drawn)
    return between - start, time.perf_counter() - between


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--pairs", type=int, default=5)
    chosen = parser.parse_args()
    sides = {"ours": Ours(), "by hand": Padded()}
    sides["by hand"].model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    rows = prompts(0)
    drawn = sides["ours"].rollout(rows, 0)
    norms = sides["ours"].update(rows, drawn), sides["by hand"].update(rows, [c.tokens for c in drawn])
    sides["by hand"].rollout(rows, 0)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(1, chosen.pairs + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            times[name].append(_step(sides[name], turn))
    slow, fast = times["by hand"], times["ours"]
    found = {
        "machine": timing.machine(),
        "speed_up": timing.ratio([sum(t) for t in slow], [sum(t) for t in fast]),
        "speed_up_of_rollout": timing.ratio([t[0] for t in slow], [t[0] for t in fast]),
        "speed_up_of_update": timing.ratio([t[1] for t in slow], [t[1] for t in fast]),
        "lowest_speed_up": min(sum(a) / sum(b) for a, b in zip(slow, fast, strict=True)),
        "seconds_by_hand": statistics.median(sum(t) for t in slow),
        "seconds_ours": statistics.median(sum(t) for t in fast),
        "gradient_norm_gap": abs(norms[0] - norms[1]) / norms[1],
        "pairs": chosen.pairs,
    }
    timing.report(found, chosen.json)


if __name__ == "__main__":
    main()
