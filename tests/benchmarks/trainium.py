"""What padding costs on Trainium, without one: `python -m tests.benchmarks.trainium [--json FILE]`.

Real lengths, batched four rows a step and padded to the step's longest, go through three policies: our plan
(multiples of 128, of 512 from there on), multiples of 128, and no padding at all. Every size is compiled
once, forward and backward apart. Graphs of whole runs are counted by `tests.benchmarks.graphs`.

Everything here is emulated. The 20 steps on GSM8K are run under every policy on an emulated device whose
compiler counts what it is given, and must make the graphs that are told; the other counts are two a size, as
those were found to be. Seconds are arithmetic on two prices calibrated on one published pair of runs (20
steps of one NeuronCore on batches of 1,024 positions: 130 s, of which 1.71 s a step): 96 s a size, forward
and backward together, and 1.71 s for 1,024 positions of a step, in proportion. These are assumptions:
attention grows faster than its length, and a compiler does not take the same time for every size.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from adapters import pick
from core.plan import batching, padding
from tests import paths
from tests.benchmarks import timing
from tests.devices import emulated

ROWS = 4
STEPS = (20, 500, 5000)
SECONDS_PER_POSITION = 1.71 / 1024
SECONDS_PER_SIZE = 96.0
POLICIES = ("plan", "128", "unpadded")
ON_DEVICE = ("gsm8k", 20)


def main() -> None:
    """Print, and write where asked, one entry for each distribution, number of steps and policy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="file for the figures")
    chosen = parser.parse_args()
    found = []
    for name, lengths in (("gsm8k", gsm8k()), ("tau", tau())):
        for num_steps in STEPS:
            rows = batches(lengths, num_steps)
            found += [entry(name, policy, rows) for policy in POLICIES]
            if (name, num_steps) == ON_DEVICE:
                check(rows, found[-len(POLICIES) :])
    timing.report(found, chosen.json)


def gsm8k() -> np.ndarray:
    """Return the lengths of conversations of question and answer."""
    words = _tokenizer()
    rows = _rows("gsm8k", "train_2000.jsonl")
    return np.array([len(words.apply_chat_template(row["messages"], return_dict=False)) for row in rows])


def tau() -> np.ndarray:
    """Return the lengths of agents' trajectories, a sample a turn of the agent, tools in the prompt."""
    words = _tokenizer()
    tools = paths.SHARED.joinpath("data", "tau_airline", "tools.json").read_text()
    prompt = len(words.encode(f"<tools>{json.dumps(json.loads(tools))}</tools>\n"))
    found = []
    for row in _rows("tau_airline", "trajectories_tasks_0_24.jsonl"):
        length = prompt
        for message in row["messages"]:
            length += len(words.encode(_turn(message)))
            found += [length] if message["role"] == "assistant" else []
    return np.array(found)


def batches(lengths: np.ndarray, num_steps: int) -> np.ndarray:
    """Return the lengths of each step's rows, over as many epochs as it takes, each in its own order."""
    epochs = -(-num_steps * ROWS // len(lengths))
    order = np.concatenate([batching.order(len(lengths), seed=0, epoch=epoch) for epoch in range(epochs)])
    return lengths[order[: num_steps * ROWS]].reshape(num_steps, ROWS)


def padded(policy: str, longest: np.ndarray) -> list[int]:
    """Return the size that a policy pads each step to."""
    if policy == "plan":
        plan = padding.plan(longest, step_cost=seconds, compile_cost=SECONDS_PER_SIZE)
        return [padding.size(plan, int(n)) for n in longest]
    return [padding.rounded(int(n), 128 if policy == "128" else 1) for n in longest]


def entry(name: str, policy: str, rows: np.ndarray) -> dict[str, Any]:
    """Return what a policy compiles, pads and costs."""
    sizes = padded(policy, rows.max(1))
    num_sizes = len({*sizes})
    return {
        "distribution": name,
        "steps": len(rows),
        "policy": policy,
        "graphs": 2 * num_sizes,
        "padded_tokens": int(sum(sizes) * ROWS - rows.sum()),
        "seconds": round(sum(map(seconds, sizes)) + SECONDS_PER_SIZE * num_sizes, 1),
    }


def seconds(size: int) -> float:
    """Return what a step costs."""
    return SECONDS_PER_POSITION * size


def check(rows: np.ndarray, found: Sequence[dict[str, Any]]) -> None:
    """Replay steps on the emulated device, and compare what it compiled with what was counted."""
    for one in found:
        graphs = emulated.run(compiled, padded(one["policy"], rows.max(1)))
        assert graphs == one["graphs"], f"{one} was counted; the emulated device compiled {graphs} graphs"
        print(f"emulated device, {ON_DEVICE}, {one['policy']}: {graphs} graphs, as counted")


def compiled(sizes: list[int]) -> int:
    """Return the graphs that steps of these sizes make a compiler build, in a process with the device."""
    device = pick.device("neuron")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    config.use_cache = False
    module = transformers.AutoModelForCausalLM.from_config(config).to(device.type)
    limits = {"recompile_limit": len(sizes), "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(**limits):
        step = torch.compile(module, fullgraph=True, **device.compile)
        emulated.forget()
        for size in sizes:
            tokens = torch.zeros(ROWS, size, dtype=torch.int64, device=device.type)
            # Rows are padded at their end, where causal attention needs no mask.
            step(input_ids=tokens).logits.sum().backward()
    return len(emulated.counts()["graphs"])


def _tokenizer() -> Any:
    """Load the tokenizer, its template with it."""
    return transformers.AutoTokenizer.from_pretrained(
        paths.SHARED / "models" / "smollm2-135m-instruct-tokenizer"
    )


def _rows(*parts: str) -> list[dict[str, Any]]:
    """Read a file of rows."""
    lines = paths.SHARED.joinpath("data", *parts).read_text().splitlines()
    return [json.loads(line) for line in lines]


def _turn(message: dict[str, Any]) -> str:
    """Render a message with its calls of tools, which the model's own template leaves out."""
    calls = "".join(
        f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    )
    return f"<|im_start|>{message['role']}\n{message.get('content') or ''}{calls}<|im_end|>\n"


if __name__ == "__main__":
    main()
