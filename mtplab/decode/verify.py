"""How a block of drafts is checked, and what the result is equal to. Four ways, each used like a `Target`.

batched  the block as it is: fast, and equal to one-token decoding as far as the machine's operations do not care for
         the number of rows
rowwise  the modules that do care run one row at a time (their weights stay in the caches of the processor in between),
         everything else the whole block: every row has the bits of ordinary one-token decoding by construction
fixed    every pass, the baseline's too, has W rows over buffers of fixed size: every depth equals every other, and the
         baseline of the same width; not ordinary one-token decoding
serial   the whole model one row at a time: the oracle

The loops know nothing of this: they call `forward` with a block inside `cache.attempt`, and one row outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mtplab.backend.instances import override
from mtplab.decode.settings import VERIFY
from mtplab.errors import ModelError
from mtplab.models.cache import Attempt, Cache, flatten
from mtplab.models.static import counting, fixed_cache
from mtplab.models.target import Output, Target


class Batched:
    """The block as it is; also the surface that the other ways share."""

    mode = "batched"

    def __init__(self, target: Target):
        self.target = target

    @property
    def vocab(self) -> int | None:
        return self.target.vocab

    def new_cache(self, rows: int | None = None) -> Cache:
        """A cache for a request of at most `rows` rows (prompt and output); only `fixed` needs to know."""
        return self.target.new_cache()

    def forward(self, tokens: mx.array, cache: Cache) -> Output:
        return self.target.forward(tokens, cache)

    @property
    def equal_to(self) -> str:
        return VERIFY[self.mode]

    def effective(self) -> dict[str, Any]:
        """What a record holds about the way of verifying."""
        return {"verify": self.mode, "verify_equals": self.equal_to}


class Serial(Batched):
    """One row at a time through the whole model."""

    mode = "serial"

    def new_cache(self, rows: int | None = None) -> Cache:
        cache = super().new_cache(rows)
        cache.singly = True
        return cache

    def forward(self, tokens: mx.array, cache: Cache) -> Output:
        attempt = cache.open
        if attempt is None or tokens.shape[0] == 1:
            return self.target.forward(tokens, cache)
        outs = []
        for r in range(tokens.shape[0]):
            outs.append(self.target.forward(tokens[r : r + 1], cache))
            for layer in cache.layers:
                attempt.wrote(layer)
        hidden = None if outs[0].hidden is None else mx.concatenate([o.hidden for o in outs])
        return Output(mx.concatenate([o.logits for o in outs]), hidden)


class Fixed(Batched):
    """Every pass of up to `width` rows runs `width` rows; longer blocks (the prompt) run as they are."""

    mode = "fixed"

    def __init__(self, target: Target, width: int):
        super().__init__(target)
        self.width = width
        fixed_cache(target, width)  # a kind of cache without a fixed form is refused now

    def new_cache(self, rows: int | None = None) -> Cache:
        if rows is None:
            raise ValueError("a fixed cache must be told how many rows the request has at most")
        return fixed_cache(self.target, rows + self.width)

    def forward(self, tokens: mx.array, cache: Cache) -> Output:
        real, before = tokens.shape[0], cache.length
        if real > self.width:
            return self.target.forward(tokens, cache)
        padded = mx.concatenate([tokens, mx.repeat(tokens[-1:], self.width - real)]) if real < self.width else tokens
        leaves = [leaf for layer in cache.layers for leaf in flatten(layer)]
        with counting(leaves, real):
            out = self.target.forward(padded, cache)
        for leaf in leaves:
            if hasattr(leaf, "capacity"):
                leaf.offset = before + real
        cache.length = before + real
        return Output(out.logits[:real], None if out.hidden is None else out.hidden[:real])

    def effective(self) -> dict[str, Any]:
        return super().effective() | {"verify_width": self.width}


# Row by row --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that can run one row at a time: it takes [1, L, ...] and gives [1, L, ...]. `cached`: it writes a cache
    (the attention or the recurrent mixer of a layer), so its rows run in order."""

    path: str
    method: str = "__call__"
    cached: bool = False


def units(target: Target, tokens: int = 3) -> list[Unit]:
    """Every module of the target that can run row by row, in the order it is called, found by watching one pass."""
    found: dict[tuple[str, str], Unit | None] = {}
    restore = []

    def look(path: str, method: str) -> Callable[..., Any]:
        def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            out, given = inner(*args, **kwargs), (*args, *kwargs.values())
            cached = any(_is_cache(a) for a in given)
            rows = [a for a in given if isinstance(a, mx.array) and a.ndim == 3 and a.shape[1] == tokens]
            made = [out] if isinstance(out, mx.array) else list(out) if isinstance(out, tuple) else []
            works = bool(rows) and bool(made) and all(a.ndim == 3 and a.shape[1] == tokens for a in made)
            found[path, method] = Unit(path, method, cached) if works else None
            return out

        return call

    try:
        for path, module in target.model.named_modules():
            if path:
                restore.append(override(module, look(path, "__call__"), "__call__"))
                if hasattr(module, "as_linear"):
                    restore.append(override(module, look(path, "as_linear"), "as_linear"))
        cache = target.new_cache()
        mx.eval(target.forward(mx.arange(tokens), cache).logits)
    finally:
        for undo in reversed(restore):
            undo()
    return _choose([u for u in found.values() if u is not None], target)


def _choose(seen: list[Unit], target: Target) -> list[Unit]:
    """Without the modules that only pass others on: layers, the inner model, an MLP. What writes a cache is the
    innermost that takes it; the experts of a layer sort their rows when there are many, so they are one unit."""
    inner = [u for u in seen if u.cached and not any(v.cached and v.path.startswith(u.path + ".") for v in seen)]
    modules = dict(target.model.named_modules())
    experts = [u for u in seen if type(modules[u.path]).__name__.startswith("Switch") and modules[u.path].children()]
    whole = {u.path for u in inner + experts}
    leaves = [u for u in seen if not u.cached and len(modules[u.path].modules()) == 1]
    inside = tuple(f"{e.path}." for e in experts)
    return [u for u in seen if u.path in whole or (u in leaves and not u.path.startswith(inside or ("\0",)))]


def _is_cache(value: Any) -> bool:
    return hasattr(value, "empty") and hasattr(value, "nbytes") and not isinstance(value, mx.array)


class Rowwise(Batched):
    """The given units one row at a time, the rest as a block. `close` takes the wrapping away."""

    mode = "rowwise"

    def __init__(self, target: Target, chosen: Iterable[Unit], checked: str = ""):
        super().__init__(target)
        self.units, self.checked = tuple(chosen), checked
        self.attempt: Attempt | None = None  # the attempt of the block that is running row by row
        self.masks: Masks = []
        modules = dict(target.model.named_modules())
        self.restore = [override(modules[u.path], self._call(u), u.method) for u in self.units]

    def close(self) -> None:
        for undo in reversed(self.restore):
            undo()
        self.restore = []

    def new_cache(self, rows: int | None = None) -> Cache:
        cache = super().new_cache(rows)
        cache.singly = True
        return cache

    def forward(self, tokens: mx.array, cache: Cache) -> Output:
        if cache.open is None or tokens.shape[0] == 1:
            return self.target.forward(tokens, cache)
        self.attempt, self.masks = cache.open, []
        try:
            with remembered_masks(cache, self.masks):
                return self.target.forward(tokens, cache)
        finally:
            self.attempt = None

    def _call(self, unit: Unit) -> Callable[..., Any]:
        def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.attempt is None:
                return inner(*args, **kwargs)
            outs = []
            for row in range(row_count(args)):
                outs.append(one_row(inner, args, kwargs, row, self.masks))
                if (cache := cache_of(args, kwargs)) is not None:
                    self.attempt.wrote(cache)
            return joined(outs)

        return call

    @property
    def equal_to(self) -> str:
        return VERIFY[self.mode] + (f" ({self.checked})" if self.checked else "")

    def effective(self) -> dict[str, Any]:
        return super().effective() | {"verify_rowwise": patterns(u.path for u in self.units)}


Masks = list[tuple[mx.array, dict[str, Any]]]  # a block's mask and what it was asked for with


def row_count(args: tuple) -> int:
    """Rows of the block that a unit was called with."""
    return next(a.shape[1] for a in args if isinstance(a, mx.array))


def cache_of(args: tuple, kwargs: dict) -> Any:
    """The layer cache among a call's arguments, or None."""
    return next((a for a in (*args, *kwargs.values()) if _is_cache(a)), None)


def one_row(inner: Callable[..., Any], args: tuple, kwargs: dict, row: int, masks: Masks) -> Any:
    """Call a unit with one row of what it was called with: [1, L, ...] cut to [1, 1, ...], the mask as the layer's
    cache makes it for a single row now. ModelError for an argument that has no rows."""
    rows, cache = row_count(args), cache_of(args, kwargs)
    if rows == 1:
        return inner(*args, **kwargs)

    def cut(value: Any) -> Any:
        if isinstance(value, str):
            return None  # "causal": a single row has nothing after it
        if not isinstance(value, mx.array):
            return value
        made = next((options for mask, options in masks if mask is value), None)
        if made is not None:
            return flatten(cache)[0].make_mask(1, **made)
        if value.ndim != 3 or value.shape[1] != rows:
            raise ModelError(f"a module takes {list(value.shape)}, which has no {rows} rows; use --verify serial")
        return value[:, row : row + 1]

    return inner(*(cut(a) for a in args), **{k: cut(v) for k, v in kwargs.items()})


def joined(rows: Sequence[Any]) -> Any:
    """The outputs of single rows as the block's."""
    if isinstance(rows[0], tuple):
        return tuple(mx.concatenate(parts, axis=1) for parts in zip(*rows, strict=True))
    return mx.concatenate(rows, axis=1) if len(rows) > 1 else rows[0]


@contextmanager
def remembered_masks(cache: Cache, masks: Masks) -> Iterator[None]:
    """Note what the layer caches are asked to mask a block with, so that a row can be masked in the same manner."""
    leaves = [leaf for layer in cache.layers for leaf in flatten(layer) if hasattr(leaf, "make_mask")]

    def recorded(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(N: int, *args: Any, **kwargs: Any) -> Any:
            mask = make(N, *args, **kwargs)
            if isinstance(mask, mx.array) and N > 1:
                masks.append((mask, dict(zip(("window_size", "return_array"), args, strict=False)) | kwargs))
            return mask

        return call

    for leaf in leaves:
        leaf.make_mask = recorded(leaf.make_mask)
    try:
        yield
    finally:
        for leaf in leaves:
            leaf.__dict__.pop("make_mask", None)


def patterns(paths: Iterable[str]) -> list[str]:
    """Module paths with the number of the layer starred, each once, in order; short enough for a record."""
    starred = (".".join("*" if part.isdecimal() else part for part in p.split(".")) for p in paths)
    return list(dict.fromkeys(starred))
