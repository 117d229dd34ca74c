"""Caches for decoding at one fixed width: buffers that never grow, with a mask saying which of their rows count.

A growing KV length changes the summation inside attention, and so does another number of rows in a block. Here every
pass has the same shapes: W rows, the unused ones dummies, over buffers of the request's full length. What a row sees
is said by a boolean mask; what it does not see has the weight zero, exactly.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mtplab.errors import RequestError
from mtplab.models.cache import Cache, flatten, kind
from mtplab.models.mlxlm import cache_module
from mtplab.models.target import Tape, Target

_lm = cache_module()


class StaticKV(_lm.KVCache):
    """Keys and values of at most `capacity` rows in one buffer. With a `window` a row sees the last `window` rows (the
    first `keep` always, and as many fewer), as a rotating cache of that size gives it to see."""

    def __init__(self, capacity: int, window: int | None = None, keep: int = 0):
        super().__init__()
        self.capacity, self.window, self.kept = capacity, window, keep

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """keys, values: [1, H, L, D] -> the whole buffers [1, H, capacity, D]."""
        end = self.offset + keys.shape[2]
        if end > self.capacity:
            raise RequestError(f"the fixed cache has {self.capacity} rows and {end} are needed; lower --max-tokens")
        if self.keys is None:
            self.keys, self.values = (
                mx.zeros((*a.shape[:2], self.capacity, a.shape[3]), a.dtype) for a in (keys, values)
            )
        self.keys[..., self.offset : end, :] = keys
        self.values[..., self.offset : end, :] = values
        self.offset = end
        return self.keys, self.values

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        """[N, capacity], true where a row looks."""
        rows, cols = mx.arange(self.offset, self.offset + N)[:, None], mx.arange(self.capacity)[None]
        past, window = cols <= rows, window_size or self.window
        if window is None:
            return past
        return past & ((cols > rows - (window - self.kept)) | (cols < self.kept))


def static_layers(target: Target, capacity: int) -> list[Any]:
    """The target's layer caches with every growing buffer replaced. RequestError for a kind that has no fixed form."""
    return [_static(layer, capacity) for layer in target.new_cache().layers]


def _static(layer: Any, capacity: int) -> Any:
    if isinstance(layer, _lm.CacheList):
        return _lm.CacheList(*(_static(sub, capacity) for sub in layer.caches))
    if kind(layer) == "state":
        return layer
    if type(layer) is _lm.KVCache:
        return StaticKV(capacity)
    if kind(layer) == "window":
        return StaticKV(capacity, layer.max_size, layer.keep)
    raise RequestError(f"--verify fixed has no form for {type(layer).__name__}; use --verify serial")


class FixedTape:
    """Runs recurrent layers again at the fixed width: all W rows, of which the first `rows` count."""

    def __init__(self, tape: Tape):
        self.tape = tape

    @property
    def calls(self) -> dict[int, tuple[tuple, dict]]:
        return self.tape.calls

    def start(self) -> None:
        self.tape.start()

    def stop(self) -> None:
        self.tape.stop()

    def replay(self, i: int, rows: int) -> None:
        args, kwargs = self.tape.calls[i]
        leaves = [leaf for a in (*args, *kwargs.values()) if hasattr(a, "empty") for leaf in flatten(a)]
        self.tape.recording = False
        with counting(leaves, rows):
            self.tape.layers[i](*(_mask(a, rows) for a in args), **{k: _mask(v, rows) for k, v in kwargs.items()})
        self.tape.recording = True


def _mask(value: Any, rows: int) -> Any:
    """A mask of rows that count, [1, W], for another number of them; everything else as it is."""
    if isinstance(value, mx.array) and value.ndim == 2 and value.dtype == mx.bool_:
        return mx.arange(value.shape[1])[None] < rows
    return value


class counting:
    """While in here, only the first `rows` rows of a block change the recurrent states."""

    def __init__(self, leaves: list[Any], rows: int):
        self.leaves, self.rows = [leaf for leaf in leaves if kind(leaf) == "state"], rows

    def __enter__(self) -> None:
        for leaf in self.leaves:
            leaf.prepare(lengths=[self.rows])

    def __exit__(self, *error: object) -> None:
        for leaf in self.leaves:
            leaf.finalize()


def fixed_cache(target: Target, capacity: int) -> Cache:
    """A cache for passes of one width; `capacity` must leave room for the dummies of the last pass."""
    return Cache(static_layers(target, capacity), None if target.tape is None else FixedTape(target.tape))
