"""Faults of a model's block path: 2 to 8 rows at once are wrong; one at a time, and the prefill, stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from faults import bent, on_keep, replaced

from mtplab.diagnose.candidates import Parts
from mtplab.models import cache as caches
from mtplab.models.target import Output


def _small(rows: int) -> bool:
    return 1 < rows <= 8


@contextmanager
def swapped(module: Any, call: Callable[..., Any]) -> Iterator[None]:
    """One instance whose call goes through `call(original, *args)`."""
    original = type(module)
    inner = lambda *a, **k: original.__call__(module, *a, **k)  # noqa: E731
    module.__class__ = type(original.__name__, (original,), {"__call__": lambda self, *a, **k: call(inner, *a, **k)})
    try:
        yield
    finally:
        module.__class__ = original


# Rows of a matrix so close that the last bits decide: whatever changes a hidden state flips some of them.
TIES = 3e-7


def twins(weight: mx.array, apart: float) -> mx.array:
    """The matrix with every second row made like the one before it, `apart` of its size away."""
    w = weight.astype(mx.float32)
    even = w[0 : w.shape[0] - 1 : 2]
    noise = mx.random.normal(even.shape, key=mx.random.key(5)) * apart * mx.sqrt((even * even).mean())
    w[1 : w.shape[0] : 2] = even + noise
    return w.astype(weight.dtype)


@contextmanager
def routers_tied(loaded: Any) -> Iterator[None]:
    """No fault: near-ties in every router, so that rounding decides which expert is first, or is chosen at all."""
    for layer in loaded.target.model.layers:
        layer.mlp.gate.weight = twins(layer.mlp.gate.weight, TIES)
    yield


def rows_rolled(path: str) -> Callable[[Any], Any]:
    """The rows of one module are shifted by one inside a block, the first one keeping its own."""

    def shifted(y: mx.array) -> mx.array:
        return mx.concatenate([y[:, :1], y[:, :-1]], axis=1) if _small(y.shape[1]) else y

    def call(inner: Any, x: mx.array) -> Any:
        y = inner(x)
        return tuple(map(shifted, y)) if isinstance(y, tuple) else shifted(y)

    return lambda loaded: swapped(dict(loaded.target.model.named_modules())[path], call)


def cached_rolled(loaded: Any) -> Any:
    """A quantized cache holds the rows of a block shifted by one."""
    quantized = caches.PLAIN[1]
    update = quantized.update_and_fetch

    def wrong(self: Any, *arrays: mx.array) -> Any:
        return update(self, *(mx.roll(a, 1, axis=2) if _small(a.shape[2]) else a for a in arrays))

    return replaced(quantized, "update_and_fetch", wrong)


def window_narrow(loaded: Any) -> Any:
    """In a block every row sees one key less than its window."""
    make = caches.WindowCache.make_mask

    def wrong(self: Any, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        size = (window_size or self.max_size) - 1 if _small(N) else window_size
        return make(self, N, size, return_array or _small(N))

    return replaced(caches.WindowCache, "make_mask", wrong)


def sees_ahead(loaded: Any) -> Any:
    """The rows of a block see the rows after them."""
    plain = caches.PLAIN[0]
    make = plain.make_mask

    def wrong(self: Any, N: int, **options: Any) -> Any:
        return None if _small(N) else make(self, N, **options)

    return replaced(plain, "make_mask", wrong)


@contextmanager
def ropes(loaded: Any, shift: Callable[[], int]) -> Iterator[None]:
    modules = [layer.self_attn.rope for layer in loaded.target.model.layers if hasattr(layer, "self_attn")]
    classes = [type(m) for m in modules]
    for m in modules:
        original = type(m)

        def call(self: Any, x: mx.array, offset: int = 0, original: Any = original) -> mx.array:
            return original.__call__(self, x, offset=offset + shift())

        m.__class__ = type(original.__name__, (original,), {"__call__": call})
    try:
        yield
    finally:
        for m, original in zip(modules, classes, strict=True):
            m.__class__ = original


class PositionAfterReject:
    """After a reject the arm's next block stands one position too far. Both a model patch and a tamper."""

    def __init__(self) -> None:
        self.shift, self.rejected = 0, False

    def model(self, loaded: Any) -> Any:
        return ropes(loaded, lambda: self.shift)

    def tamper(self, parts: Parts) -> Parts:
        self.rejected = False

        def bend(target: Any, tokens: mx.array, cache: Any) -> Output:
            self.shift = int(self.rejected)
            out = target.forward(tokens, cache)
            self.shift = 0
            return out

        def change(cache: Any, attempt: Any, n: int, keep: Callable[[int], None]) -> None:
            keep(n)
            self.rejected = n < attempt.rows

        return on_keep(change)(bent(bend)(parts))
