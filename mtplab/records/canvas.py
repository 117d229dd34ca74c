"""What the canvas decoder reports: counts, entropies and nanoseconds, never ratios.

The decoder yields one `Prefill`, then for each canvas its `DenoiseStep`s and one `Canvas`. A canvas is a block of C
positions that is denoised in several forward passes and committed as a whole; every one of its tokens reaches the user
at the same moment. Forward passes = prefill.forwards + one a step + one a committed canvas (the last is not).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mtplab.records.types import SCHEMA, Prefill

KIND = "canvas"


@dataclass(frozen=True, slots=True)
class DenoiseStep:
    """One forward pass over a canvas and what was decided from its logits.

    Under a revocable policy `accepted` is decided anew in every step; under a monotone one it only grows.
    """

    canvas: int  # number of the canvas in the request, from 0
    index: int  # number of the step in the canvas, from 0
    temperature: float  # of the schedule; the logits are divided by it
    accepted: int  # positions that count as accepted after this step
    new: int  # of these, positions that did not before it
    flips: int | None  # positions whose most likely token changed since the step before; None in the first step
    mean_entropy: float  # over the canvas, of the scaled logits, in nats
    max_entropy: float
    start_ns: int
    end_ns: int  # when the step's decisions were on the host
    tokens: tuple[int, ...] = ()  # [C] the best canvas so far; empty in a compact record
    held: tuple[int, ...] = ()  # the accepted positions, ascending; empty in a compact record

    @property
    def step_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Canvas:
    """One finished canvas: C = `length` positions, of which `valid` lie up to EOS and `emitted` reach the user."""

    index: int
    position: int  # tokens returned before this canvas
    length: int
    cap: int  # steps it was allowed
    steps: int  # steps it used
    stop: str  # "stable", "accepted" or "cap"
    tokens: tuple[int, ...]  # [C]
    settled: tuple[int, ...]  # [C] the step (from 1) since which a position has held its final token
    eos: int | None  # position of the first EOS
    valid: int  # positions up to EOS, it included; C without one
    emitted: int  # of these, what the cap or a stop string left
    cut: str | None  # "eos", "stop", "cap" or None
    start_ns: int
    denoised_ns: int  # when the last step was decided
    end_ns: int  # when the canvas was handed over
    commit_ns: int | None  # the cache-writing pass; None where the request ended here and none ran

    @property
    def emitted_tokens(self) -> tuple[int, ...]:
        return self.tokens[: self.emitted]


@dataclass(frozen=True, slots=True)
class CanvasRequest:
    """One finished request: its records, the effective value of every setting, and its score where one was taken.

    `nll` is the summed negative log-likelihood (nats) of `scored` output tokens under the model `scorer`.
    """

    id: str
    corpus: str
    prefill: Prefill
    canvases: tuple[Canvas, ...]
    steps: tuple[DenoiseStep, ...]
    finish: str  # "eos", "stop" or "cap"
    settings: Mapping[str, Any] = field(default_factory=dict)
    nll: float | None = None
    scored: int = 0
    scorer: str | None = None
    schema: int = SCHEMA
    kind: str = KIND

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for c in self.canvases for t in c.emitted_tokens)

    def compact(self) -> CanvasRequest:
        """Without the per-step canvases: what a run stores (48 steps of 256 positions would be 12,000 numbers)."""
        return replace(self, steps=tuple(replace(s, tokens=(), held=()) for s in self.steps))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CanvasRequest:
        """Rebuild a request from `to_json`'s dict; a foreign schema number or kind is an error that names it."""
        if (data.get("schema"), data.get("kind")) != (SCHEMA, KIND):
            raise ValueError(
                f"this record is of kind {data.get('kind')!r}, schema {data.get('schema')!r}; "
                f"wanted {KIND!r}, schema {SCHEMA}"
            )
        canvases = tuple(
            Canvas(**{**c, "tokens": tuple(c["tokens"]), "settled": tuple(c["settled"])}) for c in data["canvases"]
        )
        steps = tuple(
            DenoiseStep(**{**s, "tokens": tuple(s["tokens"]), "held": tuple(s["held"])}) for s in data["steps"]
        )
        rest = {k: v for k, v in data.items() if k not in ("prefill", "canvases", "steps")}
        return cls(prefill=Prefill(**data["prefill"]), canvases=canvases, steps=steps, **rest)
