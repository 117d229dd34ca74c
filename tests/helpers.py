"""Short names for what the decoder tests do again and again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from mtplab.backend.clock import MonotonicClock
from mtplab.decode.baseline import baseline
from mtplab.decode.policy import FixedDepth
from mtplab.decode.settings import Settings
from mtplab.decode.speculative import speculative
from mtplab.decode.stopping import Stops
from mtplab.models.cache import Cache, flatten, kind
from mtplab.models.target import Target
from mtplab.records.types import Prefill, Request, Verify

CLOCK = MonotonicClock()


def tokens_of(records: Iterable[Prefill | Verify]) -> list[int]:
    out: list[int] = []
    for r in records:
        out.extend([r.token] if isinstance(r, Prefill) else r.emitted_tokens)
    return out


def run_baseline(target: Target, prompt: Sequence[int], settings: Settings, eos=frozenset(), cache=None) -> list:
    stops = Stops(settings, eos, lambda ids: "".join(chr(33 + i) for i in ids))
    return list(baseline(target, cache or target.new_cache(), prompt, settings=settings, stops=stops, clock=CLOCK))


def run_speculative(target, prompt, settings: Settings, drafter, depth, eos=frozenset(), cache=None, request=0):
    """`depth` is a number or a policy. Returns a generator, so that a test can look between the passes."""
    policy = FixedDepth(depth) if isinstance(depth, int) else depth
    stops = Stops(settings, eos, lambda ids: "".join(chr(33 + i) for i in ids))
    return speculative(
        target,
        cache or target.new_cache(),
        prompt,
        drafter=drafter,
        policy=policy,
        settings=settings,
        stops=stops,
        clock=CLOCK,
        request=request,
    )


def serial_cache(target: Target, tokens: Sequence[int]) -> Cache:
    """The cache after feeding the tokens strictly one at a time."""
    cache = target.new_cache()
    for t in tokens:
        target.forward(mx.array([t]), cache)
        mx.eval(cache.arrays())
    return cache


class SerialStates:
    """What the cache of a strictly serial run holds after every token of a text."""

    def __init__(self, target: Target, text: Sequence[int]):
        self.states, cache = [], target.new_cache()
        for t in text:
            target.forward(mx.array([t]), cache)
            mx.eval(cache.arrays())
            self.states.append([contents(leaf) for layer in cache.layers for leaf in flatten(layer)])

    def check(self, cache: Cache) -> None:
        leaves = [leaf for layer in cache.layers for leaf in flatten(layer)]
        for i, (leaf, wanted) in enumerate(zip(leaves, self.states[cache.length - 1], strict=True)):
            assert getattr(leaf, "offset", cache.length) == cache.length
            compare(i, contents(leaf), wanted, exact=not past_window(cache))


def past_window(cache: Cache) -> bool:
    """Past a sliding window ring order changes the rounding of everything behind it: within 1e-4 then."""
    leaves = [leaf for layer in cache.layers for leaf in flatten(layer)]
    return any(kind(x) == "window" and x.offset > x.max_size for x in leaves)


def compare(i: int, got: list, wanted: list, *, exact: bool) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape, f"leaf {i}"
        same = np.array_equal(a, b) if exact else np.allclose(a, b, atol=1e-4)
        assert same, f"leaf {i} differs by {np.abs(a - b).max()}"


def contents(leaf) -> list[np.ndarray]:
    """The valid state of a leaf cache as arrays: KV up to the offset (a ring in temporal order), or the state."""
    if kind(leaf) == "state":
        return [np.array(a) for a in leaf.cache]
    if kind(leaf) == "window":
        held = min(leaf.offset, leaf.max_size)
        return [np.array(leaf._temporal_order(a))[..., -held:, :] for a in (leaf.keys, leaf.values)]
    parts = []
    for a in (leaf.keys, leaf.values):
        parts.extend(np.array(x)[..., : leaf.offset, :] for x in (a if isinstance(a, (tuple, list)) else [a]))
    if getattr(leaf, "index_keys", None) is not None:
        parts += [np.array(leaf.index_keys), np.array(leaf.index_position_ids)]
    return parts


def assert_same_state(cache: Cache, reference: Cache) -> None:
    """Bit for bit, but for `past_window`."""
    assert cache.length == reference.length
    pairs = zip(cache.layers, reference.layers, strict=True)
    leaves = [(x, y) for a, b in pairs for x, y in zip(flatten(a), flatten(b), strict=True)]
    for i, (leaf, want) in enumerate(leaves):
        assert getattr(leaf, "offset", 0) == getattr(want, "offset", 0), f"leaf {i}"
        compare(i, contents(leaf), contents(want), exact=not past_window(cache))


def as_request(records: Sequence[Prefill | Verify], id: str = "0", corpus: str = "test", **settings) -> Request:
    prefill, *passes = records
    return Request(id, corpus, prefill, tuple(passes), passes[-1].cut if passes else prefill.cut, settings)


class CountingCache:
    """A cache for targets without state: it only counts rows."""

    def __init__(self):
        self.length = 0

    def arrays(self) -> list:
        return []

    def attempt(self, rows: int):
        return self

    def __enter__(self):
        self.before = self.length
        return self

    def __exit__(self, *error) -> None:
        pass

    def keep(self, n: int) -> None:
        self.length = self.before + n
