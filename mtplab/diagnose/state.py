"""The caches of two runs of the same tokens, layer by layer: equal in every bit, rounded differently, or wrong.

What counts as wrong is not decided here. `compare` measures: rows held, differing elements, and `relative`, the
largest |difference| / |row| over the rows of a KV cache (over a whole state array). Rounding moves a row by a small
part of itself; a row of another token or position is another row, and moves by about its own size.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from mtplab.diagnose.watch import cache_paths
from mtplab.models.cache import Cache, flatten, kind
from mtplab.models.target import Target

TINY = 1e-30
TOGETHER = 1 << 16  # elements that are measured in one piece: many small arrays cost their number of operations


@dataclass(frozen=True, slots=True)
class LeafDiff:
    """One array of one layer against the same array of the other run."""

    layer: int
    part: str  # "keys", "values", "state 0", ...; "length" where the numbers of rows differ
    rows: int  # rows held beyond the other's; 0 but for "length"
    differing: int  # elements
    abs_max: float
    relative: float
    leaf: int = 0  # which of the layer's caches

    @property
    def place(self) -> tuple[int, int, str]:
        return self.layer, self.leaf, self.part

    @property
    def equal(self) -> bool:
        return self.rows == 0 and self.differing == 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_Pair = tuple[tuple[int, int, str], mx.array, mx.array]  # place, and the two arrays


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


def contents(leaf: Any, length: int, newest: int | None = None) -> dict[str, mx.array]:
    """The valid arrays of a leaf that holds `length` rows: KV [1, H, rows, D] in temporal order, or state arrays.
    `newest`: only so many of the last rows."""
    first = 0 if newest is None else max(0, length - newest)
    if kind(leaf) == "state":
        return {f"state {i}": a for i, a in enumerate(leaf.cache) if a is not None}
    if leaf.keys is None:
        return {}
    if kind(leaf) == "window":
        held = min(length - first, leaf.max_size)
        return {n: leaf._temporal_order(getattr(leaf, n))[..., -held:, :] for n in ("keys", "values")}
    parts = {n: _plain(leaf, getattr(leaf, n))[..., first:length, :] for n in ("keys", "values")}
    if getattr(leaf, "index_keys", None) is not None:
        parts["index keys"] = leaf.index_keys[:, first:length]
    return parts


def _plain(leaf: Any, value: Any) -> mx.array:
    if isinstance(value, (tuple, list)):
        return mx.dequantize(*value, group_size=leaf.group_size, bits=leaf.bits)
    return value


def held(leaf: Any, length: int) -> int:
    """Rows the leaf says it holds; recurrent state does not count them."""
    return length if kind(leaf) == "state" else leaf.offset


def compare(
    got: Sequence[tuple[int, Any]],
    want: Sequence[tuple[int, Any]],
    length: int,
    *,
    newest: int | None = None,
    known: Collection[tuple[int, int, str]] = (),
) -> list[LeafDiff]:
    """Every difference between two states that should hold the same `length` rows; [] if all bits are equal.

    `want` may hold more rows in its plain KV (it is ahead); what it held after `length` rows is still in it. `newest`:
    how far arrays differ is measured in so many of their last rows only (recurrent state as a whole). `known`: places
    (`LeafDiff.place`) that differed before: plain KV whose keys and values did still does, since its rows stay, and is
    not asked.
    """
    pairs, sure, found, count = [], [], [], Counter()
    for (layer, a), (_, b) in zip(got, want, strict=True):
        number = count[layer]
        count[layer] += 1
        if held(a, length) != length:
            found.append(LeafDiff(layer, "length", held(a, length) - length, 0, 0.0, 1.0, number))
            continue
        differs = kind(a) == "plain" and all((layer, number, part) in known for part in ("keys", "values"))
        last = newest if differs else None
        x, y = contents(a, length, last), contents(b, length, last)
        for part in y:
            if part not in x or x[part].shape != y[part].shape:
                found.append(LeafDiff(layer, part, 0, 1, 0.0, 1.0, number))
            else:
                (sure if differs else pairs).append(((layer, number, part), x[part], y[part]))
    same = [mx.array_equal(x, y) for _, x, y in pairs]
    mx.eval(same)
    differ = sure + [p for p, s in zip(pairs, same, strict=True) if not s.item()]
    found += _measured(differ, newest)
    return sorted(found, key=lambda d: (d.layer, d.leaf))


def _measured(pairs: Sequence[_Pair], newest: int | None) -> list[LeafDiff]:
    alike: dict[Any, list[_Pair]] = {}
    for place, x, y in pairs:
        rows = place[-1] in ("keys", "values", "index keys")
        if rows and newest is not None and x.shape[-2] > newest:
            x, y = x[..., -newest:, :], y[..., -newest:, :]
        alike.setdefault((rows, x.shape, x.dtype, y.dtype), []).append((place, x, y))
    several, numbers = [], []
    for (rows, shape, *_), same in alike.items():
        count = max(1, TOGETHER // max(1, math.prod(shape)))
        for some in (same[i : i + count] for i in range(0, len(same), count)):
            several.append(some)
            numbers.append(_numbers(*(mx.stack([p[i] for p in some]) for i in (1, 2)), rows=rows))
    mx.eval(numbers)
    out = []
    for some, (count, largest, relative) in zip(several, numbers, strict=True):
        each = zip(some, count.tolist(), largest.tolist(), relative.tolist(), strict=True)
        out += [LeafDiff(layer, part, 0, n, far, share, leaf) for ((layer, leaf, part), *_), n, far, share in each]
    return out


def _numbers(x: mx.array, y: mx.array, *, rows: bool) -> tuple[mx.array, mx.array, mx.array]:
    """x, y: [N, ...] -> of each of the N: differing elements, max |x - y|, the largest relative difference of a row
    (axis -2), or of the array."""
    a, b = x.astype(mx.float32), y.astype(mx.float32)
    d = a - b
    inside = tuple(range(1, d.ndim))
    others = inside[:-2] if rows else inside[:-1]
    apart, size = ((v * v).sum(axis=-1).sum(axis=others) for v in (d, b))  # the last axis first: it is contiguous
    part = mx.sqrt(apart / (size + TINY))
    part = mx.where(mx.isnan(part), mx.inf, part)  # so that it is larger than everything, not smaller than nothing
    return (a != b).sum(axis=inside), mx.abs(d).max(axis=inside), part.reshape(len(x), -1).max(axis=-1)


def head_state(caches: Sequence[Any], rows: int | None = None) -> list[tuple[int, Any]]:
    """An MTP head's caches (one per head layer) as a state; of a head that is ahead, the first `rows` rows."""
    out = [(i, copy.copy(leaf)) for i, layer in enumerate(caches) for leaf in flatten(layer)]
    for _, twin in out:
        twin.offset = twin.offset if rows is None else rows
    return out


def layer_paths(target: Target) -> list[str]:
    """The path in the checkpoint ("model.layers.3") of the layer that each cache belongs to, by the cache's number."""
    return cache_paths(target.model, len(target.cache_kinds))
