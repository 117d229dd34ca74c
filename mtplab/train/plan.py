"""What a head is trained on and how: one frozen record, written down before anything runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mtplab.errors import RequestError

SCHEMA = 1
PLAN = "plan.json"
# Only these may change when a run goes on: more rows, a longer training. Everything else decides what is learned.
PATIENCE = ("rows", "steps", "minutes")


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """`rows` sequences of `length` tokens are collected from the target, then the head is trained for `steps` or
    `minutes` (exactly one of them). Two runs with equal fields make the same head, bit for bit, if they count steps."""

    model: str
    corpora: tuple[str, ...] = ()  # no default: what ships with mtplab is for measuring, not for training
    rows: int = 1024
    length: int = 256  # tokens of a row
    prompt_tokens: int = 64  # of them given by the text; the rest is the target's own
    temp: float = 0.8  # of the sampled continuations
    gather: int = 48  # rows generated together, one file
    batch: int = 8  # rows of a training step
    depth: int = 3  # how deep the head is chained
    lr: float = 0.02
    ffn: int | None = None  # width of the head's MLP; None: the trunk's
    candidates: int = 1024  # random ids of the loss beside the likely ones; 0: the whole vocabulary
    seed: int = 0
    steps: int | None = None
    minutes: float | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        _check(self)

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HeadPlan:
        known = {f.name for f in fields(cls)}
        odd = sorted(set(data) - known)
        if odd:
            raise RequestError(f"the plan has the unknown key {odd[0]!r}; known keys: {', '.join(sorted(known))}")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})


def change(plan: HeadPlan, asked: Mapping[str, Any]) -> HeadPlan:
    """The plan with the given fields replaced (None: not asked for). Steps and minutes push each other out."""
    new = {k: v for k, v in asked.items() if v is not None}
    for key, other in (("steps", "minutes"), ("minutes", "steps")):
        if key in new and other not in new:
            new[other] = None
    return replace(plan, **new)


def differences(old: HeadPlan, new: HeadPlan) -> list[str]:
    """What keeps two plans from being one run, as `key: old -> new`."""
    a, b = old.to_json(), new.to_json()
    return [f"{k}: {a[k]} -> {b[k]}" for k in a if a[k] != b[k] and k not in PATIENCE]


def open_plan(folder: Path, asked: Mapping[str, Any]) -> HeadPlan:
    """The plan of a run to go on with; what was asked for may only lengthen it."""
    try:
        stored = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        old = HeadPlan.from_json(stored["plan"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{folder} holds no head training ({error}); start one without --resume") from None
    new = change(old, asked)
    changed = differences(old, new)
    if changed:
        raise RequestError(f"{folder} was begun with another plan ({'; '.join(changed)}); choose another --out")
    return new


LEAST = {"rows": 1, "length": 8, "prompt_tokens": 1, "gather": 1, "batch": 1, "depth": 1, "seed": 0, "candidates": 0}


def _check(plan: HeadPlan) -> None:
    for key, least in LEAST.items():
        if getattr(plan, key) < least:
            raise RequestError(f"--{key.replace('_', '-')} is {getattr(plan, key)} but must be at least {least}")
    if not plan.corpora:
        raise RequestError("no --corpus is named; give a text to begin from, other than those you will measure on")
    if plan.prompt_tokens >= plan.length:
        raise RequestError(
            f"--prompt-tokens {plan.prompt_tokens} leave nothing of --length {plan.length} to the model; lower it"
        )
    if plan.depth > 8 or plan.depth >= plan.length // 2:
        raise RequestError(f"--depth {plan.depth} is out of range; use 1 to {min(8, plan.length // 2 - 1)}")
    if (plan.steps is None) == (plan.minutes is None):
        raise RequestError("the training needs exactly one of --steps and --minutes")
    for key in ("steps", "minutes", "temp", "lr"):
        value = getattr(plan, key)
        if value is not None and not value > 0:
            raise RequestError(f"--{key} is {value} but must be above 0")
    if plan.ffn is not None and plan.ffn < 1:
        raise RequestError(f"--ffn is {plan.ffn} but must be at least 1")
