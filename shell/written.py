"""Names of what a run writes into its output folder."""

METRICS, COMPLETIONS, RUN, CONFIG = "metrics.jsonl", "completions.jsonl", "run.json", "config.yaml"
FILES = (METRICS, COMPLETIONS, RUN, CONFIG)
MODEL, PREPARED, BASE, ROWS = "model", "prepared", "base", "rows"
FOLDERS = (MODEL, PREPARED)
LOCK = ".lock"
STATE = "state.json"
"""Of a checkpoint: all that is no tensor."""
