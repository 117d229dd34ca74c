"""What a denoising step asks of its logits, in plain numpy and float64: the definition that a faster form must match.

With z = logits / temperature and p = softmax(z), for every row (position of the canvas):

    choice     argmax of the raw logits in float32, lowest id on ties; -1 for a row with a NaN
    top        the maximum of the raw logits
    lse        log(sum(exp(z)))
    entropy    -sum(p * log(p)), in nats; an id of probability 0 adds 0
    proposal   a sample from p: with `uniform` in [0, 1) the smallest id with p[0] + ... + p[id] > uniform; with `noise`
               drawn from Exp(1) argmax(z - log(noise)) (the Gumbel-max trick, and what torch's `multinomial(p, 1)`
               computes as argmax(p / noise)); without either the choice
    expected   p @ table (that one is `expected`, below)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

NOT_A_NUMBER = -1


def canvas_rows(
    logits: ArrayLike, temperature: float, noise: ArrayLike | None = None, uniform: ArrayLike | None = None
) -> tuple[NDArray, NDArray, NDArray, NDArray, NDArray]:
    """`logits` and `noise` [C, V], `uniform` [C] -> choice int, top, lse, entropy float64, proposal int; [C] each.

    A row with a NaN has choice and proposal -1. A row with an infinity above, or of -inf alone, has no distribution:
    its lse, entropy and proposal are NaN, NaN and -1.
    """
    raw = np.asarray(logits, dtype=np.float32)
    z = raw.astype(np.float64) / temperature
    top = raw.max(-1)
    broken = np.isnan(top)
    choice = np.where(broken, NOT_A_NUMBER, raw.argmax(-1))
    lost = ~np.isfinite(top)
    with np.errstate(invalid="ignore", divide="ignore"):
        shifted = z - z.max(-1, keepdims=True)
        weights = np.exp(shifted)
        total = weights.sum(-1)
        lse = np.where(lost, np.nan, z.max(-1) + np.log(total))
        mean = np.where(weights > 0, weights * shifted, 0).sum(-1) / total
        entropy = np.where(lost, np.nan, np.log(total) - mean)
        scores = z if noise is None else z - np.log(np.asarray(noise, dtype=np.float64))
        if uniform is not None:
            scores = np.cumsum(weights, axis=-1) > np.asarray(uniform, dtype=np.float64)[:, None] * total[:, None]
    proposal = scores.argmax(-1) if noise is not None or uniform is not None else choice
    return choice, top.astype(np.float64), lse, entropy, np.where(lost, NOT_A_NUMBER, proposal)


def expected(logits: ArrayLike, temperature: float, table: ArrayLike) -> NDArray:
    """The mean row of `table` [V, D] under softmax(logits / temperature), [C, D] float64."""
    z = np.asarray(logits, dtype=np.float64) / temperature
    weights = np.exp(z - z.max(-1, keepdims=True))
    return weights @ np.asarray(table, dtype=np.float64) / weights.sum(-1, keepdims=True)
