"""The model's own MTP head as a drafter.

The head's cache must hold a row (hidden[t], token[t+1]) for the whole prompt and everything committed since. Rows
wait in `pending` until the next draft and go in as one block with it; while the policy sits at depth 0 the head
is not run at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mtplab.decode.drafters.base import Draft, propose
from mtplab.decode.selection import Draws
from mtplab.decode.settings import Settings, check_drafts, check_history
from mtplab.errors import RequestError
from mtplab.models.heads import Head

MAX_PENDING = 256  # rows kept back at depth 0 before they are absorbed without drafting


class MTPDrafter:
    """`history`: after a verify, recompute the accepted rows from the trunk's hidden states ("verified"), keep the
    rows as drafted ("drafted"), or start every draft from an empty head cache ("none"). `drafts`, under temperature:
    draw from the head's distribution ("sampled": stands with the overlap of the two) or take its first choice, as many
    engines do ("point": stands with the target's probability of it). Both are exact."""

    def __init__(
        self,
        head: Head,
        settings: Settings,
        draws: Draws,
        *,
        history: str = "verified",
        prime: bool = True,
        drafts: str = "sampled",
    ):
        check_drafts(drafts)
        check_history(history)
        if history == "drafted" and len(head.layers) > 1:
            raise RequestError("history 'drafted' needs a head of one layer: deeper rows are in another layer's cache")
        self.head, self.settings, self.draws = head, settings, draws
        self.history, self.primed = history, prime
        self.sampled = drafts == "sampled" and not settings.greedy
        self.begin([])

    def begin(self, prompt: Sequence[int]) -> None:
        self.cache: list[Any] = self.head.new_cache()
        self.pending: list[tuple[mx.array, mx.array]] = []
        self.chained = 0  # rows of the last draft beyond the verified ones, still in the head's cache

    def prime(self, tokens: mx.array, hidden: mx.array | None) -> list[mx.array]:
        if not self.primed:
            return []
        self.pending.append((tokens, hidden))
        return self._absorb()

    def _absorb(self) -> list[mx.array]:
        """Feed the waiting rows to every layer without drafting."""
        tokens, hidden = self._take()
        for i in range(len(self.head.layers)):
            self.head.rows(tokens, hidden, self.cache, depth=i + 1)
        return self.head.arrays(self.cache)

    def _take(self) -> tuple[mx.array, mx.array]:
        tokens, hidden = (mx.concatenate(parts) for parts in zip(*self.pending, strict=True))
        self.pending = []
        return tokens, hidden

    def draft(self, k: int, position: int) -> Draft | None:
        if not self.pending:
            return None
        if self.history == "none":
            self.cache = self.head.new_cache()
        tokens, hidden = self._take()
        state, normed = self.head.rows(tokens, hidden, self.cache, depth=1)
        for i in range(1, len(self.head.layers)):
            # Deeper layers keep the verified history, too: their cache holds the same rows.
            self.head.rows(tokens, hidden, self.cache, depth=i + 1)
        state, picked, dists = state[-1:], [], []
        for d in range(1, k + 1):
            logits = self.head.logits(normed[-1:], d)
            token, p = propose(logits, self.settings, self.draws, position + d - 1, sampled=self.sampled)
            picked.append(token)
            dists.append(p)
            if d < k:
                state, normed = self.head.rows(token, state, self.cache, depth=d + 1)
        self.chained = k - 1
        return Draft(mx.concatenate(picked), mx.concatenate(dists) if self.sampled else None)

    def observe(self, tokens: Sequence[int], hidden: mx.array | None, accepted: int) -> None:
        if hidden is None:
            raise RequestError("this model gives no hidden states, so its MTP head cannot be used")
        kept = min(accepted, self.chained, len(tokens)) if self.history == "drafted" else 0
        self._trim(self.chained - kept)
        rows = mx.array(list(tokens))
        if len(tokens) > kept:
            self.pending.append((rows[kept:], hidden[kept:]))
        if sum(t.shape[0] for t, _ in self.pending) > MAX_PENDING:
            mx.eval(self._absorb())

    def _trim(self, rows: int) -> None:
        """Take the rejected chain out of the head's caches (a chained row is in the layer that drafted it)."""
        n = len(self.head.layers)
        for step in range(rows):
            # Row `chained - step` was written at depth chained - step + 1, by layer (depth - 1) mod n.
            layer = (self.chained - step) % n
            if self.cache[layer].trim(1) != 1:
                raise RuntimeError("the head's cache did not trim")
        self.chained = 0
