"""Acceptance of drafts in plain `mx`, on the device, with one array to read. Same results as `reference`.

This is the twin that a Metal or CUDA kernel must match, and what runs wherever there is none. Few operations,
since at a small model each costs about as much as it computes.
"""

from __future__ import annotations

import mlx.core as mx

NOT_A_NUMBER = -1


def accept(logits: mx.array, drafts: mx.array) -> mx.array:
    """`logits` [K+1, V] of any float type, `drafts` [K] -> int32 [K+3]; see `reference.accept`."""
    logits = logits.astype(mx.float32)
    choices = mx.argmax(logits, axis=-1).astype(mx.int32)
    # `max` hands a NaN on, wherever it stands in the row, and is the cheapest reduction that does.
    choices = mx.where(mx.isnan(mx.max(logits, axis=-1)), NOT_A_NUMBER, choices)
    if not drafts.size:
        return mx.concatenate([mx.zeros((1,), mx.int32), choices, choices])
    # A draft of -1 must not match the mark of a NaN row.
    same = (choices[:-1] == drafts) & (choices[:-1] >= 0)
    n = mx.cumprod(same.astype(mx.int32)).sum(keepdims=True)
    return mx.concatenate([n, choices[n], choices])


def draw(weights: mx.array, v: mx.array | float) -> mx.array:
    """`weights` [V] -> int32 [1]; see `reference.draw`."""
    # A parallel scan may fall by a rounding error between ids, so ids of weight 0 are taken out by hand.
    sums = mx.where(weights > 0, mx.cumsum(weights), -1.0)
    total = sums.max()
    pick = mx.argmax(sums > v * total, keepdims=True).astype(mx.int32)
    return mx.where((total > 0) & ~mx.isnan(weights).any(), pick, NOT_A_NUMBER)


def accept_sampled(p: mx.array, q: mx.array | None, drafts: mx.array, u: mx.array, v: mx.array | float) -> mx.array:
    """`p` [K+1, V], `q` [K, V] or None, `drafts` [K], `u` [K] -> int32 [2]; see `reference.accept_sampled`."""
    p = p.astype(mx.float32)
    if not drafts.size:
        return mx.concatenate([mx.zeros((1,), mx.int32), draw(p[0], v)])
    ids, last = drafts[:, None], drafts.size
    p_x = mx.take_along_axis(p[:-1], ids, axis=-1)[:, 0]
    if q is None:
        kept = u < p_x
        left = mx.put_along_axis(p[:-1], ids, mx.array(0.0), axis=-1)
    else:
        q = q.astype(mx.float32)
        kept = u * mx.take_along_axis(q, ids, axis=-1)[:, 0] < p_x
        left = mx.maximum(p[:-1] - q, 0)
    n = mx.cumprod(kept.astype(mx.int32)).sum(keepdims=True)
    row = left[mx.minimum(n, last - 1)][0]
    # After a full match there is no residual; where rounding has left it no mass, p is the answer as well.
    weights = mx.where((n < last) & (row.sum() > 0), row, p[n][0])
    return mx.concatenate([n, draw(weights, v)])
