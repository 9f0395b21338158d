"""A whole step on forests against the same rows unshared and padded: `python -m tests.benchmarks.step [--json
FILE]`.

An 11-million-parameter Llama with AdamW. For each case the speed-up, the FLOP ratio that the plan predicts,
their quotient, and the peak memory of both (each in a process of its own). Real rows are read from the
optional data folder and left out where it is missing.
"""

import argparse
import json
import multiprocessing

import numpy as np
import tokenizers

from core.plan import cost
from tests import paths
from tests.benchmarks import plain_step, timing
from tests.benchmarks.attention import fan

SHAPE = cost.ModelShape(
    layers=7,
    hidden=384,
    heads=6,
    kv_heads=2,
    head_dim=64,
    intermediate=1024,
    vocab=512,
    parameters=11_000_000,
)


def cases() -> dict[str, list[np.ndarray]]:
    """Return rows by case; token ids below 512."""
    found = {"prompt 1024, 8 x 128": fan(1024, 8, 128), "prompt 512, 8 x 256": fan(512, 8, 256)}
    found = {name: [row % 512 for row in rows] for name, rows in found.items()}
    model = paths.SHARED / "models" / "stories260K" / "tokenizer.json"
    if not model.exists():
        return found
    encode = tokenizers.Tokenizer.from_file(str(model)).encode
    puzzles = paths.SHARED / "data" / "tot_game24" / "cot_100_samples_900_949.jsonl"
    first = json.loads(puzzles.open().readline())
    texts = [first["prompt"] + "\n" + s["text"] for s in first["samples"][:16]]
    found["game24, a group of 16"] = [np.array(encode(text).ids, np.int64) for text in texts]
    found["InterCode, a sample a turn"] = _turns(encode)
    return found


def _turns(encode) -> list[np.ndarray]:
    """Return a sample for each turn of the agents at one task, those of at most 1,024 tokens, 24 at the
    most."""
    rows, task = [], None
    for line in (paths.SHARED / "data" / "intercode" / "bash_60_tasks_7_models.jsonl").open():
        row = json.loads(line)
        task = row["task_id"] if task is None else task
        if row["task_id"] != task:
            break
        seen: list[int] = []
        for message in row["messages"]:
            seen = seen + encode(f"<{message['role']}> {message['content']}\n").ids
            if message["role"] == "assistant" and len(seen) <= 1024:
                rows.append(np.array(seen, np.int64))
    return rows[:24]


def flop_ratio(rows: list[np.ndarray]) -> float:
    """Return FLOPs of the rows alone over those of their forest."""
    samples = plain_step.samples(rows)
    alone, shared = (cost.work(samples, share=share) for share in (False, True))
    first, second = (cost.flops(SHAPE, w.nodes, w.pairs, w.edges) for w in (alone, shared))
    return first / second


def peak(kind: str, name: str) -> int:
    """Return the peak memory in bytes that one step takes beyond the model, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (kind, name))


def _peak(kind: str, name: str) -> int:
    side, rows = {"forest": plain_step.Ours, "padded": plain_step.Padded}[kind](), cases()[name]
    side.step(rows[:1])
    return timing.peak_bytes(lambda: side.step(rows))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    ours, padded = plain_step.Ours(), plain_step.Padded()
    found = {"machine": timing.machine(), "cases": {}}
    for name, rows in cases().items():
        sides = {"forest": lambda rows=rows: ours.step(rows), "padded": lambda rows=rows: padded.step(rows)}
        times = timing.by_turns(sides, rounds=chosen.rounds)
        faster, predicted = timing.ratio(times["padded"], times["forest"]), flop_ratio(rows)
        memory = {kind: peak(kind, name) for kind in ("forest", "padded")}
        found["cases"][name] = {
            "rows": len(rows),
            "speed_up": faster,
            "flop_ratio": predicted,
            "speed_up_over_flop_ratio": faster / predicted,
            "memory_ratio": memory["padded"] / max(1, memory["forest"]),
            "peak_bytes": memory,
        }
    timing.report(found, chosen.json)


if __name__ == "__main__":
    main()
