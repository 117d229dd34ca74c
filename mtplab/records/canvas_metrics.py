"""Numbers about canvases, as pure functions of their records.

Counts are pooled: numerators and denominators are summed over requests, then divided once. Quality is compared between
two runs of one prompt that started from the same canvases. A number without a denominator is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mtplab.records.canvas import CanvasRequest
from mtplab.records.metrics import divide

Pair = tuple[float, float]  # numerator and denominator


class Forwards(NamedTuple):
    """Model-size forward passes by what they are for."""

    prefill: int
    denoise: int
    commit: int


def forwards(requests: Sequence[CanvasRequest]) -> Forwards:
    """Every forward pass of the requests; a canvas without a commit (the last of a request) has none counted."""
    canvases = [c for r in requests for c in r.canvases]
    return Forwards(
        sum(r.prefill.forwards for r in requests),
        sum(c.steps for c in canvases),
        sum(c.commit_ns is not None for c in canvases),
    )


class TokensPerForward(NamedTuple):
    """Tokens per forward pass: `valid` ones (to EOS) without and with the prefill's passes, and those returned."""

    without_prefill: float | None
    with_prefill: float | None
    emitted: float | None


def tokens_per_forward(requests: Sequence[CanvasRequest]) -> TokensPerForward:
    """valid / (denoise + commit); valid / (prefill + denoise + commit); emitted / (prefill + denoise + commit).

    A request that is cut inside a canvas has denoised more valid tokens than it returns: the first two say what the
    decoder did, the last what the user got of it (the number that compares with one-token decoding).
    """
    f = forwards(requests)
    valid = sum(c.valid for r in requests for c in r.canvases)
    work = f.denoise + f.commit
    return TokensPerForward(
        divide(valid, work), divide(valid, work + f.prefill), divide(emitted_total(requests), work + f.prefill)
    )


def emitted_total(requests: Sequence[CanvasRequest]) -> int:
    """N: tokens returned."""
    return sum(c.emitted for r in requests for c in r.canvases)


# Steps ---------------------------------------------------------------------------------------------------------


def steps_used(requests: Sequence[CanvasRequest]) -> list[int]:
    """Steps of every canvas, in order."""
    return [c.steps for r in requests for c in r.canvases]


def steps_histogram(requests: Sequence[CanvasRequest]) -> dict[int, int]:
    """Steps used -> number of canvases."""
    return dict(sorted(Counter(steps_used(requests)).items()))


def cap_pair(requests: Sequence[CanvasRequest]) -> Pair:
    """(canvases that used all their steps and did not stop by themselves, canvases)."""
    stops = [c.stop for r in requests for c in r.canvases]
    return stops.count("cap"), len(stops)


def cap_share(requests: Sequence[CanvasRequest]) -> float | None:
    return divide(*cap_pair(requests))


def settling(requests: Sequence[CanvasRequest]) -> np.ndarray:
    """[steps, positions]: the share of canvases in which a position got its final token at a step (row 0: step 1).

    Canvases of other lengths than the longest count where they have positions; [0, 0] for no canvases.
    """
    canvases = [c for r in requests for c in r.canvases]
    height, width = max((c.cap for c in canvases), default=0), max((c.length for c in canvases), default=0)
    table, seen = np.zeros((height, width)), np.zeros(width)
    for c in canvases:
        seen[: c.length] += 1
        np.add.at(table, (np.array(c.settled, dtype=int) - 1, np.arange(c.length)), 1)
    return table / np.maximum(seen, 1)


def entropy_by_step(requests: Sequence[CanvasRequest]) -> list[Pair]:
    """Per step (mean entropy over the canvases that took it, their number)."""
    sums: dict[int, list[float]] = {}
    for r in requests:
        for s in r.steps:
            sums.setdefault(s.index, []).append(s.mean_entropy)
    return [(sum(sums[i]) / len(sums[i]), len(sums[i])) for i in sorted(sums)]


# Time ----------------------------------------------------------------------------------------------------------


def generation_ms(request: CanvasRequest) -> float:
    """From the end of the prefill to the last canvas on the host. No token comes from the prefill."""
    end = request.canvases[-1].end_ns if request.canvases else request.prefill.end_ns
    return (end - request.prefill.end_ns) / 1e6


def tok_s(requests: Sequence[CanvasRequest]) -> float | None:
    """Tokens returned / time from the end of the prefill to the last canvas.

    The first canvas counts with its own time: unlike a first token it is not made by the prefill, so the span of N
    tokens begins where the prefill ends, not at the first token.
    """
    return divide(1e3 * emitted_total(requests), sum(map(generation_ms, requests)))


def positions_s(requests: Sequence[CanvasRequest]) -> float | None:
    """Canvas positions finished per second, whether or not anybody asked for their tokens: never called tok/s."""
    return divide(1e3 * sum(c.length for r in requests for c in r.canvases), sum(map(generation_ms, requests)))


def step_ms(requests: Sequence[CanvasRequest]) -> float | None:
    """Median time of one denoising step."""
    times = [s.step_ns for r in requests for s in r.steps]
    return float(np.median(times)) / 1e6 if times else None


def commit_ms(requests: Sequence[CanvasRequest]) -> float | None:
    """Median time of one commit pass."""
    times = [c.commit_ns for r in requests for c in r.canvases if c.commit_ns is not None]
    return float(np.median(times)) / 1e6 if times else None


# Quality -------------------------------------------------------------------------------------------------------


def agreement(a: Sequence[int], b: Sequence[int]) -> Pair:
    """(positions with the same token, positions of the longer text): what one has and the other lacks disagrees."""
    return sum(x == y for x, y in zip(a, b, strict=False)), max(len(a), len(b))


def edit_distance(a: Sequence[int], b: Sequence[int]) -> Pair:
    """(Levenshtein distance over tokens, tokens of the longer text); a shifted text is close here, far in agreement."""
    x, y = np.asarray(a), np.asarray(b)
    row, ramp = np.arange(y.size + 1), np.arange(y.size + 1)
    for i, token in enumerate(x, 1):
        best = np.concatenate([[i], np.minimum(row[1:] + 1, row[:-1] + (y != token))])
        # An insertion adds 1 a position: the running minimum of (cost - position) does the whole row at once.
        row = np.minimum.accumulate(best - ramp) + ramp
    return int(row[-1]), max(x.size, y.size)


def distinct(tokens: Sequence[int], n: int) -> Pair:
    """(different n-grams, n-grams) of one text."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)), len(grams)


def repetition(tokens: Sequence[int]) -> Pair:
    """(tokens equal to the one just before, tokens with one before): parallel decoding says "the the"."""
    return sum(x == y for x, y in pairwise(tokens)), max(0, len(tokens) - 1)
