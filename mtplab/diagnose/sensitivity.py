"""How far rounding alone moves what a model computes: the same rows, one by one, with and without small noise.

A sum that cancels, or a norm over a few small numbers, makes much of a little. How much is a matter of the model and of
the rows, so it is measured: every embedding's and every linear's output is moved by a given part of itself, and the
outputs of all modules are compared with those of the undisturbed rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtplab.backend.instances import override
from mtplab.backend.numerics import linears
from mtplab.diagnose import watch
from mtplab.models.cache import Cache
from mtplab.models.target import Target

TIMES = 8  # the noise is drawn, and one draw may hardly touch what cancels: the largest of so many counts
# Rounding that did decide a choice is as likely as not to fall on the other side, and draws ten times its size do so in
# nearly half of the times: that none of so many does is no accident.
DRAWS, WIDER = 16, 10.0

Row = dict[tuple[str, str, int], watch.Seen]  # (path, kind, call) -> what a module gave for it
Moves = dict[tuple[str, str], tuple[float, float]]  # (path, kind) -> largest |move| / |row| of the output, of the input


def reach(target: Target, block: Sequence[int], cache: Cache, size: float) -> Moves:
    """`block` row by row from the state `cache`, which is left as it was. size: |noise| / |row| of every linear."""
    out: Moves = {}
    for rows, moved in _drawn(target, block, cache, size, TIMES):
        for (path, kind, _), both in _compared(rows, moved).items():
            before = out.get((path, kind), (0.0, 0.0))
            out[path, kind] = max(before[0], both[0]), max(before[1], both[1])
    return out


def ties(target: Target, block: Sequence[int], cache: Cache, size: float) -> set[tuple[str, str]]:
    """(path, kind) of every module whose ids (a router's choice) are another set, in some row, in one of DRAWS draws of
    noise of `size`: those that rounding, a good deal smaller, may decide."""
    out = set()
    for rows, moved in _drawn(target, block, cache, size, DRAWS):
        out |= {k[:2] for k, s in rows.items() if s.ids is not None and _other(s.ids, moved.get(k))}
    return out


def _drawn(target: Target, block: Sequence[int], cache: Cache, size: float, draws: int) -> Iterator[tuple[Row, Row]]:
    """Every row of the block, as it is and under noise, for each draw of it."""
    names = watch.kinds(target.model, cache.layers)
    still = list(_rows(target, block, cache, names))
    for seed in range(draws):
        with _stirred(target.model, size, seed):
            yield from zip(still, _rows(target, block, cache, names), strict=True)


def _other(ids: mx.array, moved: watch.Seen | None) -> bool:
    same = moved is not None and moved.ids is not None and moved.ids.shape == ids.shape
    return not same or mx.any(mx.sort(ids) != mx.sort(moved.ids)).item()


def _rows(target: Target, block: Sequence[int], cache: Cache, names: dict[str, str]) -> Iterator[Row]:
    with cache.attempt(len(block), singly=True):
        for token in block:
            row: Row = {}
            add = lambda s, row=row: row.__setitem__((s.path, s.kind, s.call), s)  # noqa: E731
            with watch.watching(target.model, add, names), watch.watching_cache(target.model, cache, add):
                logits = target.forward(mx.array([token]), cache).logits
            arrays = [(s.output, s.input, s.ids) for s in row.values()]
            mx.eval(logits, cache.arrays(), [a for some in arrays for a in some if a is not None])
            yield row


def _compared(rows: Row, moved: Row) -> dict[tuple[str, str, int], tuple[float, float]]:
    keys = [k for k in rows if k in moved]
    shares = [[_share(getattr(r[k], n) for r in (moved, rows)) for n in ("output", "input")] for k in keys]
    mx.eval(shares)
    return {k: (out.item(), given.item()) for k, (out, given) in zip(keys, shares, strict=True)}


def _share(two: Iterator[mx.array | None]) -> mx.array:
    a, b = two
    if a is None or b is None or a.shape != b.shape or not mx.issubdtype(b.dtype, mx.floating):
        return mx.array(0.0)
    return watch.share(a, b)


@contextmanager
def _stirred(model: nn.Module, size: float, seed: int) -> Iterator[None]:
    numbers = itertools.count(seed << 32)

    def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> mx.array:
        y = inner(*args, **kwargs)
        wide = y.astype(mx.float32)
        scale = size * mx.sqrt((wide * wide).mean(axis=-1, keepdims=True))
        return (wide + scale * mx.random.normal(y.shape, key=mx.random.key(next(numbers)))).astype(y.dtype)

    embeddings = [m for _, m in model.named_modules() if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)]
    restore = [override(m, call) for m in embeddings]
    restore += [override(m, call, method) for m, method in linears(model).values()]
    try:
        yield
    finally:
        for undo in reversed(restore):
            undo()


def rounding(own: Collection[float], dtype: mx.Dtype) -> float:
    """The size of the rounding that products showed (`own`: |difference| / |row|), which is that of most of them: a few
    cancel. At least what the dtype rounds by."""
    least = mx.finfo(dtype).eps / 4
    return max(least, sorted(own)[3 * (len(own) - 1) // 4]) if own else least
