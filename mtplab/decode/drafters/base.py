"""What proposes tokens. A drafter sees the committed tokens and the target's hidden states, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mtplab.decode.selection import Draws, greedy, probs
from mtplab.decode.settings import Settings
from mtplab.kernels.accept import draw


@dataclass(slots=True)
class Draft:
    """Up to k proposals. `probs` [k, V] belongs to kind "sampled"; a "point" draft has none."""

    tokens: mx.array  # [k] int, lazy
    probs: mx.array | None = None

    @property
    def kind(self) -> str:
        return "point" if self.probs is None else "sampled"

    def __len__(self) -> int:
        return self.tokens.shape[0]


def propose(
    logits: mx.array, settings: Settings, draws: Draws, position: int, *, sampled: bool
) -> tuple[mx.array, mx.array | None]:
    """The draft for output position `position` and what it was drawn from. logits: [1, V] -> [1], and [1, V] or None
    for a point draft, the first choice."""
    if not sampled:
        return greedy(logits), None
    p = probs(logits, settings)
    return draw(p[0], draws.uniform(position, "draft")), p


class Drafter(Protocol):
    """The loop calls begin once, prime per prompt chunk, then draft and observe in turn."""

    def begin(self, prompt: Sequence[int]) -> None:
        """A new request."""

    def prime(self, tokens: mx.array, hidden: mx.array | None) -> list[mx.array]:
        """Prompt rows: tokens[i] follows the position that hidden[i] belongs to. Returns arrays to evaluate."""

    def draft(self, k: int, position: int) -> Draft | None:
        """At most k proposals for output position `position` on; None where it has none."""

    def observe(self, tokens: Sequence[int], hidden: mx.array | None, accepted: int) -> None:
        """Committed tokens after the cut, with the hidden rows they were read from ([len(tokens), D]); of the last
        draft the first `accepted` were kept."""
