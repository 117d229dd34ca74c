"""The rows of a canvas in plain `mx`, cut along the vocabulary. Same results as `reference`, to float32 rounding.

The one array of size [C, V] is the logits: exponentials, products and noise exist for `WIDTH` columns at a time.
"""

from __future__ import annotations

import mlx.core as mx

NOT_A_NUMBER = -1
WIDTH = 4096  # columns of a piece; the noise of a key is drawn piece by piece, so this number is part of its meaning
LEAST = 2.0**-33  # the generator's step is 2 ** -32: a uniform 0 stands for the half of it, not for an infinite score


def exponential(key: mx.array, rows: int, columns: int) -> mx.array:
    """Draws from Exp(1), float32 [rows, columns]. The fine end of the uniform numbers lies where scores are high."""
    u = mx.random.uniform(shape=(rows, columns), key=key)
    return -mx.log1p(-mx.maximum(u, LEAST))


def noise(key: mx.array, rows: int, columns: int) -> mx.array:
    """The whole noise that `canvas_rows` draws from `key`, [rows, columns]."""
    pieces = _pieces(columns)
    keys = mx.random.split(key, len(pieces))
    return mx.concatenate([exponential(keys[i], rows, b - a) for i, (a, b) in enumerate(pieces)], axis=1)


def _pieces(columns: int) -> list[tuple[int, int]]:
    return [(a, min(a + WIDTH, columns)) for a in range(0, columns, WIDTH)]


def canvas_rows(
    logits: mx.array, temperature: mx.array | float, key: mx.array | None, drawn: mx.array | None
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
    """`logits` [C, V]; `key` or `drawn` noise [C, V] or neither -> see `reference.canvas_rows`; ids int32."""
    rows, columns = logits.shape
    pieces = _pieces(columns)
    keys = None if key is None else mx.random.split(key, len(pieces))
    # `max` hands a NaN on, and both reductions read the logits where they lie.
    top = mx.max(logits, axis=-1).astype(mx.float32)
    choice = mx.where(mx.isnan(top), NOT_A_NUMBER, mx.argmax(logits, axis=-1).astype(mx.int32))
    total = mean = mx.zeros((rows,), mx.float32)
    best, proposal = mx.full((rows,), -float("inf")), choice
    for i, (a, b) in enumerate(pieces):
        # Minus the maximum first: what is left is small, and dividing it loses nothing.
        z = (logits[:, a:b].astype(mx.float32) - top[:, None]) / temperature
        weights = mx.exp(z)
        total = total + weights.sum(axis=-1)
        mean = mean + mx.where(weights > 0, weights * z, 0.0).sum(axis=-1)
        if key is not None or drawn is not None:
            e = exponential(keys[i], rows, b - a) if keys is not None else drawn[:, a:b]
            scores = z - mx.log(e)
            here, found = mx.max(scores, axis=-1), mx.argmax(scores, axis=-1).astype(mx.int32) + a
            better = here > best
            best, proposal = mx.maximum(here, best), mx.where(better, found, proposal)
    lost = ~(mx.abs(top) < float("inf"))
    log_total = mx.log(total)
    lse = mx.where(lost, float("nan"), top / temperature + log_total)
    entropy = mx.where(lost, float("nan"), log_total - mean / total)
    return choice, top, lse, entropy, mx.where(lost, NOT_A_NUMBER, proposal)
