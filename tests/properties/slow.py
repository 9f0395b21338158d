"""What a step must give, by plain loops: each sample alone through log_softmax, all rows in one table."""

import torch

from core import pack, reference, steps


def states(params, tokens):
    """Return the last hidden state of every token of one sequence, row by row."""
    hidden, keys, values = [], [], []
    for place, token in enumerate(tokens.tolist()):
        x = params["tokens"][token] + params["positions"][place]
        keys.append(torch.tanh(x @ params["key"]))
        values.append(torch.tanh(x @ params["value"]))
        weights = torch.stack([torch.tanh(x @ params["query"]) @ k for k in keys]) * reference.WIDTH**-0.5
        seen = sum(w * v for w, v in zip(weights.softmax(0), values, strict=True))
        hidden.append(x + seen @ params["out"])
    return torch.stack(hidden)


def chain(params, tokens):
    """Return the logits of every next token of one sequence, row by row."""
    return states(params, tokens) @ params["head"].T


def to_teacher(logits, told, beta=0.5):
    """Return the generalized Jensen-Shannon divergence between two rows of logits, as it is defined."""
    p, t = logits.softmax(0), told.softmax(0)
    m = (1 - beta) * p + beta * t
    return beta * (t * (t / m).log()).sum() + (1 - beta) * (p * (p / m).log()).sum()


def scores(params, samples) -> pack.Scores:
    """Score all trained tokens, sample by sample."""
    names = ("logprobs", "entropies", "log_sum_squares", "mean_logits", "top1", "values", "divergences")
    found = {name: [] for name in names}
    for one in samples:
        logits, hidden = chain(params, one.tokens), states(params, one.tokens)
        told = chain(reference.params(seed=reference.TEACHER), one.tokens)
        for place in one.trained.nonzero()[0].tolist():
            z, token = logits[place - 1], int(one.tokens[place])
            log_p = z.log_softmax(0)
            found["logprobs"].append(log_p[token])
            found["entropies"].append(-(log_p.exp() * log_p).sum())
            found["log_sum_squares"].append((log_p.exp() ** 2).sum().log())
            found["mean_logits"].append(z.mean())
            found["top1"].append((z.argmax() == token).double())
            found["values"].append(hidden[place] @ params["score"])
            found["divergences"].append(to_teacher(z, told[place - 1]))
    return pack.Scores(**{n: torch.stack(v) for n, v in found.items()})


def step(algorithm, params, samples):
    """Return loss and gradients of a step over these samples."""
    table = pack.build(samples, pack.count(samples), share=False, dtype=torch.float64).batch
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    value, _ = steps.objective(algorithm, table, algorithm.carry)(scores(leaves, samples))
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return value.detach(), dict(zip(leaves, found, strict=True))
