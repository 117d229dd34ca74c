"""A denoiser without a model: it plays logits by canvas and step, and notes what it was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mtplab.backend.clock import ScriptedClock
from mtplab.decode.canvas import denoise
from mtplab.decode.canvas_policy import CanvasPolicy
from mtplab.decode.settings import Settings
from mtplab.decode.stopping import Stops
from mtplab.records.canvas import Canvas, DenoiseStep
from mtplab.trials.canvas_arms import collect

VOCAB = 32
MASK = 31
SURE = 60.0  # a logit that leaves no entropy


def logits(tokens: Sequence[int], sure: Sequence[float] | float = SURE, vocab: int = VOCAB) -> np.ndarray:
    """[C, V]: token i stands out by `sure[i]`; 0 is a flat row (entropy log V)."""
    out = np.zeros((len(tokens), vocab), np.float32)
    out[np.arange(len(tokens)), list(tokens)] = sure
    return out


class Cache:
    def __init__(self):
        self.rows: list[int] = []

    def arrays(self) -> list:
        return []


class Scripted:
    """`script(canvas, step, ids) -> logits [C, V]`. `seen` holds (canvas, step, ids) of every forward pass."""

    context, self_conditioning = 10_000, True

    def __init__(self, script: Callable[[int, int, np.ndarray], np.ndarray], canvas: int, *, masked: bool = False):
        self.script, self.canvas, self.vocab = script, canvas, VOCAB
        self.start, self.mask_id = ("mask", MASK) if masked else ("uniform", None)
        self.seen, self.commits, self.step = [], [], 0
        self.conditioned: list[bool] = []

    def new_cache(self) -> Cache:
        return Cache()

    def room(self, cache: Cache) -> int:
        return self.canvas

    def prefill(self, tokens: Sequence[int], cache: Cache, step: int = 512) -> int:
        cache.rows += list(tokens)
        return -(-len(tokens) // step)

    def chunk(self, step: int) -> int:
        return step

    def commit(self, tokens: Sequence[int], cache: Cache) -> bool:
        self.commits.append(tuple(tokens))
        cache.rows += list(tokens)
        self.step = 0
        return True

    def expect(self, weights: mx.array, first: int) -> mx.array:
        return mx.zeros((weights.shape[0], 1))

    def denoise(self, canvas: mx.array, soft: mx.array | None, cache: Cache) -> mx.array:
        ids = np.array(canvas)
        self.seen.append((len(self.commits), self.step, ids))
        self.conditioned.append(soft is not None)
        out = self.script(len(self.commits), self.step, ids)
        self.step += 1
        return mx.array(out)


def play(denoiser, policy: CanvasPolicy, *, eos: Sequence[int] = (), decode=None, **settings):
    """All records of one request, and the request."""
    settings = Settings(**{"max_tokens": policy.canvas, **settings})
    stops = Stops(settings, frozenset(eos), decode)
    records = list(
        denoise(denoiser, [1, 2, 3], policy=policy, settings=settings, stops=stops, clock=ScriptedClock(1_000_000))
    )
    return records, collect(records, settings.effective() | policy.effective() | {"sampler": policy.accept})


def steps(records, canvas: int = 0) -> list[DenoiseStep]:
    return [r for r in records if isinstance(r, DenoiseStep) and r.canvas == canvas]


def canvases(records) -> list[Canvas]:
    return [r for r in records if isinstance(r, Canvas)]
