"""A target's state for one sequence, as a transaction.

    with cache.attempt(rows) as t:
        out = target.forward(tokens, cache)      # feeds `rows` rows
        t.keep(n)                                # or nothing / an exception: as before

After `keep(n)` the state equals that of feeding only the first n rows. How that is done depends on the layer:

plain KV (float or quantized)  the length goes back; the rejected rows are overwritten later, an indexer's keys cut off
rotating KV                    a block of rows is appended in temporal order, so the rejected tail is cut off and
                               the oldest rows beyond the window are dropped, also when the window is full
recurrent state                cannot be trimmed: the state before the block comes back and the layer runs again
                               over the rows kept (its output is unused, so only the mixer is really computed)

Every layer is checked before any is changed. mlx-lm's `trim_prompt_cache` returns 0 without a word on a full
rotating cache and refuses recurrent state; both go through here instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mtplab.errors import ModelError, RequestError
from mtplab.models.mlxlm import cache_module

if TYPE_CHECKING:
    from mtplab.models.target import Tape

_lm = cache_module()

PLAIN = (_lm.KVCache, _lm.QuantizedKVCache, _lm.ConcatenateKVCache)


class WindowCache(_lm.RotatingKVCache):
    """mlx-lm's rotating cache with the attention sinks (`keep`) visible to every row of a block.

    mlx-lm's mask for a block slides over the sinks, so a block of rows would see fewer of them than the same rows
    fed one at a time.
    """

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if N == 1 or not self.keep or self.offset + N <= self.max_size:
            return super().make_mask(N, window_size, return_array)
        # The block is appended to at most max_size - 1 older rows: column 0..keep-1 are the sinks.
        older = min(self.max_size - 1, self.offset)
        rows, cols = mx.arange(older, older + N)[:, None], mx.arange(older + N)[None]
        recent = (cols <= rows) & (cols > rows - (self.max_size - self.keep))
        return recent | ((cols < self.keep) & (cols <= rows))


def adapt(layers: list[Any], *, kv_bits: int | None, kv_group_size: int, max_kv_size: int | None) -> list[Any]:
    """mlx-lm's fresh layer caches -> the kinds mtplab rolls back, with the options applied or refused."""
    if kv_bits is not None and not all(type(c) is _lm.KVCache for c in layers):
        kinds = sorted({type(c).__name__ for c in layers if type(c) is not _lm.KVCache})
        raise RequestError(f"--kv-bits {kv_bits} cannot be honoured: this model uses {', '.join(kinds)}; leave it out")
    if max_kv_size is not None and not all(type(c) is _lm.KVCache for c in layers):
        raise RequestError(f"--max-kv-size {max_kv_size} cannot be honoured: this model sets its own cache sizes")
    if max_kv_size is not None and kv_bits is not None:
        raise RequestError("--kv-bits and --max-kv-size exclude each other: a rotating cache cannot be quantized")
    if max_kv_size is not None and max_kv_size < 8:
        raise RequestError(f"--max-kv-size {max_kv_size} is too small: 4 rows are attention sinks; use 8 or more")
    out = []
    for layer in layers:
        if type(layer) is _lm.RotatingKVCache:
            layer = WindowCache(max_size=layer.max_size, keep=layer.keep)
        elif kv_bits is not None:
            layer = _lm.QuantizedKVCache(group_size=kv_group_size, bits=kv_bits)
        elif max_kv_size is not None:
            layer = WindowCache(max_size=max_kv_size, keep=4)
        out.append(layer)
    return out


def flatten(layer: Any) -> list[Any]:
    """The leaf caches of one layer (a `CacheList` holds several)."""
    if isinstance(layer, _lm.CacheList):
        return [leaf for sub in layer.caches for leaf in flatten(sub)]
    return [layer]


def kind(leaf: Any) -> str:
    """ "plain", "window", "state" or "unknown" (cannot be rolled back)."""
    if isinstance(leaf, PLAIN):
        return "plain"
    if isinstance(leaf, _lm.RotatingKVCache):
        return "window"
    if isinstance(leaf, _lm.ArraysCache):
        return "state"
    return "unknown"


def index_of(leaf: Any) -> dict[str, Any]:
    """What an indexer beside the attention keeps in a plain cache: replaced by every block, never written into."""
    return {name: value for name, value in vars(leaf).items() if name.startswith("index_")}


def leaf_arrays(leaf: Any) -> list[mx.array]:
    """Every array of a leaf cache."""
    values = leaf.cache if kind(leaf) == "state" else [leaf.keys, leaf.values, *index_of(leaf).values()]
    return [a for v in values for a in (v if isinstance(v, (tuple, list)) else [v]) if isinstance(a, mx.array)]


def make_room(leaf: Any, rows: int) -> None:
    """Let a plain cache's buffers grow now if `rows` more would not fit, one after the other.

    mlx-lm grows them within the forward pass, as one graph: the old and the new buffers of all layers are held at
    the same time. Capacities come out as mlx-lm would choose them, and no value changes.
    """
    if type(leaf) not in (_lm.KVCache, _lm.QuantizedKVCache) or leaf.keys is None:
        return
    quantized = type(leaf) is _lm.QuantizedKVCache
    if leaf.offset + rows <= (leaf.keys[0] if quantized else leaf.keys).shape[2]:
        return
    more = -(-rows // leaf.step) * leaf.step

    def grown(old: mx.array) -> mx.array:
        blank = mx.zeros((*old.shape[:2], more, old.shape[3]), old.dtype)
        new = mx.concatenate([old[..., : leaf.offset, :], blank], axis=2)
        mx.eval(new)
        return new

    # Assigned together, so that an interrupt in between leaves the leaf as it was.
    leaf.keys, leaf.values = (
        [grown(a) for a in part] if quantized else grown(part) for part in (leaf.keys, leaf.values)
    )


class Cache:
    """The layer caches of one sequence plus the number of rows they hold."""

    def __init__(self, layers: list[Any], tape: Tape | None = None):
        self.layers, self.tape, self.length = layers, tape, 0
        self.singly = False  # what `attempt` takes its rows as, unless told
        self._open: Attempt | None = None

    @property
    def open(self) -> Attempt | None:
        """The attempt under way."""
        return self._open

    def attempt(self, rows: int, *, singly: bool = False) -> Attempt:
        """A transaction over the next `rows` rows; raises before anything changes if a layer cannot roll back.

        `singly`: some layers will write their rows one at a time and say so with `Attempt.wrote`.
        """
        if self._open is not None:
            raise RuntimeError("the cache already has an open attempt")
        if rows < 1:
            raise ValueError(f"an attempt needs at least one row, not {rows}")
        for i, layer in enumerate(self.layers):
            for leaf in flatten(layer):
                if kind(leaf) == "unknown" or (kind(leaf) == "state" and self.tape is None):
                    raise ModelError(
                        f"layer {i} keeps its state in {type(leaf).__name__}, which cannot be rolled back; "
                        "use depth 0 with this model"
                    )
        self.make_room(rows)
        return Attempt(self, rows, singly=singly or self.singly)

    def make_room(self, rows: int) -> None:
        """See the function `make_room`; before a forward pass over `rows` rows."""
        for layer in self.layers:
            for leaf in flatten(layer):
                make_room(leaf, rows)

    def arrays(self) -> list[mx.array]:
        """Every array of the state, for `mx.eval`."""
        out: list[mx.array] = []
        for layer in self.layers:
            for leaf in flatten(layer):
                out.extend(leaf_arrays(leaf))
        return out

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())


class Attempt:
    """See `Cache.attempt`. Leaving the block without `keep` restores the state of its beginning."""

    def __init__(self, cache: Cache, rows: int, *, singly: bool = False):
        self.cache, self.rows, self.kept, self.singly = cache, rows, False, singly
        self.states: dict[int, list[Any]] = {}  # leaf -> its state after each row that it wrote alone

    def __enter__(self) -> Attempt:
        cache = self.cache
        cache._open = self
        self.length = cache.length
        single = self.singly or self.rows == 1
        self.saved = [[_save(leaf, single) for leaf in flatten(layer)] for layer in cache.layers]
        self.replay = [any(kind(leaf) == "state" for leaf in flatten(layer)) for layer in cache.layers]
        if any(self.replay):
            cache.tape.start()
        return self

    def wrote(self, layer: Any) -> None:
        """This layer cache has just been given one row alone: a row that only its own state can bring back."""
        for leaf in flatten(layer):
            self.states.setdefault(id(leaf), []).append(_save(leaf, True))

    def keep(self, n: int) -> None:
        """Keep the first n of the rows just fed. 0 <= n <= rows."""
        fed = self.cache.length - self.length
        if fed != self.rows:
            raise RuntimeError(f"the attempt was opened for {self.rows} rows but {fed} were fed")
        if not 0 <= n <= self.rows:
            raise ValueError(f"cannot keep {n} of {self.rows} rows")
        calls = self.cache.tape.calls if any(self.replay) else {}
        alone = [all(id(leaf) in self.states for leaf in flatten(layer)) for layer in self.cache.layers]
        missing = [i for i, r in enumerate(self.replay) if r and i not in calls and not alone[i]]
        if missing:
            raise ModelError(f"layer {missing[0]} did not report its input, so its state cannot be rolled back")
        if n == 0:
            self._restore()
        elif n < self.rows:
            for i, layer in enumerate(self.cache.layers):
                if alone[i]:
                    _restore(layer, [self._after(leaf, n) for leaf in flatten(layer)])
                elif self.replay[i]:
                    _restore(layer, self.saved[i])
                    self.cache.tape.replay(i, n)
                else:
                    for leaf in flatten(layer):
                        _drop_tail(leaf, self.rows - n)
        else:
            for i, layer in enumerate(self.cache.layers):
                for leaf in flatten(layer) if not alone[i] else ():
                    _drop_tail(leaf, 0)
        self.cache.length = self.length + n
        self.kept = True

    def _after(self, leaf: Any, n: int) -> Any:
        """A leaf's state after the first n rows, each written alone."""
        states = self.states[id(leaf)]
        if len(states) != self.rows:
            raise ModelError(f"{type(leaf).__name__} wrote {len(states)} of {self.rows} rows alone")
        return states[n - 1]

    def _restore(self) -> None:
        for layer, saved in zip(self.cache.layers, self.saved, strict=True):
            _restore(layer, saved)
        self.cache.length = self.length

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cache._open = None
        if self.cache.tape is not None:
            self.cache.tape.stop()
        if kind is not None or not self.kept:
            self._restore()


def _save(leaf: Any, single: bool) -> Any:
    """What `_restore` needs. `single`: rows will be written one at a time."""
    if kind(leaf) == "state":
        # Entries are replaced, never written into: the references are the state.
        return (list(leaf.cache), leaf.left_padding, leaf.lengths)
    if kind(leaf) == "window":
        # A block is concatenated (new arrays), but a single row is written in place: copy then.
        copy = mx.array if single and leaf.keys is not None else (lambda a: a)
        return (copy(leaf.keys), copy(leaf.values), leaf.offset, leaf._idx)
    return (leaf.keys, leaf.values, leaf.offset, index_of(leaf))


def _restore(layer: Any, saved: list[Any]) -> None:
    for leaf, state in zip(flatten(layer), saved, strict=True):
        if kind(leaf) == "state":
            leaf.cache, leaf.left_padding, leaf.lengths = list(state[0]), state[1], state[2]
        elif kind(leaf) == "window":
            leaf.keys, leaf.values, leaf.offset, leaf._idx = state
        else:
            # Rows past the offset are free space, whether the buffer grew in between or not.
            leaf.keys, leaf.values, leaf.offset = state[:3]
            vars(leaf).update(state[3])


def _drop_tail(leaf: Any, n: int) -> None:
    """Forget the last n rows of the block just fed."""
    if kind(leaf) == "plain":
        if n and leaf.trim(n) != n:
            raise ModelError(f"{type(leaf).__name__} did not trim {n} rows")
        return
    if kind(leaf) == "state" or leaf._idx != leaf.keys.shape[2]:
        return  # all rows stay; or a single row, which was written in place
    end = leaf._idx - n
    start = max(0, end - leaf.max_size)
    if n or start:
        leaf.keys, leaf.values = (_window(a, leaf.keep, start, end) for a in (leaf.keys, leaf.values))
        leaf.offset -= n
        leaf._idx = end - start


@contextmanager
def restored(layer: Any) -> Iterator[None]:
    """One layer cache as it was before the `with` block, whatever rows were written into it, alone or at once."""
    saved = [_save(leaf, True) for leaf in flatten(layer)]
    try:
        yield
    finally:
        _restore(layer, saved)


def _window(a: mx.array, keep: int, start: int, end: int) -> mx.array:
    """Rows start..end of a temporal buffer, the sinks always included. a: [B, H, L, D]."""
    if start == 0 or keep == 0:
        return a[..., start:end, :]
    return mx.concatenate([a[..., :keep, :], a[..., start + keep : end, :]], axis=2)
