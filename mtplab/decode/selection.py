"""Which token: the one selection function of every arm, the drafter and the diagnosis.

Greedy is the argmax over the raw logits in float32, the lowest id on ties. Sampling is a draw from
`probs(logits)` with a random number keyed by (seed, request, position, purpose), so it depends neither on call
order nor on anybody else's use of the global generator.
"""

from __future__ import annotations

import mlx.core as mx

from mtplab.backend.keys import uniform
from mtplab.decode.settings import Settings
from mtplab.kernels.accept import draw


def greedy(logits: mx.array) -> mx.array:
    """logits: [..., V] -> ids [...], lowest id on ties."""
    return mx.argmax(logits.astype(mx.float32), axis=-1)


def probs(logits: mx.array, settings: Settings) -> mx.array:
    """The sampling distribution. logits: [M, V] -> float32 [M, V]; temperature, then top-k, then top-p."""
    x = logits.astype(mx.float32) / settings.temp
    if settings.top_k and settings.top_k < x.shape[-1]:
        # Ties at the boundary all stay: which of them a sort keeps is not ours to decide.
        floor = mx.min(mx.topk(x, settings.top_k, axis=-1), axis=-1, keepdims=True)
        x = mx.where(x < floor, -mx.inf, x)
    p = mx.softmax(x, axis=-1, precise=True)
    if 0 < settings.top_p < 1:
        order = mx.argsort(-p, axis=-1)
        ranked = mx.take_along_axis(p, order, axis=-1)
        kept = mx.where(mx.cumsum(ranked, axis=-1) - ranked < settings.top_p, ranked, 0.0)
        p = mx.put_along_axis(mx.zeros_like(p), order, kept, axis=-1)
        p = p / p.sum(axis=-1, keepdims=True)
    return p


class Draws:
    """Keyed random numbers of one request."""

    def __init__(self, seed: int, request: int):
        self.seed, self.request = seed, request

    def uniform(self, position: int, purpose: str, count: int = 1) -> mx.array:
        """`count` floats in [0, 1) for the token at `position` of the output."""
        return mx.array([uniform(self.seed, self.request, position, purpose, i) for i in range(count)])


def select(logits: mx.array, settings: Settings, draws: Draws, position: int) -> mx.array:
    """The next token of a one-token decoder. logits: [1, V] -> id [1]."""
    if settings.greedy:
        return greedy(logits)
    return draw(probs(logits, settings)[0], draws.uniform(position, "sample"))
