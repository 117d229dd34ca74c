"""One token at a time: what every other arm is compared with.

Deliberately not the speculative loop with k = 0 (that is the arm `depth0`, the control): if the two differ, the
loop is wrong. The next step is launched before the last token is read, as mlx-lm does it, so the host's work
hides behind the device's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mtplab.backend.clock import Clock
from mtplab.decode.prefill import prefill
from mtplab.decode.selection import Draws, select
from mtplab.decode.settings import Settings
from mtplab.decode.stopping import Stops
from mtplab.models.cache import Cache
from mtplab.models.target import Target
from mtplab.records.types import Prefill, Verify


def baseline(
    target: Target,
    cache: Cache,
    prompt: Sequence[int],
    *,
    settings: Settings,
    stops: Stops,
    clock: Clock,
    request: int = 0,
) -> Iterator[Prefill | Verify]:
    """Decode from a fresh cache; yields the prefill's record, then one `Verify` (nothing proposed) per token."""
    import mlx.core as mx

    draws, began = Draws(settings.seed, request), clock.now_ns()
    start = prefill(target, cache, prompt, settings, draws)
    token = start.token.item()
    _, cut = stops.cut([token])
    ended = clock.now_ns()
    yield Prefill(len(prompt), 0, settings.prefill_step, start.forwards, 1, token, cut, began, ended)

    def launch(last: mx.array, position: int) -> mx.array:
        chosen = select(target.forward(last, cache).logits, settings, draws, position)
        mx.async_eval(chosen, cache.arrays())
        return chosen

    index, rows = 0, len(prompt)
    flying = None if cut else launch(start.token, 1)
    while not cut:
        position, began, now = index + 1, clock.now_ns(), flying
        # Do not run past the cap; an unforeseen EOS leaves one extra row, which `cache.length` tells.
        flying = launch(now, position + 1) if position + 1 < settings.max_tokens else None
        token = now.item()
        _, cut = stops.cut([token])
        ended = clock.now_ns()
        yield Verify(index, position, 0, 0, 0, 1, cut, rows, rows + 1, (), (token,), began, ended)
        index, rows = index + 1, rows + 1
