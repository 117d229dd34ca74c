"""Draft, verify, accept, commit, yield: the speculative loop for k = 0..8.

One pass is one graph and one host read: the drafter's tokens stay on the device, the target checks them as one
block inside a cache transaction, and the verdict comes back as one small array. A pass of depth 0 is an ordinary
decoding step; when the next one is of depth 0, too, it is launched before the last token is read, so that the
arm `depth0` costs what the baseline costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mtplab.backend.clock import Clock
from mtplab.decode.accept import judge
from mtplab.decode.drafters.base import Draft, Drafter
from mtplab.decode.policy import DepthPolicy
from mtplab.decode.prefill import prefill
from mtplab.decode.selection import Draws, select
from mtplab.decode.settings import Settings
from mtplab.decode.stopping import Stops
from mtplab.errors import ModelError
from mtplab.models.cache import Cache
from mtplab.models.target import Target
from mtplab.records.types import Prefill, Verify


@dataclass(slots=True)
class Flight:
    """A depth-0 step under way: its token (lazy, [1]) and the hidden state it was read from."""

    token: mx.array
    hidden: mx.array | None


def speculative(
    target: Target,
    cache: Cache,
    prompt: Sequence[int],
    *,
    drafter: Drafter | None,
    policy: DepthPolicy,
    settings: Settings,
    stops: Stops,
    clock: Clock,
    request: int = 0,
) -> Iterator[Prefill | Verify]:
    """Decode from a fresh cache; yields the prefill's record, then one `Verify` per pass."""
    loop = _Loop(target, cache, drafter, settings, Draws(settings.seed, request), stops, clock)
    first = loop.prefill(prompt)
    yield first
    cut, index, position = first.cut, 0, 1
    depth = 0 if cut else policy.next_depth()
    while not cut:
        if depth == 0:
            # The policy chooses one pass ahead here: a step of depth 0 tells it nothing but its time.
            following = policy.next_depth()
            record = loop.single(index, position, run_ahead=following == 0)
        else:
            record, following = loop.block(index, position, depth), None
        policy.observe(record)
        yield record
        cut, index, position = record.cut, index + 1, position + record.emitted
        if not cut:
            depth = policy.next_depth() if following is None else following


class _Loop:
    """The state of one request between passes."""

    def __init__(self, target, cache, drafter, settings, draws, stops, clock):
        self.target, self.cache, self.drafter = target, cache, drafter
        self.settings, self.draws, self.stops, self.clock = settings, draws, stops, clock
        self.flight: Flight | None = None
        self.last: mx.array | None = None  # the last committed token, [1], not yet in the cache
        self.rows = 0  # rows of the cache before the next pass, without a step under way

    def prefill(self, prompt: Sequence[int]) -> Prefill:
        began, prime = self.clock.now_ns(), None
        if self.drafter is not None:
            self.drafter.begin(prompt)
            prime = self.drafter.prime
        start = prefill(self.target, self.cache, prompt, self.settings, self.draws, prime)
        token = start.token.item()
        _, cut = self.stops.cut([token])
        self._observe([token], start.hidden, 0)
        self.last, self.rows = start.token, len(prompt)
        step, ended = self.settings.prefill_step, self.clock.now_ns()
        return Prefill(len(prompt), 0, step, start.forwards, 1, token, cut, began, ended)

    def _observe(self, tokens: Sequence[int], hidden: mx.array | None, accepted: int) -> None:
        if self.drafter is not None:
            self.drafter.observe(tokens, hidden, accepted)

    def _launch(self, last: mx.array, position: int) -> Flight:
        out = self.target.forward(last, self.cache)
        token = select(out.logits, self.settings, self.draws, position)
        mx.async_eval(token, self.cache.arrays())
        return Flight(token, out.hidden if self.drafter is not None else None)

    def single(self, index: int, position: int, *, run_ahead: bool, depth: int = 0) -> Verify:
        """A pass without drafts: one row, one token."""
        began = self.clock.now_ns()
        now = self.flight or self._launch(self.last, position)
        ahead = run_ahead and position + 1 < self.settings.max_tokens
        self.flight = self._launch(now.token, position + 1) if ahead else None
        token = now.token.item()
        _, cut = self.stops.cut([token])
        self._observe([token], now.hidden, 0)
        self.last, before = now.token, self.rows
        self.rows += 1
        ended = self.clock.now_ns()
        return Verify(index, position, depth, 0, 0, 1, cut, before, self.rows, (), (token,), began, ended)

    def block(self, index: int, position: int, depth: int) -> Verify:
        """A pass of depth k: k drafts and the last token as one block of at most k + 1 rows."""
        began = self.clock.now_ns()
        draft = self.drafter.draft(depth, position) if self.drafter is not None else None
        if draft is None:
            return self.single(index, position, run_ahead=False, depth=depth)
        before, k = self.cache.length, len(draft)
        with self.cache.attempt(k + 1) as attempt:
            accepted, drafts, following, hidden = self._verify(draft, position)
            tokens = (*drafts[:accepted], following)
            emitted, cut = self.stops.cut(tokens)
            # The last emitted token is not in the cache: of the block, the first `emitted` rows stay.
            attempt.keep(emitted)
        self._observe(tokens[:emitted], None if hidden is None else hidden[:emitted], min(accepted, emitted))
        self.last, self.rows = mx.array([tokens[emitted - 1]]), self.cache.length
        ended = self.clock.now_ns()
        return Verify(
            index, position, depth, k, accepted, emitted, cut, before, self.rows, tuple(drafts), tokens, began, ended
        )

    def _verify(self, draft: Draft, position: int) -> tuple[int, list[int], int, mx.array | None]:
        """(accepted, the drafts, the token after them, hidden rows) with one host read."""
        out = self.target.forward(mx.concatenate([self.last, draft.tokens]), self.cache)
        verdict = judge(out.logits, draft, self.settings, self.draws, position)
        mx.eval(verdict, self.cache.arrays())
        accepted, following, *drafts = verdict.tolist()
        if following < 0:
            raise ModelError("the target's logits are NaN in mid-text; check the weights, or load it in float32")
        return accepted, drafts, following, out.hidden
