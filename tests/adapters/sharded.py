"""What each of two processes runs for test_shards.py: a pass on split parameters beside one on whole ones."""

import json
import os
import pathlib
import sys
import weakref

import attrs
import numpy as np
import torch

from adapters import cpu, loading, lora, ranks, shards
from core import pack
from tests.adapters import zoo

MODES = {
    "tied": ("llama", {}),
    "untied": ("qwen2", {}),
    "windows and softcap": ("gemma2", {}),
    "products of another layout": ("gpt2", {}),
    "experts": ("mixtral", {}),
    "layers again": ("llama", {"gradient_checkpointing": True}),
    "layers but attention again": ("llama", {"gradient_checkpointing": "selective"}),
    "chunks": ("llama", {"feed_forward_chunk": 2}),
    "chunks in layers again": ("llama", {"feed_forward_chunk": 2, "gradient_checkpointing": True}),
    "an adapter": ("llama", {"adapter": ()}),
    "an adapter and a whole head": ("qwen2", {"adapter": ("lm_head",)}),
    "an adapter of the head": ("llama", {"adapter": (), "targets": ("q_proj", "lm_head")}),
}
BUDGETS = {"at once": (None, None), "in pieces": (6, 6), "in pieces on one process": (6, None)}


def bound(kind, modes):
    """Bind a model whose parameters are not those that its module came with."""
    modes = dict(modes)
    whole, targets = modes.pop("adapter", None), modes.pop("targets", (lora.ALL,))
    model, params = loading.bind(zoo.build(kind), **modes)
    if whole is not None:
        model, params = lora.attach(model, params, lora.Settings(rank=2, targets=targets, whole=whole))
    draw = torch.Generator().manual_seed(5)
    return model, {
        n: p + 0.1 * torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in params.items()
    }


def watched(model):
    """Return a list that every parameter of a layer is added to, weakly, when it is gathered."""
    alive, sharding = [], model.sharding
    gather = sharding._whole

    def noted(unit, parts):
        found = gather(unit, parts)
        if unit is not sharding._rest:
            alive.extend(weakref.ref(tensor) for tensor in found.values())
        return found

    sharding._whole = noted
    return alive


def gaps(team, kind, modes, budgets, shares, silent=None):
    """Return how far loss and gradients are from those of one process with all rows and whole parameters.

    On the process `silent` nobody trains, whatever rows it has.
    """
    samples = zoo.rows()
    whole, params = bound(kind, modes)
    every = pack.build(samples, pack.count(samples), dtype=torch.float64)
    want, _, want_grads = whole.pull_back(params, every, 0, zoo.nll)
    own = [samples[i] for i in shares[team.index]]
    if team.index == silent:
        own = [attrs.evolve(one, trained=np.zeros(len(one.tokens), np.bool_)) for one in own]
    each = pack.build(own, pack.count(samples), budget=budgets[team.index], dtype=torch.float64)
    model, parts = shards.split(whole, params, team, device="cpu")
    scores = model.predict(parts, each, None).logprobs
    alive = watched(model)
    left = []

    def loss(scores):
        left.append(sum(ref() is not None for ref in alive))
        return zoo.nll(scores)

    value, _, found = model.pull_back(parts, each, 0, loss)
    grads = {n: model.sharding.layout.whole(n, g) for n, g in found.items()}
    value = team.sum(value)
    again, back = shards.joined(model, parts, device="cpu")
    same = all(torch.equal(back[n], params[n]) for n in params)
    return {
        "scores": float(abs(team.sum(scores.sum()) + want) / want),
        "loss": float(abs(value - want) / want),
        "gap": zoo.gap(grads, want_grads),
        "norm": float(
            shards.norm(team)(found) / torch.cat([g.flatten() for g in want_grads.values()]).norm()
        ),
        "held": sum(p.numel() for p in {**model.frozen, **parts}.values()),
        "whole": sum(p.numel() for p in {**again.frozen, **back}.values()),
        "same": same,
        "gathered": len(alive),
        "left": left[0],
    }


def main(folder: str) -> None:
    """Run every mode under every budget, and one with a process that has no rows."""
    torch.set_num_threads(1)
    team = ranks.join(cpu.DEVICE)
    found = {
        f"{mode}, {budget}": gaps(team, kind, modes, budgets, ((0, 2, 3), (1, 4)))
        for mode, (kind, modes) in MODES.items()
        for budget, budgets in BUDGETS.items()
    }
    for budget, budgets in BUDGETS.items():
        found[f"no rows, {budget}"] = gaps(team, "llama", {}, budgets, (range(5), ()))
        adapter = {"adapter": ("lm_head",)}
        found[f"no rows and a whole head, {budget}"] = gaps(team, "qwen2", adapter, budgets, (range(5), ()))
        found[f"nobody trains, {budget}"] = gaps(team, "llama", {}, budgets, (range(5), range(4)), silent=1)
    ranks.leave()
    pathlib.Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
