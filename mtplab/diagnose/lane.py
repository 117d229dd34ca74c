"""One arm beside the baseline: every row it computes and every state it leaves, compared as they are made.

The arm's own loop runs, unchanged. Where its row would choose another token than the baseline did, the difference is
noted and the baseline's token is put on top of that row: the loop then commits the baseline's text, so that the arm
is re-joined at once and one run shows all the places where it would have left (teacher forcing). What the loop does
with rows, drafts and caches stays its own; a token that is not the choice of its row is a fault of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mlx.core as mx

from mtplab.decode.drafters.mtp import MTPDrafter
from mtplab.diagnose import state
from mtplab.diagnose.reference import Choice, Reference, Watched, choices, read_choices
from mtplab.diagnose.seen import Fault, Leave, Seen
from mtplab.diagnose.shadow import Shadow
from mtplab.diagnose.state import LeafDiff
from mtplab.diagnose.watch import share
from mtplab.models.cache import Cache
from mtplab.models.target import Output
from mtplab.records.types import Prefill, Verify

WRONG_ROW = 2.0**-5  # of itself: a head's cache row that is off by more is another row
MEASURED = 8  # passes
LATER = 8  # rows of a lazy lane that are compared together: each read waits for the pass that is under way
NEWEST = 16  # rows of a cache: more than a block
FARTHER = 8.0  # times as far off as every row before: such a row has its pass's whole state measured
BESIDE = 4.0  # an arm may be so many times as far from its shadow as the shadow is from the baseline


@dataclass(slots=True)
class _Block:
    position: int
    tokens: list[int]
    valid: int
    logits: mx.array | None  # as computed, of the valid rows


class Lane:
    """See the module. `step` runs one pass; `parts.target` must be the plain target (it is watched here).

    `lazy`: of a run of one-row passes only the rows are compared, each when its token has been handed on, and the state
    at the end alone: nothing waits for the device in between, as in an ordinary run.
    """

    def __init__(
        self, name: str, reference: Reference, parts: Any, *, shadow: Shadow | None = None, lazy: bool = False
    ):
        self.name, self.reference, self.parts, self.shadow = name, reference, parts, shadow
        self.seen, self.verify, self.done = Seen(), -1, False
        self.next = self.emitted = 0  # position of the next row to compute; tokens handed on
        self.started, self.fed, self.rejected = False, 0, False
        self.lazy, self.rounded = lazy, set()  # places of the state that differed
        self.shifted = 0.0  # how far the rows of a head's input were off at most, of themselves
        self.farthest, self.jumped = 0.0, False  # the largest difference of a row; whether this pass has one FARTHER
        self.waiting: list[tuple[int, mx.array, Output]] = []  # passes whose rows are not compared yet
        self.block: _Block | None = None  # the last block fed, the last one of several rows, and where the arm left
        self.wide: _Block | None = None
        self.left_at: _Block | None = None
        self.parts.target = Watched(parts.target, self._see)
        self.stream: Iterator[Prefill | Verify] = iter(())

    # -- what the arm's loop runs through -------------------------------------------------------------------------

    def _see(self, tokens: mx.array, cache: Cache, out: Output) -> Output:
        count = tokens.shape[0]
        if not self.started:
            self.fed, self.first = self.fed + count, out.logits[-1]
            return out
        if self.lazy and count == 1:
            return self._see_later(tokens, out)
        return self._seen(tokens.tolist(), self.next, out)

    def _see_later(self, tokens: mx.array, out: Output) -> Output:
        at = self.next
        self.next += 1
        self.waiting.append((at, tokens, out))
        if not self.reference.reach(at):
            return out
        return Output(self._rejoin(out.logits, 0, self.reference.tokens[at]), out.hidden)

    def _seen_now(self, until: int) -> None:
        now = self.verify
        while self.waiting and self.waiting[0][0] <= until:
            at, tokens, out = self.waiting.pop(0)
            self.verify = at - 2  # passes of one row: that of the row at 1 is number 0
            self._seen(tokens.tolist(), at, out)
        self.verify = now

    def _seen(self, ids: list[int], at: int, out: Output) -> Output:
        count = len(ids)
        block = self.block = _Block(at, ids, 0, None)
        self.wide = block if count > 1 else self.wide
        if count == 1:
            self.next = max(self.next, at + 1)
        self.reference.reach(at - 1)
        if count > 1 and self.shadow is not None:
            self.reference.pin(len(self.reference.prompt) + at - 1)
        if at > len(self.reference.tokens) or ids[0] != self.reference.tokens[at - 1]:
            if at <= len(self.reference.tokens):
                self._fault("fed", at, f"fed token {ids[0]} where the text has {self.reference.tokens[at - 1]}")
            return out
        valid = 0
        while valid < count and self.reference.reach(at + valid):
            valid += 1
            if valid < count and ids[valid] != self.reference.tokens[at + valid - 1]:
                break
        block.valid = valid
        if valid == 0:
            return out
        block.logits = out.logits[:valid]
        wanted = mx.stack([self.reference.rows[at + j].logits for j in range(valid)])
        noise = None if self.shadow is None else self._beside_rows(block, wanted)
        return Output(self._compare(block, out, wanted, noise), out.hidden)

    def _beside_rows(self, block: _Block, wanted: mx.array) -> float:
        """The same block in the shadow. Returns the block's noise: the shadow's largest distance from the baseline."""
        rows = self.shadow.feed(block.tokens, block.valid)[: block.valid].astype(mx.float32)
        noise = mx.abs(rows - wanted.astype(mx.float32)).max()
        off = mx.abs(rows - block.logits.astype(mx.float32)).max()
        mx.eval(noise, off)
        seen = self.seen
        seen.shadow_rows += block.valid
        seen.noise = max(seen.noise, noise.item())
        if off.item() > seen.shadow_row_diff:
            seen.shadow_row_diff = off.item()
        if off.item() > BESIDE * seen.noise:
            text = f"its logits are {off.item():.3g} away from the same blocks without the loop"
            self._fault("logits", block.position, text, counted=False)
        return noise.item()

    def _compare(self, block: _Block, out: Output, wanted: mx.array, noise: float | None) -> mx.array:
        """Rows against the baseline's; the rows to go on with, re-joined where they chose otherwise."""
        at, logits = block.position, out.logits
        self.seen.compared += block.valid
        differ = (block.logits != wanted).any(axis=-1)
        mx.eval(differ, logits)
        if not any(differ.tolist()):
            return logits
        packed, shift = choices(block.logits), self._shift(block, out.hidden)
        far = mx.abs(block.logits.astype(mx.float32) - wanted.astype(mx.float32)).max(axis=-1)
        mx.eval(packed, far, shift)
        self.shifted = max(self.shifted, shift.item())
        most = far.max().item()
        self.jumped, self.farthest = most > FARTHER * self.farthest, max(most, self.farthest)
        for j, (choice, diff, flag) in enumerate(zip(read_choices(packed), far.tolist(), differ.tolist(), strict=True)):
            if not flag:
                continue
            self.seen.rows_differ += 1
            self.seen.row_diffs.append(diff)
            if self.seen.first_differs is None:
                self.seen.first_differs = at + j
            if choice.first != self.reference.tokens[at + j]:
                self.left_at = self.left_at or block
                self._left(at + j, len(block.tokens) - 1, choice, wanted[j], diff, noise)
                logits = self._rejoin(logits, j, self.reference.tokens[at + j])
        return logits

    def _shift(self, block: _Block, hidden: mx.array | None) -> mx.array:
        """How far the hidden rows that a head is given are from the baseline's, of themselves, at most."""
        if hidden is None or self.reference.head_cache is None or not isinstance(self.parts.drafter, MTPDrafter):
            return mx.array(0.0)
        rows = [self.reference.rows[block.position + j].hidden for j in range(block.valid)]
        return share(hidden[: block.valid], mx.concatenate(rows), axis=-1).max()

    def _left(
        self, position: int, depth: int, arm: Choice, wanted: mx.array, diff: float, noise: float | None = None
    ) -> None:
        token, base = self.reference.tokens[position], self.reference.choices[position]
        gap = (wanted[token].astype(mx.float32) - wanted[arm.first].astype(mx.float32)).item()
        self.seen.leaves.append(
            Leave(position, self.verify + 1, depth, token, arm.first, gap, arm, base, diff, base.top, noise)
        )

    @staticmethod
    def _rejoin(logits: mx.array, row: int, token: int) -> mx.array:
        """The logits with the token on top of the row, without asking the device."""
        top = logits[row].max()
        here = (mx.arange(logits.shape[0])[:, None] == row) & (mx.arange(logits.shape[1])[None] == token)
        return mx.where(here, top + mx.maximum(mx.abs(top), 1), logits)

    def _fault(self, kind: str, position: int, text: str, *, layer: int | None = None, counted: bool = True) -> None:
        """The first fault of each kind is kept."""
        if not any(f.kind == kind for f in self.seen.faults):
            self.seen.faults.append(Fault(kind, position, self.verify, layer, text, counted))

    # -- what comes out of it --------------------------------------------------------------------------------------

    def step(self) -> None:
        """One record of the arm, then the audit of what it left behind."""
        record = next(self.stream, None)
        if record is None:
            self._end("stop")
        elif isinstance(record, Prefill):
            self._prefilled(record)
        else:
            self._passed(record)

    def _prefilled(self, record: Prefill) -> None:
        self.started, self.next, self.emitted = True, 1, 1
        rows = len(self.reference.prompt)
        if self.fed != rows:
            self._fault("prefill", 0, f"the prefill fed {self.fed} rows for a prompt of {rows} tokens")
        self.reference.reach(0)
        wanted, token = self.reference.rows[0].logits, self.reference.tokens[0]
        self.seen.compared += 1
        if not mx.array_equal(self.first, wanted).item():
            diff = mx.abs(self.first.astype(mx.float32) - wanted.astype(mx.float32)).max().item()
            self.seen.rows_differ += 1
            self.seen.row_diffs.append(diff)
            choice = read_choices(choices(self.first[None]))[0]
            if choice.first != token:
                self._left(0, 0, choice, wanted, diff)
            self._fault("prefill", 0, f"the same prompt gave other logits, {diff:.3g} apart", counted=False)
        self._audit(record.cut)
        if record.token != token:
            if not self.seen.leaves:
                self._fault("selection", 0, f"token {record.token} is not its row's choice, {token}")
            self._end("left")
        elif record.cut:
            self._ended(record.cut, 1)

    def _passed(self, record: Verify) -> None:
        if record.cut or len(self.waiting) > LATER:
            self._seen_now(record.position)
        self.verify, self.emitted = record.index, record.position + record.emitted
        block, at, emitted = self.block, record.position, record.emitted_tokens
        self.seen.passes.append((record.drafts, record.emitted))
        if record.proposed:
            self.next = at + record.emitted
            self._count(record)
        wanted = tuple(self.reference.tokens[at : at + len(emitted)])
        if self.reference.reach(at + len(emitted) - 1):
            wanted = tuple(self.reference.tokens[at : at + len(emitted)])
        if emitted != wanted:
            self._wrong_token(at, emitted, wanted)
            return
        if record.proposed and block.valid and block.valid > len(emitted) and not record.cut:
            text = f"accepted {record.accepted} drafts where {block.valid - 1} are the text"
            self._fault("acceptance", at, text)
        if not self.lazy or record.cut:
            self._audit(record.cut)
        if record.cut:
            self._ended(record.cut, at + len(emitted))

    def _count(self, record: Verify) -> None:
        rejected = record.accepted < record.proposed
        self.seen.accepted[record.proposed, record.accepted] += 1
        self.seen.second_rejects += rejected and self.rejected
        self.rejected = rejected

    def _wrong_token(self, at: int, emitted: Sequence[int], wanted: Sequence[int]) -> None:
        self._seen_now(at)
        if len(wanted) < len(emitted) and emitted[: len(wanted)] == wanted:
            self._end("long")
            return
        i = next(i for i, (a, b) in enumerate(zip(emitted, wanted, strict=False)) if a != b)
        if not any(f.kind == "fed" for f in self.seen.faults):
            text = f"committed {emitted[i]}, which is not the choice of its row ({wanted[i]})"
            self._fault("selection", at + i, text)
        self._end("left")

    def _ended(self, cut: str, count: int) -> None:
        """The arm's text is over after `count` tokens, all equal to the baseline's."""
        self._end("short" if self.reference.reach(count) else cut)

    def _end(self, why: str) -> None:
        self.seen.end, self.done = why, True
        self.stream.close() if hasattr(self.stream, "close") else None

    # -- the state it left -----------------------------------------------------------------------------------------

    def _audit(self, cut: str | None) -> None:
        length, cache = len(self.reference.prompt) + self.next - 1, self.parts.cache
        got, at = state.leaves(cache), (self.next - 1, self.verify)
        self.seen.wrapped |= any(getattr(x, "max_size", length) < length for _, x in got)
        if cache.length != length:
            text = f"the cache counts {cache.length} rows where {length} tokens belong in it"
            self._fault("rows", at[0], text)
        want = self.reference.state_at(length)
        if want is None:
            return
        # How far rounding goes is measured for the newest rows, every few passes for all: that takes longer than
        # finding that bits differ. What is wrong in an older row stays until then, or shows in the rows of this pass.
        whole = bool(cut) or self.jumped or self.seen.state_rounded % MEASURED == 0
        self.jumped = False
        found = state.compare(got, want, length, newest=None if whole else NEWEST, known=self.rounded)
        self.rounded |= {d.place for d in found}
        self._note(found, at)
        self._audit_head(cut)
        if self.shadow is not None:
            self._beside_state(got, want, length, at)

    def _beside_state(self, got: list, want: list, length: int, at: tuple[int, int]) -> None:
        """The arm's state against the shadow's; what is off by more than rounding has been wrong since this pass."""
        shadow = state.leaves(self.shadow.cache)
        noise = {d.place: d.relative for d in state.compare(shadow, want, length)}
        found = state.compare(got, shadow, length)
        self.seen.shadow_states += 1
        self.seen.shadow_states_equal += not found
        self.seen.state_noise = max([self.seen.state_noise, *noise.values()])
        for d in found:
            if d.part == "length" or d.relative > BESIDE * noise.get(d.place, 0.0):
                text = f"{d.part} are off by {d.relative:.2g} of themselves from the same blocks without the loop"
                self._fault("state", at[0], text, layer=d.layer, counted=d.part == "length")

    def _note(self, found: Sequence[LeafDiff], at: tuple[int, int]) -> None:
        if not found:
            self.seen.state_equal += 1
            return
        self.seen.state_rounded += 1
        if (bad := next((d for d in found if d.part == "length" or d.rows), None)) is not None:
            count, off = abs(bad.rows), len({d.layer for d in found if d.part == "length"})
            text = f"holds {count} row{'s' if count != 1 else ''} too {'many' if bad.rows > 0 else 'few'}"
            text += f" (as do {off - 1} more layers)" if off > 1 else ""
            self._fault("state", at[0], text, layer=bad.layer)
        if self.seen.first_rounded is None:
            self.seen.first_rounded = (*at, found[0].layer)
        for layer, parts in groupby(found, key=lambda d: d.layer):
            count, most = self.seen.layers.get(layer, (0, 0.0))
            self.seen.layers[layer] = count + 1, max(most, *(d.relative for d in parts))
        worst = max(found, key=lambda d: d.relative)
        if self.seen.worst is None or worst.relative > self.seen.worst.relative:
            self.seen.worst, self.seen.worst_at = worst, at

    def _audit_head(self, cut: str | None) -> None:
        drafter = self.parts.drafter
        if not isinstance(drafter, MTPDrafter) or drafter.history != "verified" or not drafter.primed:
            return
        if self.reference.head_cache is None or cut:
            return
        rows = len(self.reference.prompt) + self.emitted - 1
        waiting = sum(t.shape[0] for t, _ in drafter.pending)
        got = state.head_state(drafter.cache)
        inside = next((leaf.offset for _, leaf in got if leaf.offset + waiting != rows), rows - waiting)
        self.seen.head_audited += 1
        if inside + waiting != rows:
            text = f"the head's cache holds {inside} rows and {waiting} wait where {rows} belong in it"
            self._fault("head", self.next - 1, text)
            return
        if not inside:
            return
        want = state.head_state(self.reference.head_cache, inside)
        found = state.compare(got, want, inside)
        # The last layer's output, which the head is given, is in no cache of the trunk.
        given = max(self.seen.off, self.shifted)
        for d in found:
            if d.part == "length" or d.relative > max(WRONG_ROW, 8 * given):
                text = f"the head's cache, layer {d.layer}, {d.part}: a row is off by {d.relative:.2g} of itself"
                self._fault("head", self.next - 1, text, counted=False)
