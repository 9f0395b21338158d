"""Stands in for the flash kernel of GPUs on machines that have none: its signature and its rules, in float64.

Runs of lengths, and windows aligned at the last query and key.
"""

import torch


def seen_by(length_q, length_k, left, right):
    """What a query of a run sees, as the flash kernels count: aligned at the last query and key."""
    place = torch.arange(length_q)[:, None] + length_k - length_q
    keys = torch.arange(length_k)
    mask = torch.ones(length_q, length_k, dtype=torch.bool)
    if left >= 0:
        mask &= keys >= place - left
    if right >= 0:
        mask &= keys <= place + right
    return mask


def runs(cut_q, cut_k, most_q, most_k):
    """The runs of a call, after what the kernel takes for granted was checked."""
    assert cut_q.dtype == cut_k.dtype == torch.int32
    pairs = list(zip(cut_q.tolist(), cut_q.tolist()[1:], cut_k.tolist(), cut_k.tolist()[1:], strict=False))
    assert most_q == max(b - a for a, b, *_ in pairs)
    assert most_k == max(y - x for *_, x, y in pairs)
    return pairs


def scores(q, k, scale, mask):
    """Scores of one run, heads first; keys of a group of heads are repeated."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~mask, -torch.inf)


def forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """Stand in for aten._flash_attention_forward."""
    assert query.shape[-1] % 8 == 0
    assert all(t.stride(-1) == 1 for t in (query, key, value))
    assert dropout_p == 0.0
    assert not return_debug_mask
    assert (window_size_right == 0) == is_causal
    out, lse = torch.zeros_like(query), torch.full((query.shape[1], len(query)), 9e9, dtype=torch.float64)
    for a, b, x, y in runs(cum_seq_q, cum_seq_k, max_q, max_k):
        mask = seen_by(b - a, y - x, window_size_left, window_size_right)
        s = scores(query[a:b], key[x:y], scale, mask)
        lse[:, a:b] = s.logsumexp(-1)
        v = value[x:y].repeat_interleave(query.shape[1] // value.shape[1], 1)
        out[a:b] = torch.einsum("hqk,khd->qhd", (s - lse[:, a:b, None]).exp().nan_to_num(0.0), v)
    return (
        out,
        lse,
        torch.zeros(2, dtype=torch.uint64),
        torch.zeros(0, dtype=torch.uint64),
        query.new_empty(0),
    )


def backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """Stand in for aten._flash_attention_backward; it takes whatever log-sum-exp it is given."""
    assert logsumexp.is_contiguous()
    assert dropout_p == 0.0
    assert (window_size_right == 0) == is_causal
    group = query.shape[1] // key.shape[1]
    sums = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for a, b, x, y in runs(cum_seq_q, cum_seq_k, max_q, max_k):
        mask = seen_by(b - a, y - x, window_size_left, window_size_right)
        p = (scores(query[a:b], key[x:y], scale, mask) - logsumexp[:, a:b, None]).exp()
        v, k = (t[x:y].repeat_interleave(group, 1) for t in (value, key))
        g = grad_out[a:b]
        delta = (g * out[a:b]).sum(-1).T[..., None]
        ds = p * (torch.einsum("qhd,khd->hqk", g, v) - delta) * scale
        by_key, by_value = torch.einsum("hqk,qhd->khd", ds, query[a:b]), torch.einsum("hqk,qhd->khd", p, g)
        sums[0][a:b] += torch.einsum("hqk,khd->qhd", ds, k)
        for whole, part in zip(sums[1:], (by_key, by_value), strict=True):
            whole[x:y] += part.unflatten(1, (-1, group)).sum(2)
    return sums
