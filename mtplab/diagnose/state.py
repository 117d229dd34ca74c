"""The caches of two runs of the same tokens, layer by layer: equal in every bit, rounded differently, or wrong.

What counts as wrong is not decided here. `compare` measures: rows held, differing elements, and `relative`, the
largest |difference| / |row| over the rows of a KV cache (over a whole state array). Rounding moves a row by a small
part of itself; a row of another token or position is another row, and moves by about its own size.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mtplab.models.cache import Cache, flatten, kind
from mtplab.models.target import Target

TINY = 1e-30


@dataclass(frozen=True, slots=True)
class LeafDiff:
    """One array of one layer against the same array of the other run."""

    layer: int
    part: str  # "keys", "values", "state 0", ...; "length" where the numbers of rows differ
    rows: int  # rows held beyond the other's; 0 but for "length"
    differing: int  # elements
    abs_max: float
    relative: float

    @property
    def equal(self) -> bool:
        return self.rows == 0 and self.differing == 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def clone(leaf: Any) -> Any:
    """A leaf cache that a later row does not change. Arrays are shared until one side is written to."""
    twin = copy.copy(leaf)
    if kind(leaf) == "state":
        twin.cache = list(leaf.cache)
        return twin
    # mlx writes a row in place into the same array object: take a new one.
    twin.keys, twin.values = (_fresh(a) for a in (leaf.keys, leaf.values))
    return twin


def _fresh(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_fresh(v) for v in value)
    return None if value is None else mx.array(value)


def leaves(cache: Cache) -> list[tuple[int, Any]]:
    """(layer, leaf cache) in order."""
    return [(i, leaf) for i, layer in enumerate(cache.layers) for leaf in flatten(layer)]


def snapshot(cache: Cache) -> list[tuple[int, Any]]:
    """The state of now. Plain KV is not copied: rows that are there stay as they are in a run without roll-back."""
    return [(i, leaf if kind(leaf) == "plain" else clone(leaf)) for i, leaf in leaves(cache)]


@dataclass(frozen=True, slots=True)
class Overwritten:
    """A full ring as it was before a row was written over one of its own: that one, and the pass after has the rest."""

    leaf: Any  # keys, values [1, H, 1, D]: the row
    at: int  # where it stood


def thinned(older: Sequence[tuple[int, Any]], newer: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """`older`, one row before `newer`, without what `newer` has of it: see `whole`."""
    return [(i, _row_lost(a, b)) for (i, a), (_, b) in zip(older, newer, strict=True)]


def _row_lost(old: Any, new: Any) -> Any:
    # A ring that still grows, or is cut down after a long block, moves to a new buffer: that one stays whole.
    if kind(old) != "window" or old.keys is None or old.keys.shape != new.keys.shape:
        return old
    twin, at = copy.copy(old), new._idx - 1
    # Taken, not sliced: a slice would hold on to the whole ring.
    twin.keys, twin.values = (mx.take(a, mx.array([at]), axis=2) for a in (old.keys, old.values))
    mx.async_eval(twin.keys, twin.values)
    return Overwritten(twin, at)


def whole(states: Sequence[list[tuple[int, Any]]]) -> list[tuple[int, Any]]:
    """The first of successive states, one row apart; the later ones give back what `thinned` took out of it."""
    return [_refilled_ring([leaf for _, leaf in column], column[0][0]) for column in zip(*states, strict=True)]


def _refilled_ring(leaves: Sequence[Any], layer: int) -> tuple[int, Any]:
    lost = list(itertools.takewhile(lambda x: isinstance(x, Overwritten), leaves))
    if not lost:
        return layer, leaves[0]
    twin, later = copy.copy(lost[0].leaf), leaves[len(lost)]
    rows = {x.at: x.leaf for x in reversed(lost)}  # of two rows that one place lost, the older was there first
    for name in ("keys", "values"):
        ring = mx.array(getattr(later, name))
        ring[..., mx.array(list(rows)), :] = mx.concatenate([getattr(x, name) for x in rows.values()], axis=2)
        setattr(twin, name, ring)
    return layer, twin


def copied(target: Target, state: Sequence[tuple[int, Any]], length: int) -> Cache:
    """A cache of its own that starts from a snapshot of `length` rows."""
    cache = target.new_cache()
    twins = iter([clone(leaf) for _, leaf in state])
    cache.layers = [_refilled(layer, twins) for layer in cache.layers]
    for _, leaf in leaves(cache):
        if kind(leaf) == "plain":
            leaf.trim(leaf.offset - length)  # rows beyond it are free space
    cache.length = length
    return cache


def _refilled(layer: Any, twins: Any) -> Any:
    if len(flatten(layer)) == 1 and flatten(layer)[0] is layer:
        return next(twins)
    layer.caches = type(layer.caches)(_refilled(sub, twins) for sub in layer.caches)
    return layer


def contents(leaf: Any, length: int) -> dict[str, mx.array]:
    """The valid arrays of a leaf that holds `length` rows: KV [1, H, rows, D] in temporal order, or state arrays."""
    if kind(leaf) == "state":
        return {f"state {i}": a for i, a in enumerate(leaf.cache) if a is not None}
    if leaf.keys is None:
        return {}
    if kind(leaf) == "window":
        held = min(length, leaf.max_size)
        return {n: leaf._temporal_order(getattr(leaf, n))[..., -held:, :] for n in ("keys", "values")}
    parts = {n: _plain(leaf, getattr(leaf, n))[..., :length, :] for n in ("keys", "values")}
    if getattr(leaf, "index_keys", None) is not None:
        parts["index keys"] = leaf.index_keys[:, :length]
    return parts


def _plain(leaf: Any, value: Any) -> mx.array:
    if isinstance(value, (tuple, list)):
        return mx.dequantize(*value, group_size=leaf.group_size, bits=leaf.bits)
    return value


def held(leaf: Any, length: int) -> int:
    """Rows the leaf says it holds; recurrent state does not count them."""
    return length if kind(leaf) == "state" else leaf.offset


def compare(
    got: Sequence[tuple[int, Any]], want: Sequence[tuple[int, Any]], length: int, *, newest: int | None = None
) -> list[LeafDiff]:
    """Every difference between two states that should hold the same `length` rows; [] if all bits are equal.

    `want` may hold more rows in its plain KV (it is ahead); what it held after `length` rows is still in it. `newest`:
    how far arrays differ is measured in so many of their last rows only (recurrent state as a whole).
    """
    pairs, found = [], []
    for (layer, a), (_, b) in zip(got, want, strict=True):
        if held(a, length) != length:
            found.append(LeafDiff(layer, "length", held(a, length) - length, 0, 0.0, 1.0))
            continue
        x, y = contents(a, length), contents(b, length)
        pairs += [(layer, part, x[part], y[part]) if part in x else (layer, part, None, y[part]) for part in y]
    missing = [(layer, part) for layer, part, x, y in pairs if x is None or x.shape != y.shape]
    found += [LeafDiff(layer, part, 0, 1, 0.0, 1.0) for layer, part in missing]
    pairs = [p for p in pairs if (p[0], p[1]) not in missing]
    same = [mx.array_equal(x, y) for _, _, x, y in pairs]
    mx.eval(same)
    differ = [p for p, s in zip(pairs, same, strict=True) if not s.item()]
    found += _measured(differ, newest)
    return sorted(found, key=lambda d: d.layer)


def _measured(pairs: Sequence[tuple[int, str, mx.array, mx.array]], newest: int | None) -> list[LeafDiff]:
    numbers = []
    for _, part, x, y in pairs:
        rows = part in ("keys", "values", "index keys")
        last = (..., slice(-newest, None), slice(None)) if rows and newest is not None else ...
        numbers.append(_numbers(x[last], y[last], rows=rows))
    mx.eval(numbers)
    out = []
    for (layer, part, _, _), (count, largest, relative) in zip(pairs, numbers, strict=True):
        out.append(LeafDiff(layer, part, 0, int(count.item()), float(largest.item()), float(relative.item())))
    return out


def _numbers(x: mx.array, y: mx.array, *, rows: bool) -> tuple[mx.array, mx.array, mx.array]:
    """(differing elements, max |x - y|, largest relative difference of a row, or of the array)."""
    a, b = x.astype(mx.float32), y.astype(mx.float32)
    d = a - b
    axes = tuple(i for i in range(d.ndim) if not rows or i != d.ndim - 2)
    part = mx.sqrt((d * d).sum(axis=axes) / ((b * b).sum(axis=axes) + TINY))
    return (a != b).sum(), mx.abs(d).max(), part.max()


def head_state(caches: Sequence[Any], rows: int | None = None) -> list[tuple[int, Any]]:
    """An MTP head's caches (one per head layer) as a state; of a head that is ahead, the first `rows` rows."""
    out = [(i, copy.copy(leaf)) for i, layer in enumerate(caches) for leaf in flatten(layer)]
    for _, twin in out:
        twin.offset = twin.offset if rows is None else rows
    return out


def layer_paths(target: Target) -> list[str]:
    """The path of every layer in the checkpoint ("model.layers.3"), by its number."""
    names = {id(m): n for n, m in target.model.named_modules() if isinstance(m, nn.Module)}
    return [names.get(id(layer), f"layers.{i}") for i, layer in enumerate(target.model.layers)]
