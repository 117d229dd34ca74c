"""How good a head is, free of depth and of luck: agreement with its target at every position of a text.

`match` (same first choice) and `overlap` (shared probability mass) are teacher-forced: at depth d the head is fed
the text's own tokens, whatever it would have drafted, at every position and not only after rejections. Acceptance in
a run mixes both with the loop; compare drafters by these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mtplab.models.heads import Head
from mtplab.models.target import Target


@dataclass(slots=True)
class Agreement:
    """Sums over positions, per depth 1..K: add the objects of several texts, then divide."""

    positions: list[int] = field(default_factory=list)
    matches: list[int] = field(default_factory=list)
    overlaps: list[float] = field(default_factory=list)

    def __add__(self, other: Agreement) -> Agreement:
        if not self.positions:
            return other
        pairs = ((self.positions, other.positions), (self.matches, other.matches), (self.overlaps, other.overlaps))
        return Agreement(*([a + b for a, b in zip(x, y, strict=True)] for x, y in pairs))

    @property
    def match(self) -> list[float | None]:
        return [m / n if n else None for m, n in zip(self.matches, self.positions, strict=True)]

    @property
    def overlap(self) -> list[float | None]:
        return [o / n if n else None for o, n in zip(self.overlaps, self.positions, strict=True)]


def agreement(
    target: Target,
    head: Head,
    tokens: Sequence[int],
    *,
    start: int = 0,
    depth: int = 3,
    temp: float = 1.0,
    prime: bool = True,
) -> Agreement:
    """Head against target on `tokens`, for every row from `start` on, at depths 1..depth.

    Row t holds (hidden[t], token[t+1]); at depth d it is compared with the target's distribution at position t+d.
    Both distributions are taken at `temp`. The head's cache holds the rows before `start`, unless `prime` is off.
    """
    ids = mx.array(list(tokens))
    out = target.forward(ids, target.new_cache())
    wanted = mx.softmax(out.logits.astype(mx.float32) / temp, axis=-1, precise=True)
    cache, last = head.new_cache(), len(tokens) - 1
    if start and prime:
        for i in range(len(head.layers)):
            head.rows(ids[1 : start + 1], out.hidden[:start], cache, depth=i + 1)
    result = Agreement([0] * depth, [0] * depth, [0.0] * depth)
    for t in range(start, last):
        reach = min(depth, last - t)
        rows = _chain(head, ids, out.hidden, cache, t, reach)
        q = mx.softmax(mx.concatenate(rows).astype(mx.float32) / temp, axis=-1, precise=True)
        p = wanted[t + 1 : t + 1 + reach]
        same = (mx.argmax(p, axis=-1) == mx.argmax(q, axis=-1)).tolist()
        shared = mx.minimum(p, q).sum(axis=-1).tolist()
        for d in range(reach):
            result.positions[d] += 1
            result.matches[d] += bool(same[d])
            result.overlaps[d] += shared[d]
    return result


def _chain(head: Head, ids: mx.array, hidden: mx.array, cache: list, t: int, depth: int) -> list[mx.array]:
    """Logits [1, V] of depths 1..depth from row t; the cache keeps row t of depth 1 in every layer and nothing else."""
    state, rows = hidden[t : t + 1], []
    for d in range(1, depth + 1):
        state, normed = head.rows(ids[t + d : t + d + 1], state, cache, depth=d)
        rows.append(head.logits(normed, d))
        if d == 1:
            for i in range(1, len(head.layers)):
                head.rows(ids[t + 1 : t + 2], hidden[t : t + 1], cache, depth=i + 1)
    for d in range(2, depth + 1):
        cache[(d - 1) % len(head.layers)].trim(1)
    return rows
