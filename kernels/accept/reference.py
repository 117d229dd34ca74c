"""Acceptance of drafts in plain numpy: the definition that every faster form must match.

Greedy: draft i is kept while it equals the target's choice (`argmax` of the raw logits in float32, lowest id on
ties); the token after the kept ones is the target's own choice there.

Sampled: draft x at position i, p the target's and q the draft's distribution there (as in Leviathan et al. 2023):

    drawn from q    keep with probability min(1, p(x) / q(x)), else draw from max(p - q, 0), renormalized
    a point mass    keep with probability p(x),                else draw from p without x, renormalized

Both leave the target's distribution unchanged. A point mass must not be scored by the first row, whatever
distribution it was the maximum of: so there is no rule to choose here, only `q`, the distribution that the
drafts were really drawn from, or None.

The random numbers are arguments: `u[i]` decides draft i, `v` draws the token after the kept ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

NOT_A_NUMBER = -1  # stands for a choice that a NaN made impossible


def accept(logits: ArrayLike, drafts: ArrayLike) -> NDArray[np.int32]:
    """Greedy acceptance. `logits` [K+1, V], `drafts` [K] -> int32 [K+3]: kept drafts n, next token, K+1 choices.

    A row with a NaN has the choice -1 and keeps no draft. A row of equal values, all -inf too, has the choice 0.
    """
    logits = np.asarray(logits, dtype=np.float32)
    drafts = np.asarray(drafts, dtype=np.int64)
    choices = np.where(np.isnan(logits).any(-1), NOT_A_NUMBER, logits.argmax(-1))
    n = 0
    while n < len(drafts) and choices[n] >= 0 and choices[n] == drafts[n]:
        n += 1
    return np.array([n, choices[n], *choices], dtype=np.int32)


def keep_probability(p: NDArray, q: NDArray | None, x: int) -> float:
    """Probability that draft `x` is kept. `p`, `q` [V]; `q` None for a point mass."""
    if q is None:
        return float(p[x])
    return 1.0 if p[x] >= q[x] else float(p[x] / q[x])


def residual(p: NDArray, q: NDArray | None, x: int) -> NDArray:
    """Weights [V], not normalized, from which the token after the rejection of `x` is drawn.

    Where rounding has left no mass (p equals q, or p is all on x) a rejection was itself rounding: p is the answer.
    """
    left = np.where(np.arange(len(p)) == x, 0, p) if q is None else np.maximum(p - q, 0)
    return left if left.sum() > 0 else p


def draw(weights: NDArray, v: float) -> int:
    """Inverse CDF: the first id whose cumulative weight exceeds v * total, 0 <= v < 1. Never an id of weight 0."""
    sums = np.where(weights > 0, np.cumsum(weights), -1)
    total = sums.max()
    # A NaN total compares false, too.
    return int(np.argmax(sums > v * total)) if total > 0 and not np.isnan(weights).any() else NOT_A_NUMBER


def accept_sampled(p: ArrayLike, q: ArrayLike | None, drafts: ArrayLike, u: ArrayLike, v: float) -> NDArray[np.int32]:
    """Sampled acceptance, in the dtype of `p`. `p` [K+1, V], `q` [K, V] or None, `drafts`, `u` [K] -> int32 [2].

    Returns kept drafts n and the next token, which is -1 where a NaN or a row without mass made it impossible.
    """
    p = np.asarray(p)
    rows = None if q is None else np.asarray(q, dtype=p.dtype)
    drafts, u = np.asarray(drafts, dtype=np.int64), np.asarray(u, dtype=p.dtype)
    for i, x in enumerate(drafts):
        # u * q < p is u < p / q without the division by a small number.
        kept = u[i] * (1 if rows is None else rows[i, x]) < p[i, x]
        if not kept:
            left = residual(p[i], None if rows is None else rows[i], int(x))
            return np.array([i, draw(left, v)], dtype=np.int32)
    return np.array([len(drafts), draw(p[len(drafts)], v)], dtype=np.int32)


def outcomes(p: ArrayLike, q: ArrayLike | None, drafts: ArrayLike) -> dict[tuple[int, int], float]:
    """Exact probability of every (n, next) of `accept_sampled` over uniform u and v, in float64.

    This is what makes exactness provable: the emitted distribution is a finite sum of these.
    """
    p = np.asarray(p, dtype=np.float64)
    out: dict[tuple[int, int], float] = {}
    reach = 1.0
    for i, x in enumerate(drafts):
        row = None if q is None else np.asarray(q, dtype=np.float64)[i]
        keep = keep_probability(p[i], row, int(x))
        left = residual(p[i], row, int(x))
        out |= {(i, t): reach * (1 - keep) * w / left.sum() for t, w in enumerate(left)}
        reach *= keep
    return out | {(len(drafts), t): reach * w / p[-1].sum() for t, w in enumerate(p[-1])}
