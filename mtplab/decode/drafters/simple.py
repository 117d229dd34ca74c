"""Drafters without a model: prompt lookup, an oracle that knows the continuation, a script that plays a pattern."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mtplab.decode.drafters.base import Draft


class _History:
    """Keeps the committed tokens; hidden states are of no interest."""

    def begin(self, prompt: Sequence[int]) -> None:
        self.tokens = list(prompt)
        self.prompt_length = len(self.tokens)

    def prime(self, tokens: mx.array, hidden: mx.array | None) -> list[mx.array]:
        return []

    def observe(self, tokens: Sequence[int], hidden: mx.array | None, accepted: int) -> None:
        self.tokens.extend(tokens)


class NgramDrafter(_History):
    """Prompt lookup: the longest suffix of 1..`longest` tokens that occurred before, and what followed it there.

    The latest occurrence wins. An index from n-gram to its last two end positions keeps a draft at O(longest).
    """

    def __init__(self, longest: int = 3):
        self.longest = longest
        self.begin([])

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin([])
        self.ends: dict[tuple[int, ...], tuple[int, int]] = {}
        self._extend(prompt)

    def observe(self, tokens: Sequence[int], hidden: mx.array | None, accepted: int) -> None:
        self._extend(tokens)

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for n in range(1, min(self.longest, end) + 1):
                gram = tuple(self.tokens[end - n :])
                self.ends[gram] = (self.ends.get(gram, (0, 0))[1], end)

    def draft(self, k: int, position: int) -> Draft | None:
        end = len(self.tokens)
        for n in range(min(self.longest, end), 0, -1):
            earlier, latest = self.ends.get(tuple(self.tokens[end - n :]), (0, 0))
            at = earlier if latest == end else latest
            if 0 < at < end:
                return Draft(mx.array(self.tokens[at : at + k]))
        return None


class OracleDrafter(_History):
    """Proposes the true continuation (given at construction): every draft of it must be accepted."""

    def __init__(self, continuation: Sequence[int]):
        self.continuation = list(continuation)

    def draft(self, k: int, position: int) -> Draft | None:
        ahead = self.continuation[position : position + k]
        return Draft(mx.array(ahead)) if ahead else None


class ScriptedDrafter(_History):
    """Plays an acceptance pattern: pass s is right for pattern[s mod n] drafts and wrong at the next one."""

    def __init__(self, continuation: Sequence[int], pattern: Sequence[int], vocab: int):
        self.continuation, self.pattern, self.vocab = list(continuation), list(pattern), vocab

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self.drafts = 0

    def draft(self, k: int, position: int) -> Draft | None:
        ahead = self.continuation[position : position + k]
        if not ahead:
            return None
        wrong = self.pattern[self.drafts % len(self.pattern)]
        self.drafts += 1
        if wrong < len(ahead):
            ahead[wrong] = (ahead[wrong] + 1) % self.vocab
        return Draft(mx.array(ahead))
