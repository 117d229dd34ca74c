"""The canvas loop: denoise a block of positions until it stands, commit it, go on.

    prefill; for each canvas: start from noise; repeat (logits -> propose -> accept -> renoise) until it stops; commit

The denoiser does the forward passes, `canvas_rows` what is as wide as the vocabulary, the policy the decisions. One
host read a step: argmax, entropy and proposal of every position come together, and the decisions need them all.

Randomness is keyed by (seed, request, canvas, step, purpose): canvas 0 of 16 and of 48 steps starts from the same
noise, and nobody else's use of the global generator changes a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from mtplab.backend.clock import Clock, fence
from mtplab.backend.keys import integers, uniforms
from mtplab.decode import canvas_policy as policies
from mtplab.decode.canvas_policy import CanvasPolicy
from mtplab.decode.settings import Settings
from mtplab.decode.stopping import Stops
from mtplab.errors import ModelError
from mtplab.kernels.canvas_rows import Rows, canvas_rows
from mtplab.records.canvas import Canvas, DenoiseStep
from mtplab.records.types import Prefill

if TYPE_CHECKING:
    from mtplab.models.canvas.base import Denoiser


class Decided(NamedTuple):
    """What a step decides from, on the host: [C] each. `confidence`: probability of the proposal, where needed."""

    argmax: np.ndarray
    entropy: np.ndarray
    proposal: np.ndarray
    confidence: np.ndarray | None


class Draws:
    """Keyed noise of one request. A test may inject its own through the same three methods."""

    def __init__(self, seed: int, request: int, vocab: int):
        self.seed, self.request, self.vocab = seed, request, vocab

    def _ids(self, canvas: int, step: int, purpose: str, length: int) -> np.ndarray:
        # On the host, where they are used: a read from the device in every step would be waited for.
        return integers(self.vocab, length, self.seed, self.request, canvas, step, purpose)

    def start(self, canvas: int, length: int) -> np.ndarray:
        """Uniform ids, [length]: what a canvas begins with. The same for any number of steps."""
        return self._ids(canvas, 0, "start", length)

    def renoise(self, canvas: int, step: int, length: int) -> np.ndarray:
        """Uniform ids for the positions that step `step` did not accept."""
        return self._ids(canvas, step, "renoise", length)

    def rows(self, scaled: mx.array, canvas: int, step: int, *, sampled: bool, expect: Any = None) -> Rows:
        """What a step decides from, of logits [C, V] that are divided by the temperature already."""
        drawn = uniforms(len(scaled), self.seed, self.request, canvas, step, "propose") if sampled else None
        return canvas_rows(scaled, 1.0, None if drawn is None else mx.array(drawn), expect=expect)


@dataclass
class _State:
    """A canvas under way. All [C]."""

    ids: np.ndarray
    held: np.ndarray  # accepted positions
    settled: np.ndarray  # step (from 1) since which a position has its present token
    best: np.ndarray | None = None  # what would be committed now
    argmax: np.ndarray | None = None
    unchanged: int = 0  # steps in a row whose argmax equals the one before


def denoise(
    denoiser: Denoiser,
    prompt: Sequence[int],
    *,
    policy: CanvasPolicy,
    settings: Settings,
    stops: Stops,
    clock: Clock,
    request: int = 0,
    draws: Draws | None = None,
    cache: Any = None,
) -> Iterator[Prefill | DenoiseStep | Canvas]:
    """Decode from a fresh cache; yields the prefill's record, then every step and, as it commits, every canvas.

    Canvases are always whole; the last one's tokens are cut to what was asked for, so that a longer request begins
    with the same text. Raises ModelError where the logits are not finite.
    """
    draws = draws or Draws(settings.seed, request, denoiser.vocab)
    cache, began = denoiser.new_cache() if cache is None else cache, clock.now_ns()
    forwards, chunk = denoiser.prefill(prompt, cache, settings.prefill_step), denoiser.chunk(settings.prefill_step)
    fence(cache.arrays())
    yield Prefill(len(prompt), 0, chunk, forwards, 0, None, None, began, clock.now_ns())
    index, position, cut = 0, 0, None
    while cut is None:
        began = clock.now_ns()
        state, steps, why = yield from _denoised(denoiser, policy, draws, index, cache, clock)
        ended = clock.now_ns()
        tokens = tuple(state.best.tolist())
        emitted, cut = stops.cut(tokens)
        commit_ns, now = None, ended
        if cut is None:
            ran = denoiser.commit(tokens, cache)
            fence(cache.arrays())
            now = clock.now_ns()
            commit_ns = now - ended if ran else None
        eos = next((i for i, t in enumerate(tokens) if t in stops.eos_ids), None)
        valid = len(tokens) if eos is None else eos + 1
        yield Canvas(
            index, position, len(tokens), policy.steps, steps, why, tokens, tuple(state.settled.tolist()), eos, valid,
            emitted, cut, began, ended, now, commit_ns,
        )  # fmt: skip
        index, position = index + 1, position + emitted


def _denoised(
    denoiser: Denoiser, policy: CanvasPolicy, draws: Draws, index: int, cache: Any, clock: Clock
) -> Iterator[DenoiseStep]:
    """Denoise one canvas; returns (its last state, steps used, why it stopped)."""
    state = _begin(denoiser, min(policy.canvas, denoiser.room(cache)), draws, index)
    soft, why, step = None, None, 0
    while why is None:
        began, heat = clock.now_ns(), policies.temperature(policy, step)
        # The division takes over the logits' memory: a second [C, V] would be the largest array of the step. For the
        # same reason what the next step is given is summed up while this step's exponentials exist.
        scaled = denoiser.denoise(mx.array(state.ids), soft, cache) / heat
        expect = denoiser.expect if denoiser.self_conditioning and step + 1 < policy.steps else None
        seen = draws.rows(scaled, index, step, sampled=policy.proposal == "sampled", expect=expect)
        rows, soft = _read(seen, scaled, policy, index, step), seen.expected
        del scaled
        held, flips = state.held, None if state.argmax is None else int((rows.argmax != state.argmax).sum())
        _advance(state, policy, draws, rows, index, step, denoiser.mask_id)
        mean = float(rows.entropy.mean(dtype=np.float32))
        why = policies.stopped(policy, state.unchanged, mean, state.held)
        step += 1
        if step == policy.steps and (why is None or policies.forced(policy, rows.confidence, held)):
            why = "cap"
        new = int((state.held & ~held).sum())
        yield DenoiseStep(
            index, step - 1, heat, int(state.held.sum()), new, flips, mean, float(rows.entropy.max()), began,
            clock.now_ns(), tuple(state.best.tolist()), tuple(np.flatnonzero(state.held).tolist()),
        )  # fmt: skip
    return state, step, why


def _begin(denoiser: Denoiser, length: int, draws: Draws, index: int) -> _State:
    masked = denoiser.start == "mask"
    ids = np.full(length, denoiser.mask_id, np.int32) if masked else draws.start(index, length)
    return _State(ids, np.zeros(length, dtype=bool), np.ones(length, dtype=np.int32))


def _read(rows: Rows, scaled: mx.array, policy: CanvasPolicy, index: int, step: int) -> Decided:
    """The one host read of a step."""
    sure = mx.exp(rows.log_prob(scaled, 1.0, rows.proposal)) if policy.monotone else None
    mx.eval(rows.choice, rows.entropy, rows.proposal, [a for a in (sure, rows.expected) if a is not None])
    argmax, entropy, proposal = np.array(rows.choice), np.array(rows.entropy), np.array(rows.proposal)
    if not np.isfinite(entropy).all():
        raise ModelError(
            f"the denoiser's logits are not finite in canvas {index}, step {step}; "
            "check the weights, or load the model in float32"
        )
    return Decided(argmax, entropy, proposal, None if sure is None else np.array(sure))


def _advance(
    state: _State, policy: CanvasPolicy, draws: Draws, rows: Decided, index: int, step: int, mask_id: int | None
) -> None:
    """Accept, renoise, and keep what the record and the stop need."""
    take = policies.accepted(policy, step, rows.entropy, rows.confidence, state.held)
    state.held = state.held | take if policy.monotone else take
    state.ids = np.where(take, rows.proposal, state.ids).astype(np.int32)
    best = policies.final(policy, rows.argmax, state.ids, state.held)
    if state.best is not None:
        state.settled = np.where(best == state.best, state.settled, step + 1).astype(np.int32)
    state.best = best
    same = state.argmax is not None and bool((rows.argmax == state.argmax).all())
    state.argmax, state.unchanged = rows.argmax, state.unchanged + 1 if same else 0
    if step + 1 < policy.steps:
        fresh = draws.renoise(index, step, state.ids.size) if policy.renoise == "uniform" else None
        state.ids = policies.renoised(state.ids, state.held, mask_id if policy.renoise == "mask" else fresh)
