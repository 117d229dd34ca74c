"""A `denoise` plan: steps x samplers x canvas lengths x prompts x seeds, written down before anything runs.

One trial is one arm (steps, sampler, canvas length) on all prompts with one seed, in one fresh process. A round is a
seed: within a round every arm starts from the same canvases.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from mtplab.decode.canvas_policy import CanvasPolicy, sampler
from mtplab.errors import RequestError
from mtplab.trials.plan import typed

PATIENCE = ("trial_timeout_s", "repeat_disturbed")
# Fields of the policy that hold for every arm; None leaves them to the checkpoint, then to the reference.
POLICY = ("schedule", "t_max", "t_min", "proposal", "renoise", "stop", "stability", "confidence", "finalise")


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm. `canvas` None is the model's own length."""

    name: str
    steps: int
    sampler: str | None
    canvas: int | None


@dataclass(frozen=True, slots=True)
class DenoisePlan:
    """Everything that decides what a run measures; two runs with the same `digest` may be joined by a resume."""

    kind: ClassVar[str] = "denoise"

    model: str = "lab-canvas"
    corpora: tuple[str, ...] = ("novel", "c")
    steps: tuple[int, ...] = (4, 8, 16, 32, 48)
    samplers: tuple[str, ...] = ()  # none: the model's own kind; "entropy:0.2" also sets the threshold
    canvases: tuple[int, ...] = ()  # none: the model's own length
    seeds: int = 2
    seed: int = 0  # the first of them
    prompts: int = 8  # per corpus
    prompt_tokens: int = 64
    max_tokens: int | None = None  # none: the checkpoint's, else 64
    ignore_eos: bool = False
    prefill_step_size: int = 2048
    scorer: str = "encoder"  # or an autoregressive checkpoint
    dtype: str | None = None
    schedule: str | None = None
    t_max: float | None = None
    t_min: float | None = None
    proposal: str | None = None
    renoise: str | None = None
    stop: str | None = None
    stability: int | None = None
    confidence: float | None = None
    finalise: str | None = None
    trial_timeout_s: float = 3600.0
    repeat_disturbed: bool = True

    def __post_init__(self) -> None:
        _check(self)

    @property
    def cells(self) -> dict[str, Cell]:
        """Arm name -> arm. The name is part of a file name."""
        out = {}
        for kind in self.samplers or (None,):
            for length in self.canvases or (None,):
                for steps in self.steps:
                    parts = [f"steps{steps}", *([kind.replace(":", "_")] if kind else [])]
                    name = "-".join([*parts, *([f"canvas{length}"] if length else [])])
                    out[name] = Cell(name, steps, kind, length)
        return out

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(self.cells)

    @property
    def rounds(self) -> int:
        return self.seeds

    def asked(self, arm: str) -> dict[str, Any]:
        """What an arm asks of `resolve`."""
        cell = self.cells[arm]
        policy = {k: getattr(self, k) for k in POLICY}
        return policy | {"steps": cell.steps, "sampler": cell.sampler, "canvas": cell.canvas}

    @property
    def digest(self) -> str:
        data = {k: v for k, v in self.to_json().items() if k not in PATIENCE}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, where: str = "the plan") -> DenoisePlan:
        """A plan from a dict; an unknown key or a value of the wrong type is an error that names it."""
        return cls(**{k: typed(k, v, where, cls) for k, v in data.items()})


def change(plan: DenoisePlan, changes: Mapping[str, Any]) -> DenoisePlan:
    """The plan with the given fields replaced; None means "not asked for" and changes nothing."""
    asked = {k: typed(k, v, "the request", DenoisePlan) for k, v in changes.items() if v is not None}
    return replace(plan, **asked)


LEAST = {"seeds": 1, "seed": 0, "prompts": 1, "prompt_tokens": 1, "max_tokens": 1, "prefill_step_size": 1}


def _check(plan: DenoisePlan) -> None:
    for key, least in LEAST.items():
        value = getattr(plan, key)
        if value is not None and value < least:
            raise RequestError(f"{key} is {value} but must be at least {least}")
    for key in ("corpora", "steps"):
        if not getattr(plan, key):
            raise RequestError(f"{key} is empty; name at least one")
    for key in ("corpora", "steps", "samplers", "canvases"):
        values = getattr(plan, key)
        for value in values:
            if values.count(value) > 1:
                raise RequestError(f"{key} names {value!r} twice; name each once")
    for kind in plan.samplers:
        sampler(kind)
    if not plan.trial_timeout_s > 0:
        raise RequestError(f"trial_timeout_s is {plan.trial_timeout_s} but must be above 0")
    # Values that no denoiser could honour are found before one is loaded.
    for arm in plan.arms:
        asked = {k: v for k, v in plan.asked(arm).items() if v is not None and k != "sampler"}
        if asked.get("schedule") == "constant":
            asked.setdefault("t_min", asked.get("t_max", CanvasPolicy().t_max))
        elif "t_min" in asked and "t_max" not in asked:
            asked["t_max"] = max(asked["t_min"], CanvasPolicy().t_max)
        elif "t_max" in asked and "t_min" not in asked:
            asked["t_min"] = min(asked["t_max"], CanvasPolicy().t_min)
        CanvasPolicy(**asked | _named(plan.cells[arm].sampler))


def _named(name: str | None) -> dict[str, Any]:
    return sampler(name) if name else {}
