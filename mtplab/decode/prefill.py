"""One prefill for every arm: chunks of `prefill_step`, then the last prompt token alone.

Arms that prefill differently start from caches that differ in their rounding, and that would be counted as
divergence of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mtplab.decode.selection import Draws, select
from mtplab.decode.settings import Settings
from mtplab.errors import ModelError, RequestError
from mtplab.models.cache import Cache
from mtplab.models.target import Target

Prime = Callable[[mx.array, mx.array], list[mx.array]]


@dataclass(slots=True)
class Start:
    """The state after the prompt: the first token (lazy, [1]) and the hidden state it came from ([1, D])."""

    token: mx.array
    hidden: mx.array | None
    forwards: int


def check_prompt(prompt: Sequence[int], vocab: int | None = None) -> None:
    if len(prompt) == 0:
        raise RequestError("the prompt is empty; give at least one token")
    bad = [t for t in prompt if t < 0 or (vocab is not None and t >= vocab)]
    if bad:
        raise RequestError(
            f"prompt token {bad[0]} is not an id of this model's vocabulary"
            + (f" of {vocab:,}; do the tokenizer's files belong to this model?" if vocab is not None else "")
        )


def prefill(
    target: Target,
    cache: Cache,
    prompt: Sequence[int],
    settings: Settings,
    draws: Draws,
    prime: Prime | None = None,
) -> Start:
    """Feed the prompt and choose the first token. `prime` gets (next tokens, hidden) of every chunk and returns
    the arrays to evaluate with it."""
    check_prompt(prompt, target.vocab)
    tokens, step, forwards = mx.array(list(prompt)), settings.prefill_step, 0
    for begin in range(0, len(prompt) - 1, step):
        end = min(begin + step, len(prompt) - 1)
        out = target.forward(tokens[begin:end], cache)
        primed = prime(tokens[begin + 1 : end + 1], out.hidden) if prime is not None else []
        mx.eval(cache.arrays(), primed)
        forwards += 1
    out = target.forward(tokens[-1:], cache)
    token = select(out.logits, settings, draws, 0)
    damaged = mx.isnan(out.logits).any()
    mx.eval(token, damaged, cache.arrays(), [] if out.hidden is None else out.hidden)
    if damaged.item():
        raise ModelError("the model's logits are NaN after the prompt; its weights or its dtype are damaged")
    return Start(token, out.hidden, forwards + 1)
