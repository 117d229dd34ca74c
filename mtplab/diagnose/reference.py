"""The baseline as a cursor: its rows are made when somebody asks for them, and only the last few are kept.

Arms run beside it and are compared row by row, so nothing grows with the length of a text but the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mtplab.backend.clock import Clock
from mtplab.decode.baseline import baseline
from mtplab.decode.settings import MAX_DEPTH, Settings
from mtplab.decode.stopping import Stops
from mtplab.diagnose import state
from mtplab.models.cache import Cache
from mtplab.models.heads import Head
from mtplab.models.target import Output, Target
from mtplab.records.types import Verify

KEPT = 48  # rows; arms are at most AHEAD, a block and a scripted draft behind
AHEAD = 16  # tokens made at a time: in a row one is computed while the graph of the next is built
# States, where each is a copy (recurrent layers). Nothing is made ahead then, and the arm that is furthest behind goes
# first: it asks for the last token of its block, MAX_DEPTH further on, and one more if its text ends there; the row
# after that token is under way. The state that a block started from may be asked for later, and is pinned.
STATES = MAX_DEPTH + 3

See = Callable[[mx.array, Cache, Output], Output]


class Watched:
    """A target that shows every pass to `see(tokens, cache, output)` and hands on what that returns."""

    def __init__(self, target: Target, see: See):
        self._target, self._see = target, see

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, tokens: mx.array, cache: Cache) -> Output:
        return self._see(tokens, cache, self._target.forward(tokens, cache))


@contextmanager
def aside(target: Target) -> Iterator[None]:
    """A pass of this target while an arm's transaction is open: its tape must not take the inputs for the arm's."""
    tape = target.tape
    if tape is None:
        yield
        return
    kept = tape.calls, tape.recording
    tape.calls, tape.recording = {}, False
    try:
        yield
    finally:
        tape.calls, tape.recording = kept


@dataclass(slots=True)
class Row:
    """The baseline at one output position: what it computed and the state it was left in."""

    logits: mx.array  # [V]
    hidden: mx.array | None  # [1, D]
    state: list[tuple[int, Any]] | None  # after the pass that gave the logits, `state.thinned`; None: gone
    length: int  # rows in that state


@dataclass(frozen=True, slots=True)
class Choice:
    """The two best ids of a row and the distance of their logits."""

    first: int
    second: int
    gap: float
    top: float


def choices(logits: mx.array) -> mx.array:
    """logits: [M, V] -> float32 [M, 4]: first id, second id (lowest on ties), their gap, the largest logit.

    Ids are exact in float32 below 2**24.
    """
    x = logits.astype(mx.float32)
    first = mx.argmax(x, axis=-1, keepdims=True)
    rest = mx.put_along_axis(x, first, mx.array(-mx.inf), axis=-1)
    second = mx.argmax(rest, axis=-1, keepdims=True)
    top, next_ = (mx.take_along_axis(x, i, axis=-1) for i in (first, second))
    return mx.concatenate([first.astype(mx.float32), second.astype(mx.float32), top - next_, top], axis=-1)


def read_choices(packed: mx.array) -> list[Choice]:
    return [Choice(int(a), int(b), gap, top) for a, b, gap, top in packed.tolist()]


class Reference:
    """See the module. `rows[p]` and `choices[p]` belong to output position p; tokens are all kept."""

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        *,
        settings: Settings,
        stops: Stops,
        clock: Clock,
        head: Head | None = None,
        request: int = 0,
    ):
        self.target, self.prompt, self.head = target, list(prompt), head
        self.cache = target.new_cache()
        self.rows: dict[int, Row] = {}
        self.choices: dict[int, Choice] = {}
        self.margins: list[float] = []
        self.tokens: list[int] = []
        self.cut: str | None = None
        self.head_cache = head.new_cache() if head is not None else None
        self._fed = 0
        self._copies = any(k not in ("plain", "window") for kinds in target.cache_kinds for k in kinds)
        self._pinned: tuple[int, list[tuple[int, Any]] | None] = (-1, None)
        self._stream = baseline(
            Watched(target, self._see), self.cache, prompt, settings=settings, stops=stops, clock=clock, request=request
        )

    def _see(self, tokens: mx.array, cache: Cache, out: Output) -> Output:
        position = cache.length - len(self.prompt)
        if self.head_cache is not None and out.hidden is not None:
            self._feed_prompt(tokens, out)
        if position >= 0:
            hidden = None if out.hidden is None else out.hidden[-1:]
            self.rows[position] = Row(out.logits[-1], hidden, state.snapshot(cache), cache.length)
            self._forget(position)
        return out

    def _forget(self, position: int) -> None:
        """What the row at `position` makes superfluous of those before it."""
        self.rows.pop(position - KEPT, None)
        self.choices.pop(position - KEPT, None)
        if (before := self.rows.get(position - 1)) is not None:
            before.state = state.thinned(before.state, self.rows[position].state)
        if self._copies and (old := self.rows.get(position - STATES)) is not None:
            old.state = None

    def _feed_prompt(self, tokens: mx.array, out: Output) -> None:
        """The head's prompt rows (hidden[t], token[t+1]), in the same chunks as a drafter is primed with."""
        begin, count = self._fed, tokens.shape[0]
        self._fed += count
        if self._fed < len(self.prompt):
            self._head_rows(mx.array(self.prompt[begin + 1 : self._fed + 1]), out.hidden)

    def _head_rows(self, tokens: mx.array, hidden: mx.array) -> None:
        for depth in range(len(self.head.layers)):
            self.head.rows(tokens, hidden, self.head_cache, depth=depth + 1)
        mx.async_eval(self.head.arrays(self.head_cache))

    def reach(self, position: int) -> bool:
        """Go on until the token at `position` is known, and then some; False if the text ends before it."""
        ahead = 0 if self._copies else AHEAD
        until = position + ahead if len(self.tokens) <= position else 0
        begin = len(self.tokens)
        while len(self.tokens) <= until and self.cut is None:
            with aside(self.target):
                record = next(self._stream, None)
            if record is None:
                self.cut = self.cut or "cap"
                break
            self.tokens.append(record.tokens[0] if isinstance(record, Verify) else record.token)
            self.cut = record.cut
        self._learn(begin)
        return position < len(self.tokens)

    def _learn(self, begin: int) -> None:
        """The choices and the head's rows from output position `begin` on: together, since each read waits for the pass
        that is already under way, and many small passes cost their number."""
        new = range(begin, len(self.tokens))
        if not new:
            return
        rows = [self.rows[p] for p in new]
        for position, choice in zip(new, read_choices(choices(mx.stack([r.logits for r in rows]))), strict=True):
            self.choices[position] = choice
            self.margins.append(choice.gap)
        if self.head_cache is not None and rows[0].hidden is not None:
            self._head_rows(mx.array(self.tokens[begin:]), mx.concatenate([r.hidden for r in rows]))

    def finish(self) -> None:
        """Run to the end of the text."""
        while self.reach(len(self.tokens)):
            pass

    def context(self, position: int) -> list[int]:
        """Everything before output position `position`: the prompt and the tokens made so far."""
        return self.prompt + self.tokens[:position]

    def state_at(self, length: int) -> list[tuple[int, Any]] | None:
        """The state after `length` rows, if it is still (or already) there."""
        position = length - len(self.prompt)
        row = self.rows.get(position)
        if row is None or row.state is None:
            return self._pinned[1] if row is not None and position == self._pinned[0] else None
        return state.whole([self.rows[p].state for p in range(position, max(self.rows) + 1)])

    def pin(self, length: int) -> None:
        """Keep the state after `length` rows as long as its row, or until another one is pinned."""
        if self._copies:
            self._pinned = (length - len(self.prompt), self.state_at(length))

    def copy_at(self, length: int) -> Cache | None:
        """A cache of one's own with the first `length` rows of the text."""
        found = self.state_at(length)
        return None if found is None else state.copied(self.target, found, length)
