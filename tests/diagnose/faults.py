"""Faults with a known cause, put into one arm (a `tamper`) or into the loop that it runs (a context manager).

An arm's faults touch its own cache, drafter, target or stops; the baseline beside it stays sound. Faults of the model
itself are in `block_faults`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from mtplab.decode import speculative
from mtplab.decode.drafters.mtp import MTPDrafter
from mtplab.diagnose.candidates import Parts
from mtplab.diagnose.state import leaves
from mtplab.models.cache import flatten, kind
from mtplab.models.target import Output

Keep = Callable[[Any, Any, int, Callable[[int], None]], None]


# -- the cache after a verify ---------------------------------------------------------------------------------------


def on_keep(change: Keep) -> Callable[[Parts], Parts]:
    """A tamper: `change(cache, attempt, n, keep)` instead of `attempt.keep(n)`."""

    def tamper(parts: Parts) -> Parts:
        cache, original = parts.cache, parts.cache.attempt

        def attempt(rows: int, **options: Any) -> Any:
            made = original(rows, **options)
            made.keep = lambda n, keep=made.keep: change(cache, made, n, keep)
            return made

        cache.attempt = attempt
        return parts

    return tamper


def rows_left(extra: int, *, layers: tuple[int, ...] | None = None, when: Callable[..., bool] | None = None) -> Keep:
    """Up to `extra` rejected rows stay in the KV of the chosen layers (all by default); negative: too few stay."""
    seen = {"rejects": 0}

    def change(cache: Any, attempt: Any, n: int, keep: Callable[[int], None]) -> None:
        keep(n)
        seen["rejects"] = seen["rejects"] + 1 if n < attempt.rows else 0
        if when is not None and not when(cache=cache, n=n, rows=attempt.rows, rejects=seen["rejects"]):
            return
        for layer, leaf in leaves(cache):
            if kind(leaf) == "plain" and (layers is None or layer in layers):
                leaf.offset += min(extra, attempt.rows - n)

    return change


def ring_silent(cache: Any, attempt: Any, n: int, keep: Callable[[int], None]) -> None:
    """A full ring is not trimmed and nobody says so."""
    rings = [leaf for _, leaf in leaves(cache) if kind(leaf) == "window"]
    full = [leaf.offset >= leaf.max_size for leaf in rings]
    whole = [(mx.array(leaf.keys), mx.array(leaf.values), leaf.offset, leaf._idx) for leaf in rings]
    keep(n)
    for leaf, was, saved in zip(rings, full, whole, strict=True):
        if was:
            leaf.keys, leaf.values, leaf.offset, leaf._idx = saved


def ring_counted_only(cache: Any, attempt: Any, n: int, keep: Callable[[int], None]) -> None:
    """The ring's row count goes back, its rows stay: older rows fall out in their place."""
    rings = [leaf for _, leaf in leaves(cache) if kind(leaf) == "window"]
    whole = [(mx.array(leaf.keys), mx.array(leaf.values), leaf._idx) for leaf in rings]
    keep(n)
    if n < attempt.rows:
        for leaf, (keys, values, idx) in zip(rings, whole, strict=True):
            leaf.keys, leaf.values, leaf._idx = keys, values, idx


def recurrent(change: Callable[[Any, list, list], None], *, layers: tuple[int, ...] | None = None) -> Keep:
    """`change(leaf, before, after_all)` on recurrent state after a rejection: the state before the block, and the state
    after all its rows."""

    def keep_then(cache: Any, attempt: Any, n: int, keep: Callable[[int], None]) -> None:
        states = [(i, leaf) for i, leaf in leaves(cache) if kind(leaf) == "state" and (layers is None or i in layers)]
        flat = [saved for layer in attempt.saved for saved in layer]
        index = {id(leaf): at for at, (_, leaf) in enumerate(leaves(cache))}
        after = {id(leaf): list(leaf.cache) for _, leaf in states}
        keep(n)
        if n < attempt.rows:
            for _, leaf in states:
                change(leaf, list(flat[index[id(leaf)]][0]), after[id(leaf)])

    return keep_then


def stale(leaf: Any, before: list, after: list) -> None:
    leaf.cache = before


def not_rolled_back(leaf: Any, before: list, after: list) -> None:
    leaf.cache = after


def conv_shifted(leaf: Any, before: list, after: list) -> None:
    leaf.cache[0] = mx.roll(leaf.cache[0], 1, axis=1)


def old_row_overwritten(layer: int) -> Keep:
    """A rejected row is written over an old one (a buffer that two owners share)."""

    def change(cache: Any, attempt: Any, n: int, keep: Callable[[int], None]) -> None:
        keep(n)
        if n < attempt.rows:
            leaf = cache.layers[layer]
            leaf.values = mx.array(leaf.values)
            leaf.values[..., 3:4, :] = leaf.values[..., leaf.offset : leaf.offset + 1, :]

    return change


def eos_ahead(parts: Parts) -> Parts:
    """A block that the end of text cuts is kept whole."""
    cut, state = parts.stops.cut, {}

    def watched(tokens: Any) -> Any:
        state["cut"] = cut(tokens)
        return state["cut"]

    def change(cache: Any, attempt: Any, n: int, keep: Callable[[int], None]) -> None:
        keep(attempt.rows if state["cut"][1] == "eos" else n)

    parts.stops.cut = watched
    return on_keep(change)(parts)


# -- the head -------------------------------------------------------------------------------------------------------


def drafter_with(**methods: Callable[..., Any]) -> Callable[[Parts], Parts]:
    """A tamper: the MTP drafter with some methods replaced."""

    def tamper(parts: Parts) -> Parts:
        if isinstance(parts.drafter, MTPDrafter):
            parts.drafter.__class__ = type("Faulty", (MTPDrafter,), methods)
        return parts

    return tamper


def no_trim(self: Any, rows: int) -> None:
    self.chained = 0


def trim_first_only(self: Any, rows: int) -> None:
    """Rejected rows come out of the first cache of a head layer only: the indexer beside it keeps them."""
    MTPDrafter._trim(self, rows)
    for layer in self.cache:
        for leaf in flatten(layer)[1:]:
            leaf.offset += rows


def hidden_shifted(self: Any, tokens: Any, hidden: Any, accepted: int) -> None:
    MTPDrafter.observe(self, tokens, mx.roll(hidden, 1, axis=0) if hidden.shape[0] > 1 else hidden * 0.5, accepted)


def prime_shifted(self: Any, tokens: Any, hidden: Any) -> Any:
    return MTPDrafter.prime(self, mx.roll(tokens, 1), hidden)


def prime_twice(self: Any, tokens: Any, hidden: Any) -> Any:
    MTPDrafter.prime(self, tokens, hidden)
    return MTPDrafter.prime(self, tokens, hidden)


# -- the loop -------------------------------------------------------------------------------------------------------


class Bent:
    """A target whose passes go through `bend(target, tokens, cache)`."""

    def __init__(self, target: Any, bend: Callable[..., Output]):
        self._target, self._bend = target, bend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, tokens: mx.array, cache: Any) -> Output:
        return self._bend(self._target, tokens, cache)


def bent(bend: Callable[..., Output]) -> Callable[[Parts], Parts]:
    def tamper(parts: Parts) -> Parts:
        parts.target = Bent(parts.target, bend)
        return parts

    return tamper


def penalty_keeps_rejected(parts: Parts) -> Parts:
    """A repetition penalty whose history still holds the drafts that were rejected."""
    history: set[int] = set()

    def bend(target: Any, tokens: mx.array, cache: Any) -> Output:
        out = target.forward(tokens, cache)
        if history:
            ids = mx.array(sorted(history))
            out.logits = out.logits.at[:, ids].add(-1.5)
        if 1 < tokens.shape[0] <= 8:
            best = mx.argmax(out.logits, axis=-1).tolist()
            drafts = tokens.tolist()[1:]
            wrong = next((j for j, (a, b) in enumerate(zip(best, drafts, strict=False)) if a != b), len(drafts))
            history.update(drafts[wrong:])
        return out

    return bent(bend)(parts)


def last_prompt_token_twice(parts: Parts) -> Parts:
    state = {"done": False}

    def bend(target: Any, tokens: mx.array, cache: Any) -> Output:
        if tokens.shape[0] == 1 and not state["done"]:
            state["done"] = True
            target.forward(tokens, cache)
        return target.forward(tokens, cache)

    return bent(bend)(parts)


def step_twice(at: int) -> Callable[[Parts], Parts]:
    """One decoding step is fed twice, at the row count `at`."""

    def bend(target: Any, tokens: mx.array, cache: Any) -> Output:
        if cache.length == at and tokens.shape[0] <= 8:
            target.forward(tokens, cache)
        return target.forward(tokens, cache)

    return bent(bend)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


def judged(change: Callable[[list[int], mx.array], list[int]]) -> Callable[[Any], Any]:
    """The loop's verdict [accepted, next token, drafts...] goes through `change(verdict, logits)`."""
    judge = speculative.judge

    def wrong(logits: mx.array, draft: Any, *rest: Any) -> mx.array:
        return mx.array(change(judge(logits, draft, *rest).tolist(), logits), dtype=mx.int32)

    return lambda loaded: replaced(speculative, "judge", wrong)


def first_row_read(verdict: list[int], logits: mx.array) -> list[int]:
    """The correction is read from row 0 of the block, whatever was accepted."""
    return [verdict[0], mx.argmax(logits[0]).item(), *verdict[2:]]


def highest_id(verdict: list[int], logits: mx.array) -> list[int]:
    """Ties go to the highest id."""
    row = logits[verdict[0]]
    return [verdict[0], row.shape[0] - 1 - mx.argmax(row[::-1]).item(), *verdict[2:]]


def low_precision_choice(verdict: list[int], logits: mx.array) -> list[int]:
    """The verifier chooses from logits rounded to bfloat16, the baseline from the raw ones."""
    return [verdict[0], mx.argmax(logits[verdict[0]].astype(mx.bfloat16)).item(), *verdict[2:]]


def one_too_many(verdict: list[int], logits: mx.array) -> list[int]:
    """The first wrong draft is accepted, too."""
    accepted, _, *drafts = verdict
    more = min(accepted + 1, len(drafts))
    return [more, mx.argmax(logits[more]).item(), *drafts]


def one_too_few(verdict: list[int], logits: mx.array) -> list[int]:
    """A right draft is thrown away and found again as the correction."""
    accepted, _, *drafts = verdict
    return [accepted - 1, drafts[accepted - 1], *drafts] if accepted else verdict


def feeds_rejected(loaded: Any) -> Any:
    """After a reject the next block begins with the rejected draft, not with the correction."""
    block = speculative._Loop.block

    def wrong(self: Any, *args: Any) -> Any:
        record = block(self, *args)
        if 0 <= record.accepted < record.proposed:
            self.last = mx.array([record.drafts[record.accepted]])
        return record

    return replaced(speculative._Loop, "block", wrong)


def cap_short(parts: Parts) -> Parts:
    """The arm stops one token before the cap."""
    parts.stops.emitted = 1
    return parts


def eos_missed(parts: Parts) -> Parts:
    """The end of text goes unseen inside a block of several tokens."""
    cut, eos = parts.stops.cut, parts.stops.eos_ids

    def wrong(tokens: Any) -> Any:
        parts.stops.eos_ids = eos if len(tokens) == 1 else frozenset()
        return cut(tokens)

    parts.stops.cut = wrong
    return parts
