"""The rows of a canvas in plain `mx`, cut along the vocabulary. Same results as `reference`, to float32 rounding.

The one array of size [C, V] is the logits: exponentials, products and noise exist for `WIDTH` columns at a time. The
proposal is argmax(weights / noise), which is argmax(z - log(noise)) without the logarithm: mlx's exponential on a CPU
costs six times its division, so one has to do for total, entropy and proposal.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

NOT_A_NUMBER = -1
WIDTH = 4096  # columns of a piece; the noise of a key is drawn piece by piece, so this number is part of its meaning
GROUP = 64  # columns that are added first
FAR = -1e4  # the exponential of anything below is 0; times this it stays 0, times -inf it would not


def exponential(key: mx.array, rows: int, columns: int) -> mx.array:
    """Draws from Exp(1), float32 [rows, columns]; never 0, since mlx's uniform numbers stay below 1."""
    return -mx.log(mx.random.uniform(shape=(rows, columns), key=key))


def noise(key: mx.array, rows: int, columns: int) -> mx.array:
    """The whole noise that `canvas_rows` draws from `key`, [rows, columns]."""
    pieces = _pieces(columns)
    keys = mx.random.split(key, len(pieces))
    return mx.concatenate([exponential(keys[i], rows, b - a) for i, (a, b) in enumerate(pieces)], axis=1)


def _pieces(columns: int) -> list[tuple[int, int]]:
    return [(a, min(a + WIDTH, columns)) for a in range(0, columns, WIDTH)]


def _sum(x: mx.array) -> mx.array:
    """Row sums in two stages: added one after the other, thousands of equal numbers lose 4e-5 of their sum."""
    rows, columns = x.shape
    even = columns // GROUP * GROUP
    total = x[:, :even].reshape(rows, -1, GROUP).sum(axis=-1).sum(axis=-1)
    return total if even == columns else total + x[:, even:].sum(axis=-1)


def canvas_rows(
    logits: mx.array,
    temperature: mx.array | float,
    key: mx.array | None,
    drawn: mx.array | None,
    expect: Callable[[mx.array, int], mx.array] | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array | None]:
    """`logits` [C, V]; `key` or `drawn` noise [C, V] or neither -> see `reference.canvas_rows`; ids int32."""
    rows, columns = logits.shape
    pieces = _pieces(columns)
    keys = None if key is None else mx.random.split(key, len(pieces))
    # `max` hands a NaN on, and both reductions read the logits where they lie.
    top = mx.max(logits, axis=-1).astype(mx.float32)
    choice = mx.where(mx.isnan(top), NOT_A_NUMBER, mx.argmax(logits, axis=-1).astype(mx.int32))
    total = mean = mx.zeros((rows,), mx.float32)
    best, proposal, expected = mx.full((rows,), -1.0), choice, None
    for i, (a, b) in enumerate(pieces):
        # Minus the maximum first: what is left is small, and dividing it loses nothing.
        z = logits[:, a:b].astype(mx.float32) - top[:, None]
        z = z if isinstance(temperature, float) and temperature == 1.0 else z / temperature
        weights = mx.exp(z)
        total, mean = total + _sum(weights), mean + _sum(weights * mx.maximum(z, FAR))
        if key is not None or drawn is not None:
            scores = weights / (exponential(keys[i], rows, b - a) if keys is not None else drawn[:, a:b])
            here, found = mx.max(scores, axis=-1), mx.argmax(scores, axis=-1).astype(mx.int32) + a
            best, proposal = mx.maximum(here, best), mx.where(here > best, found, proposal)
        if expect is not None:
            part = expect(weights, a).astype(mx.float32)
            expected = part if expected is None else expected + part
        if len(pieces) > 1:
            # A piece is finished before the next one begins: the scheduler would hold the temporaries of many.
            mx.eval(total, mean, best, proposal, [] if expected is None else expected)
    lost = ~(mx.abs(top) < float("inf"))
    log_total = mx.log(total)
    lse = mx.where(lost, float("nan"), top / temperature + log_total)
    entropy = mx.where(lost, float("nan"), log_total - mean / total)
    expected = None if expected is None else expected / total[:, None]
    return choice, top, lse, entropy, mx.where(lost, NOT_A_NUMBER, proposal), expected
