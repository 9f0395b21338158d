"""Packing ratios of real files, rendered plainly without a chat template, against known figures."""

import collections
import itertools
import json

import numpy as np
import pytest
import tokenizers

from core.plan import prefix_tree
from tests import paths


@pytest.fixture(scope="module")
def encode():
    """Return the function from text to ids, without special tokens."""
    path = paths.shared("models", "smollm2-135m-instruct-tokenizer", "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def lines(*parts):
    return [json.loads(line) for line in paths.shared("data", *parts).read_text().splitlines()]


def turn(encode, message):
    text = message.get("content") or ""
    for call in message.get("tool_calls") or []:
        function = {key: call["function"][key] for key in ("name", "arguments")}
        text += f"<tool_call>\n{json.dumps(function)}\n</tool_call>"
    return encode(f"<|im_start|>{message['role']}\n{text}<|im_end|>\n")


def whole(encode, messages):
    return list(itertools.chain.from_iterable(turn(encode, message) for message in messages))


def by_turn(encode, messages):
    """Return one sample for each assistant turn: everything up to it."""
    so_far, rows = [], []
    for message in messages:
        so_far = so_far + turn(encode, message)
        if message["role"] == "assistant":
            rows.append(so_far)
    return rows


def grouped(rows, render):
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row["task_id"]].extend(render(row))
    return list(groups.values())


def gsm8k(encode):
    return [
        [encode(f"Question: {row['prompt']}\nAnswer: {one['text']}") for one in row["samples"]]
        for row in lines("gsm8k", "groups4_first_660.jsonl")
    ]


def preferences(encode):
    return [
        [whole(encode, row["prompt"] + row[side]) for side in ("chosen", "rejected")]
        for row in lines("lf_demo", "dpo_en_200.jsonl")
    ]


def conversations(encode):
    rows = lines("lf_demo", "glaive_toolcall_en_200.jsonl")
    return [group for group in (by_turn(encode, row["messages"]) for row in rows) if group]


def shell_agents(encode):
    rows = lines("intercode", "bash_60_tasks_7_models.jsonl")
    return grouped(rows, lambda row: by_turn(encode, row["messages"]))


def flights(encode):
    tools = json.loads(paths.shared("data", "tau_airline", "tools.json").read_text())
    return encode(f"<tools>{json.dumps(tools)}</tools>\n"), lines(
        "tau_airline", "trajectories_tasks_0_24.jsonl"
    )


def whole_flights(encode):
    tools, rows = flights(encode)
    return grouped(rows, lambda row: [tools + whole(encode, row["messages"])])


def flights_by_turn(encode):
    tools, rows = flights(encode)
    return grouped(rows[:40], lambda row: [tools + one for one in by_turn(encode, row["messages"])])


def thoughts(encode, most=None):
    return [
        [encode(f"{row['prompt']}\n{one['text']}") for one in row["samples"][:most]]
        for row in lines("tot_game24", "cot_100_samples_900_949.jsonl")
    ]


def first_thoughts(encode):
    return thoughts(encode, 8)


def searches(encode):
    groups = []
    for row in lines("tot_game24", "bfs_trees_900_949.jsonl"):
        candidates = {one for step in row["steps"] for one in step["candidates"]}
        groups.append([encode(f"Input: {row['puzzle']}\n{one}") for one in candidates])
    return groups


def tool_searches(encode):
    """Return the root-to-leaf paths of each tree of calls."""
    groups = []
    for row in lines("toolbench", "dfs_trees_3.jsonl"):
        below = collections.defaultdict(list)
        for node in row["nodes"]:
            below[node["parent"]].append(node)
        start = encode(f"System: {json.dumps(row['functions'])}\nUser: {row['query']}")
        paths_, stack = [], [(row["nodes"][0], start)]
        while stack:
            node, above = stack.pop()
            seen = f"\nObservation: {node['observation']}" if node["observation"] else ""
            tokens = above + encode(f"\n{node['type']}: {node['text']}{seen}")
            stack += [(child, tokens) for child in below[node["id"]]]
            paths_ += [] if below[node["id"]] else [tokens]
        groups.append(paths_)
    return groups


@pytest.mark.parametrize(
    ("render", "rows", "nodes", "ratio"),
    [
        (gsm8k, 511_434, 372_152, 1.37),
        (preferences, 302_881, 214_633, 1.41),
        (conversations, 219_306, 90_237, 2.43),
        (shell_agents, 1_270_145, 235_295, 5.40),
        (whole_flights, 740_721, 438_613, 1.69),
        (flights_by_turn, 3_886_454, 213_224, 18.23),
        (thoughts, 507_506, 94_242, 5.39),
        (first_thoughts, 41_493, 19_847, 2.09),
        (searches, 268_506, 79_344, 3.38),
        (tool_searches, 23_693, 9_095, 2.61),
    ],
)
def test_real_files_share_as_much_as_is_known(encode, render, rows, nodes, ratio):
    groups = [[np.array(row, np.int64) for row in group] for group in render(encode)]
    trees = [prefix_tree.build(group) for group in groups]
    assert sum(len(row) for group in groups for row in group) == rows
    assert sum(len(tree.tokens) for tree in trees) == nodes
    assert round(rows / nodes, 2) == ratio
    for tree, group in zip(trees, groups, strict=True):
        spelled, _ = prefix_tree.paths(tree)
        assert np.array_equal(tree.tokens[spelled], np.concatenate(group))
