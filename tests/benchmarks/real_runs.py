"""Twenty steps of each offline algorithm on real rows: `python -m tests.benchmarks.real_runs > docs/runs.md`.

With names of algorithms it prints their sections alone.

The built-in model of random weights under a tokenizer and chat template of the field: prompts, answers and
what pairs share are real, and the figures are not those of a trained model. Needs the optional data folder.
"""

import json
import pathlib
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from tests import paths

ROWS = {
    "sft": ("data/gsm8k/train_2000.jsonl", {"batch_size": 8, "dataset_split": "train[:200]"}),
    "dpo": ("data/lf_demo/dpo_en_200.jsonl", {"batch_size": 4}),
    "kto": ("data/lf_demo/kto_en_200.jsonl", {"batch_size": 4}),
    "reward": ("data/lf_demo/dpo_en_200.jsonl", {"batch_size": 4}),
    "distill": (
        "data/gsm8k/train_2000.jsonl",
        {
            "tokenizer": "$ESPALIER_SHARED/models/stories260K",
            "teacher_model": "$ESPALIER_SHARED/models/stories260K",
            "chat_template": "$ESPALIER_SHARED/models/stories260K/chat_template_for_tests.jinja",
            "batch_size": 8,
            "dataset_split": "train[:400]",
            "truncation": "drop",
            "max_completion_length": 48,
            "lmbda": 0.5,
            "beta": 0.5,
        },
    ),
}
SAME = {
    "model": "tiny", "tokenizer": "$ESPALIER_SHARED/models/smollm2-135m-instruct-tokenizer", "max_steps": 20,
    "learning_rate": "1e-3", "max_length": 512, "logging_steps": 5,
}  # fmt: skip
SHOWN = {
    "sft": ("loss", "mean_token_accuracy", "entropy", "grad_norm", "batch/packing_ratio"),
    "dpo": (
        "loss",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "grad_norm",
        "batch/packing_ratio",
    ),
    "kto": ("loss", "kl", "rewards/chosen", "rewards/rejected", "grad_norm", "batch/packing_ratio"),
    "reward": ("loss", "accuracy", "margin", "mean_reward", "grad_norm", "batch/packing_ratio"),
    "distill": ("loss", "entropy", "on_policy_frac", "grad_norm", "batch/packing_ratio"),
}
HEAD = """# Runs

Printed by `python -m tests.benchmarks.real_runs`: twenty steps of `sft`, `dpo`, `kto`, `reward` and
`distill` on real rows, by the commands above the tables (`grpo` and `rloo`: [a run from
rewards](rollouts.md)). The rows and the tokenizers are not part of the library: `$ESPALIER_SHARED` is a
folder that has them at the paths shown, and with rows and a tokenizer of one's own in their places every
command runs. The model is the built-in one, random weights under SmolLM2's tokenizer and chat template (of
`distill`, under its teacher's): what is real are the rows, the masks and what pairs share. A line's metrics
are means over the steps since the last one.
"""


def command(algorithm: str, folder: str) -> list[str]:
    """Return the words of a run, with the data folder as a variable."""
    file, more = ROWS[algorithm]
    chosen = {**SAME, "dataset": f"$ESPALIER_SHARED/{file}", **more, "output_dir": folder}
    return [algorithm, *(word for name, value in chosen.items() for word in (f"--{name}", str(value)))]


def run(algorithm: str) -> tuple[str, list[Mapping[str, Any]], Mapping[str, Any]]:
    """Make a run; return its command as one types it, its metrics and its run.json."""
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder) / "out"
        words = [
            word.replace("$ESPALIER_SHARED", str(paths.SHARED)) for word in command(algorithm, str(place))
        ]
        subprocess.run([sys.executable, "-m", "shell.train", *words], cwd=paths.ROOT, check=True)
        lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        facts = json.loads((place / "run.json").read_text())
    words = [word if "$" in word else shlex.quote(word) for word in command(algorithm, f"out/{algorithm}")]
    typed = "python -m shell.train " + " ".join(words)
    return typed, lines, facts


def section(algorithm: str) -> str:
    """Return the command and the table of one run."""
    typed, lines, facts = run(algorithm)
    rows, names = facts["rows"]["train"], ("step", *SHOWN[algorithm])
    dropped = "; ".join(f"{number} dropped: {reason}" for reason, number in rows["dropped"].items())
    wrapped = typed.replace(" --", " \\\n  --").replace(" \\\n  --", " --", 1)
    table = ["| " + " | ".join(f"`{name}`" for name in names) + " |", "|" + "---|" * len(names)]
    table += ["| " + " | ".join(f"{line[name]:.4g}" for name in names) + " |" for line in lines]
    read = f"{rows['read']} rows read, {rows['used']} used, {rows['cut_rows']} cut" + (
        f", {dropped}" if dropped else ""
    )
    return "\n".join([f"## {algorithm}", "", "```bash", wrapped, "```", "", f"{read}.", "", *table, ""])


if __name__ == "__main__":
    asked = sys.argv[1:]
    print("\n".join([*([] if asked else [HEAD]), *map(section, asked or ROWS)]), end="")
