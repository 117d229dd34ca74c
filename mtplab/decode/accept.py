"""The verdict over one block, on the device: how many drafts stand, and which token follows them.

Greedy compares with the target's own argmax. Under temperature the two exact rules apply: a draft sampled from q
is accepted with min(1, p/q) and replaced from max(p - q, 0); a point draft x is accepted with p(x) and replaced
from p without x (Leviathan 2023; Chen 2023). Scoring a point draft with min(1, p/q) is biased and cannot be
written: a `Draft` either carries the distribution it was sampled from or is a point.
"""

from __future__ import annotations

import mlx.core as mx

from mtplab.decode.drafters.base import Draft
from mtplab.decode.selection import Draws, probs
from mtplab.decode.settings import Settings
from mtplab.kernels.accept import accept, accept_sampled


def judge(logits: mx.array, draft: Draft, settings: Settings, draws: Draws, position: int) -> mx.array:
    """logits: [k+1, V] -> int32 [2 + k]: accepted, the next token (-1: NaN), the drafts; so one host read gets all."""
    drafts = draft.tokens.astype(mx.int32)
    if settings.greedy:
        verdict = accept(logits, drafts)[:2]
    else:
        u = draws.uniform(position, "accept", len(draft))
        v = draws.uniform(position, "residual")
        verdict = accept_sampled(probs(logits, settings), draft.probs, drafts, u, v)
    return mx.concatenate([verdict, drafts])
