"""The Gemma 4 assistant as a drafter: no cache of its own, it reads the target's at the time of the draft."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mtplab.decode.drafters.base import Draft, propose
from mtplab.decode.selection import Draws
from mtplab.decode.settings import Settings
from mtplab.errors import RequestError
from mtplab.models.assistant import Assistant
from mtplab.models.cache import Cache


class AssistantDrafter:
    """`cache` is the target's cache of the request: its rows are those before the last committed token."""

    def __init__(
        self, assistant: Assistant, cache: Cache, settings: Settings, draws: Draws, *, drafts: str = "sampled"
    ):
        self.assistant, self.cache, self.settings, self.draws = assistant, cache, settings, draws
        self.sampled = drafts == "sampled" and not settings.greedy
        self.begin([])

    def begin(self, prompt: Sequence[int]) -> None:
        self.last: tuple[mx.array, mx.array] | None = None  # last token [1], the hidden state it was read from [1, D]

    def prime(self, tokens: mx.array, hidden: mx.array | None) -> list[mx.array]:
        return []

    def draft(self, k: int, position: int) -> Draft | None:
        if self.last is None:
            return None
        token, hidden = self.last
        shared, at = self.assistant.shared(self.cache), self.cache.length
        picked, dists = [], []
        for d in range(k):
            hidden, logits = self.assistant.step(token, hidden, shared, at)
            token, p = propose(logits, self.settings, self.draws, position + d, sampled=self.sampled)
            picked.append(token)
            dists.append(p)
        return Draft(mx.concatenate(picked), mx.concatenate(dists) if self.sampled else None)

    def observe(self, tokens: Sequence[int], hidden: mx.array | None, accepted: int) -> None:
        if hidden is None:
            raise RequestError("this model gives no hidden states, so its assistant cannot be used")
        self.last = mx.array([tokens[-1]]), hidden[-1:]
