"""Canvas requests written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from mtplab.records.canvas import Canvas, CanvasRequest, DenoiseStep
from mtplab.records.types import Prefill

MS = 1_000_000


def canvas_request(
    tokens: Sequence[Sequence[int]],
    *,
    steps: int | Sequence[int] = 2,
    cap: int = 4,
    id: str = "p0",
    corpus: str = "novel",
    seed: int = 0,
    sampler: str = "entropy:0.1",
    emitted: int | None = None,
    nll: float | None = None,
    step_ms: float = 10,
    commit_ms: float = 5,
    prefill_ms: float = 20,
    settled: Sequence[int] | None = None,
    arm: str | None = None,
) -> CanvasRequest:
    """One canvas per list of `tokens`. A canvas that uses fewer than `cap` steps stopped as stable."""
    used = [steps] * len(tokens) if isinstance(steps, int) else list(steps)
    now, position, canvases, made = round(prefill_ms * MS), 0, [], []
    for i, (line, count) in enumerate(zip(tokens, used, strict=True)):
        last, began = i == len(tokens) - 1, now
        for s in range(count):
            end = now + round(step_ms * MS)
            flips = None if s == 0 else 0
            made.append(DenoiseStep(i, s, 0.8, len(line), 0, flips, 1.0 / (s + 1), 2.0, now, end))
            now = end
        denoised = now
        commit = None if last else round(commit_ms * MS)
        now += commit or 0
        out = len(line) if not last or emitted is None else emitted
        why = "cap" if count == cap else "stable"
        canvases.append(
            Canvas(
                i, position, len(line), cap, count, why, tuple(line), tuple(settled or [1] * len(line)), None,
                len(line), out, "cap" if last else None, began, denoised, now, commit,
            )
        )  # fmt: skip
        position += out
    total = sum(c.emitted for c in canvases)
    settings = {"steps": cap, "sampler": sampler, "canvas": len(tokens[0]), "seed": seed, "round": seed}
    settings["arm"] = arm or f"steps{cap}"
    prefill = Prefill(3, 0, 2048, 1, 0, None, None, 0, round(prefill_ms * MS))
    return CanvasRequest(
        id, corpus, prefill, tuple(canvases), tuple(made), "cap", settings, nll, total if nll is not None else 0,
        "encoder" if nll is not None else None,
    )  # fmt: skip
