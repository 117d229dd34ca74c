"""Requests written down by hand: passes as (proposed, accepted), tokens and times scripted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mtplab.records.types import Prefill, Request, Verify

MS = 1_000_000


def verify(
    index: int, proposed: int, accepted: int, *, tokens, position=0, emitted=None, cut=None, start=0, end=0, depth=None
) -> Verify:
    tokens = tuple(tokens)
    return Verify(
        index=index,
        position=position,
        depth=proposed if depth is None else depth,
        proposed=proposed,
        accepted=accepted,
        emitted=accepted + 1 if emitted is None else emitted,
        cut=cut,
        cache_before=position,
        cache_after=position + accepted + 1,
        drafts=tokens[:accepted] + (-1,) * (proposed - accepted),
        tokens=tokens,
        start_ns=start,
        end_ns=end,
    )


def request(
    passes: Sequence[tuple[int, int]],
    *,
    id: str = "p0",
    corpus: str = "novel",
    first: int | None = 7,
    tokens: Sequence[int] | None = None,
    emitted_last: int | None = None,
    finish: str = "cap",
    start_ms: float = 0.0,
    prefill_ms: float = 10.0,
    pass_ms: float | Sequence[float] = 4.0,
    cached: int = 0,
    prompt_tokens: int = 20,
    step: int = 512,
    depths: Sequence[int] | None = None,
    **settings,
) -> Request:
    """passes: (proposed, accepted) each; tokens: the committed ones after the first (default: all different)."""
    stream = iter(tokens) if tokens is not None else itertools.count(100)
    times = itertools.repeat(pass_ms) if isinstance(pass_ms, int | float) else iter(pass_ms)
    clock, position, made = int((start_ms + prefill_ms) * MS), int(first is not None), []
    prefill = Prefill(prompt_tokens, cached, step, 2, position, first, None, int(start_ms * MS), clock)
    for i, (k, a) in enumerate(passes):
        last = emitted_last is not None and i == len(passes) - 1
        committed = tuple(itertools.islice(stream, a + 1))
        end = clock + int(next(times) * MS)
        emitted = emitted_last if last else a + 1
        made.append(
            verify(
                i,
                k,
                a,
                tokens=committed,
                position=position,
                emitted=emitted,
                cut=finish if last else None,
                start=clock,
                end=end,
                depth=None if depths is None else depths[i],
            )
        )
        clock, position = end, position + emitted
    return Request(id, corpus, prefill, tuple(made), finish, settings)


def golden(**kwargs) -> Request:
    """The golden trace: K = 3, four passes, accepted 3, 1, 0, 2; 10 tokens from the passes."""
    return request([(3, 3), (3, 1), (3, 0), (3, 2)], first=None, **kwargs)


def plain(n: int, **kwargs) -> Request:
    """n passes of the baseline: nothing proposed, one token each."""
    return request([(0, 0)] * n, **kwargs)
