"""The rows of a canvas in plain `mx`, cut along the vocabulary. Same results as `reference`, to float32 rounding.

The one array of size [C, V] is the logits: exponentials and products exist for `WIDTH` columns at a time. A proposal
takes one uniform number a row and no noise as wide as the vocabulary: the sums of every `GROUP` columns, which the
total needs anyway, say in which group the number falls, and that group's exponentials are made once more.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

NOT_A_NUMBER = -1
WIDTH = 4096  # columns of a piece, a multiple of GROUP
GROUP = 64  # columns that are added first
BELOW = 1 - 2.0**-24  # times this, a positive float32 is the one before it
FAR = -1e4  # the exponential of anything below is 0; times this it stays 0, times -inf it would not


def _pieces(columns: int) -> list[tuple[int, int]]:
    return [(a, min(a + WIDTH, columns)) for a in range(0, columns, WIDTH)]


def _groups(x: mx.array) -> mx.array:
    """Sums of every GROUP columns, [C, n] -> [C, ceil(n / GROUP)]. Sums in two stages: added one after the other,
    thousands of equal numbers lose 4e-5 of their sum."""
    rows, columns = x.shape
    missing = -columns % GROUP
    x = mx.pad(x, ((0, 0), (0, missing))) if missing else x
    return x.reshape(rows, -1, GROUP).sum(axis=-1)


def _where(sums: mx.array, at: mx.array, *, share: bool = False) -> tuple[mx.array, mx.array]:
    """Per row, the first of the sums' running totals that is above `at` [C, 1] (none: the last sum above 0), and what
    of `at` is left there: [C, 1] each. `share`: `at` is a share of the last total. A sum of 0 is never found."""
    totals = mx.cumsum(sums, axis=-1)
    # Where a device adds up in parallel, a total may be below the one before it.
    reached = mx.where(sums > 0, totals, 0.0)
    end = reached.max(axis=-1, keepdims=True)
    at = mx.minimum(at * end if share else at, end * BELOW)
    found = mx.argmax(reached > at, axis=-1, keepdims=True)
    before = mx.take_along_axis(totals, mx.maximum(found, 1) - 1, axis=-1)
    return found, at - mx.where(found > 0, before, 0.0)


def _drawn(
    logits: mx.array, top: mx.array, temperature: mx.array | float, levels: list[mx.array], uniform: mx.array
) -> mx.array:
    """The smallest id whose running total of weights is above `uniform` [C] times the total, int32 [C].

    `levels`: sums of every GROUP weights, then of every GROUP of those, and so on. From the coarsest on, one member is
    found in each: running totals of thousands would be off by more than a small id's weight."""
    found, rest = _where(levels[-1], uniform[:, None], share=True)
    for sums in levels[-2::-1]:
        found, rest = _inside(found, rest, lambda at, s=sums: mx.take_along_axis(s, at, axis=-1), sums.shape[1])

    def weights(at: mx.array) -> mx.array:
        return _weights(mx.take_along_axis(logits, at, axis=-1), top, temperature)[0]

    return _inside(found, rest, weights, logits.shape[1])[0][:, 0].astype(mx.int32)


def _inside(
    group: mx.array, rest: mx.array, values: Callable[[mx.array], mx.array], columns: int
) -> tuple[mx.array, mx.array]:
    """Which of `columns` members, GROUP to a `group` [C, 1], the number `rest` falls on, and what is left of it."""
    at = group * GROUP + mx.arange(GROUP)
    ragged = columns % GROUP
    inside = values(mx.minimum(at, columns - 1) if ragged else at)
    found, rest = _where(mx.where(at < columns, inside, 0.0) if ragged else inside, rest)
    return group * GROUP + found, rest


def _weights(part: mx.array, top: mx.array, temperature: mx.array | float) -> tuple[mx.array, mx.array]:
    """(exp(z), z) with z = (logits - maximum) / temperature."""
    # Minus the maximum first: what is left is small, and dividing it loses nothing.
    z = part.astype(mx.float32) - top[:, None]
    z = z if isinstance(temperature, float) and temperature == 1.0 else z / temperature
    return mx.exp(z), z


def canvas_rows(
    logits: mx.array,
    temperature: mx.array | float,
    uniform: mx.array | None,
    noise: mx.array | None,
    expect: Callable[[mx.array, int], mx.array] | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array | None]:
    """`logits` [C, V]; `uniform` [C] or `noise` [C, V] or neither -> see `reference.canvas_rows`; ids int32."""
    rows, columns = logits.shape
    pieces = _pieces(columns)
    # `max` hands a NaN on, and both reductions read the logits where they lie.
    top = mx.max(logits, axis=-1).astype(mx.float32)
    choice = mx.where(mx.isnan(top), NOT_A_NUMBER, mx.argmax(logits, axis=-1).astype(mx.int32))
    mean, proposal, best, expected, sums = mx.zeros((rows,), mx.float32), choice, None, None, []
    for a, b in pieces:
        weights, z = _weights(logits[:, a:b], top, temperature)
        sums.append(_groups(weights))
        mean = mean + _groups(weights * mx.maximum(z, FAR)).sum(axis=-1)
        if noise is not None:
            scores = weights / noise[:, a:b]
            here, found = mx.max(scores, axis=-1), mx.argmax(scores, axis=-1).astype(mx.int32) + a
            proposal = found if best is None else mx.where(here > best, found, proposal)
            best = here if best is None else mx.maximum(here, best)
        if expect is not None:
            part = expect(weights, a).astype(mx.float32)
            expected = part if expected is None else expected + part
        if len(pieces) > 1:
            # A piece is finished before the next one begins: the scheduler would hold the temporaries of many.
            mx.eval(mean, sums[-1], proposal, [a for a in (best, expected) if a is not None])
    sums = sums[0] if len(sums) == 1 else mx.concatenate(sums, axis=-1)
    levels = [sums]
    while levels[-1].shape[1] > GROUP:
        levels.append(_groups(levels[-1]))
    total = levels[-1].sum(axis=-1)
    if uniform is not None:
        proposal = _drawn(logits, top, temperature, levels, uniform)
    lost = ~(mx.abs(top) < float("inf"))
    log_total = mx.log(total)
    lse = mx.where(lost, float("nan"), top / temperature + log_total)
    entropy = mx.where(lost, float("nan"), log_total - mean / total)
    expected = None if expected is None else expected / total[:, None]
    return choice, top, lse, entropy, mx.where(lost, NOT_A_NUMBER, proposal), expected
