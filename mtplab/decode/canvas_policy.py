"""How a canvas is denoised: schedule, proposal, acceptance, renoising, stop, finalisation.

Each is a small pure function of small arrays ([C], numpy, on the host) with its random numbers passed in; the work
over the vocabulary is done before (`mtplab.kernels.canvas_rows`). `CanvasPolicy` names one choice of each, and
`resolve` says where every value came from: the request, the checkpoint's own files, or the published reference.

Two kinds of acceptance: a *revocable* one (entropy bound) is decided anew in every step, so a token may be taken back;
a *monotone* one (confidence threshold, fixed count) fills every position exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from mtplab.errors import RequestError

SCHEDULES = ("linear", "constant")
PROPOSALS = ("sampled", "argmax")
ACCEPTS = ("entropy", "confidence", "count")
RENOISES = ("uniform", "mask", "none")
STOPS = ("stable", "accepted", "none")
FINALISES = ("argmax", "kept")
TEMPERATURES = (1e-30, 1e30)  # logits divided by less, or by more, are no float32 numbers or all alike


@dataclass(frozen=True, slots=True)
class CanvasPolicy:
    """Defaults are those of the published DiffusionGemma generation; `bound` and `confidence` are in nats."""

    steps: int = 48  # at most
    canvas: int = 256  # positions
    schedule: str = "linear"
    t_max: float = 0.8  # of the first step (and of every step where the schedule is constant)
    t_min: float = 0.4  # where the linear schedule would arrive after the last step
    proposal: str = "sampled"
    accept: str = "entropy"
    bound: float = 0.1  # entropy: the most that the accepted positions may tell about each other
    threshold: float = 0.9  # confidence: probability of the proposed token
    count: int | None = None  # count: positions a step; None shares the canvas out over the steps
    renoise: str = "uniform"  # what stands in positions that are not accepted
    stop: str = "stable"
    stability: int = 1  # stable: so many more steps with the same most likely tokens
    confidence: float = 0.005  # stable: and the mean entropy below this
    finalise: str = "argmax"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def monotone(self) -> bool:
        return self.accept != "entropy"

    def effective(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def idle(self) -> frozenset[str]:
        """Fields that decide nothing beside the others."""
        used = {THRESHOLDS[self.accept], *(("stability", "confidence") if self.stop == "stable" else ())}
        used |= {"t_min"} if self.schedule == "linear" else set()
        return frozenset({"bound", "threshold", "count", "stability", "confidence", "t_min"} - used)


# A sampler is a name for a set of choices; `name:number` also sets its threshold.
SAMPLERS: dict[str, dict[str, Any]] = {
    "entropy": {"accept": "entropy", "proposal": "sampled", "stop": "stable", "finalise": "argmax"},
    "argmax": {"accept": "entropy", "proposal": "argmax", "stop": "stable", "finalise": "argmax"},
    "confidence": {"accept": "confidence", "proposal": "sampled", "stop": "accepted", "finalise": "kept"},
    "count": {"accept": "count", "proposal": "argmax", "stop": "accepted", "finalise": "kept"},
}
THRESHOLDS = {"entropy": "bound", "argmax": "bound", "confidence": "threshold", "count": "count"}


def sampler(name: str) -> dict[str, Any]:
    """The settings of a sampler by name: `entropy`, `confidence:0.95`, `count:4`. RequestError for another."""
    kind, colon, text = name.partition(":")
    if kind not in SAMPLERS:
        raise RequestError(f"unknown sampler {name!r}; there is {', '.join(SAMPLERS)}, also with a number: entropy:0.2")
    settings = dict(SAMPLERS[kind])
    if colon:
        try:
            settings[THRESHOLDS[kind]] = int(text) if kind == "count" else float(text)
        except ValueError:
            wanted = "a whole number" if kind == "count" else "a number"
            raise RequestError(f"sampler {name!r}: {text!r} is not {wanted}") from None
    return settings


# A denoiser's defaults (`Denoiser.defaults`) -> the policy's fields.
KEYS = {
    "steps": "steps", "canvas": "canvas", "t_max": "t_max", "t_min": "t_min", "entropy_bound": "bound",
    "stability_threshold": "stability", "confidence_threshold": "confidence",
}  # fmt: skip
# What is known of the masked kind (LLaDA 2): greedy proposals, their probability at temperature 1.
MASKED = {"renoise": "mask", "proposal": "argmax", "schedule": "constant", "t_max": 1.0}


def resolve(
    asked: Mapping[str, Any], defaults: Mapping[str, Any], sources: Mapping[str, str], *, canvas: int, masked: bool
) -> tuple[CanvasPolicy, dict[str, str]]:
    """(policy, field -> where its value came from: "request", "checkpoint: FILE: KEY" or "reference").

    `asked`: fields of CanvasPolicy, None where nothing was asked for, and `sampler`. `defaults` and `sources`: what the
    checkpoint says and where. `canvas`: the denoiser's longest; `masked`: whether it starts from a mask token.
    Raises RequestError for what the denoiser cannot honour.
    """
    chosen = {k: v for k, v in asked.items() if v is not None and k != "sampler"}
    if "sampler_class" in defaults and not asked.get("sampler"):
        raise RequestError(
            f"the checkpoint wants the sampler {defaults['sampler_class']} ({sources.get('sampler_class')}), which "
            f"mtplab does not know; choose one with --sampler: {', '.join(SAMPLERS)}"
        )
    named = sampler(asked.get("sampler") or ("confidence" if masked else "entropy"))
    checkpoint = {KEYS[k]: k for k, v in defaults.items() if k in KEYS and v is not None}
    # A number after the sampler's name was asked for; the rest of what the name stands for is its default.
    number = {k: v for k, v in named.items() if k in THRESHOLDS.values()}
    stored = {f: defaults[k] for f, k in checkpoint.items()}
    values = named | (MASKED if masked else {}) | stored | number | chosen
    values.setdefault("canvas", canvas)
    if values.get("schedule") == "constant" and "t_min" not in chosen:
        values["t_min"] = values.get("t_max", CanvasPolicy().t_max)
    if "t_max" in chosen and "t_min" not in chosen:
        low = values.get("t_min", CanvasPolicy().t_min)
        if TEMPERATURES[0] <= chosen["t_max"] < low:
            whose = sources.get("t_min", "the checkpoint") if "t_min" in checkpoint else "the reference"
            raise RequestError(f"--t-max {chosen['t_max']} is below t_min {low} (of {whose}); give --t-min, too")
    policy = CanvasPolicy(**values)
    asked_for = set(chosen) | (set(named) if asked.get("sampler") else set())
    origin = {f: f"checkpoint: {sources.get(k, k)}" for f, k in checkpoint.items()} | dict.fromkeys(
        asked_for, "request"
    )
    if policy.schedule == "constant" and "t_min" not in chosen:
        origin["t_min"] = origin.get("t_max", "reference")
    if masked:
        # What the sampler's name stands for gives way to what a masked model needs.
        origin |= dict.fromkeys((k for k in named if k in MASKED and k not in chosen), "reference")
    _honour(policy, canvas, masked, set(chosen), asked.get("sampler"))
    return policy, {f.name: origin.get(f.name, "reference") for f in fields(policy)}


def _honour(policy: CanvasPolicy, canvas: int, masked: bool, chosen: set[str], sampler: str | None) -> None:
    """What this denoiser, or this combination, would silently ignore."""
    if policy.canvas > canvas:
        raise RequestError(f"--canvas {policy.canvas} is above this model's {canvas}; use 1 to {canvas}")
    if policy.renoise == "mask" and not masked:
        raise RequestError("--renoise mask needs a denoiser with a mask token, and this one starts from random tokens")
    if masked and policy.renoise == "uniform":
        raise RequestError("--renoise uniform is not for a masked denoiser, which knows noise only as its mask token")
    if masked and not policy.monotone:
        raise RequestError(
            f"a masked denoiser fills every position once; --sampler {sampler or policy.accept} takes tokens back; "
            "use confidence or count"
        )
    name = (sampler or "").partition(":")[0]
    if name in ("entropy", "argmax") and "proposal" in chosen and policy.proposal != SAMPLERS[name]["proposal"]:
        raise RequestError(f"--proposal {policy.proposal} is not what --sampler {name} means; drop one of them")
    for key, accept in (("bound", "entropy"), ("threshold", "confidence"), ("count", "count")):
        if key in chosen and policy.accept != accept:
            raise RequestError(f"{key} is for the {accept} acceptance and this sampler's is {policy.accept}; drop it")
    for key in ("stability", "confidence"):
        if key in chosen and policy.stop != "stable":
            raise RequestError(f"{key} is for --stop stable and the stop here is {policy.stop}; drop one of them")


def _check(p: CanvasPolicy) -> None:
    for key, known in (
        ("schedule", SCHEDULES), ("proposal", PROPOSALS), ("accept", ACCEPTS), ("renoise", RENOISES),
        ("stop", STOPS), ("finalise", FINALISES),
    ):  # fmt: skip
        if getattr(p, key) not in known:
            raise RequestError(f"--{key} {getattr(p, key)!r} is not one of {', '.join(known)}")
    checks = (
        ("steps", p.steps >= 1, "use 1 or more"),
        ("canvas", p.canvas >= 1, "use 1 or more"),
        ("t-max", TEMPERATURES[0] <= p.t_max <= TEMPERATURES[1], "use a temperature above 0 that suits float32"),
        # The last step is still above t_min.
        ("t-min", p.t_min == 0 or TEMPERATURES[0] <= p.t_min <= p.t_max, f"use 0, or a temperature up to {p.t_max}"),
        ("bound", math.isfinite(p.bound) and p.bound >= 0, "use 0 or more"),
        ("threshold", 0 < p.threshold <= 1, "use a probability above 0, up to 1"),
        ("count", p.count is None or p.count >= 1, "use 1 or more"),
        ("stability", p.stability >= 0, "use 0 or more"),
        ("confidence", math.isfinite(p.confidence) and p.confidence > 0, "use an entropy above 0"),
    )  # fmt: skip
    for key, ok, way_out in checks:
        if not ok:
            raise RequestError(f"--{key} {getattr(p, key.replace('-', '_'))!r} is out of range; {way_out}")
    if p.schedule == "constant" and p.t_min != p.t_max:
        raise RequestError(f"a constant schedule has one temperature, not {p.t_min} to {p.t_max}; give --t-max alone")


# The functions ---------------------------------------------------------------------------------------------------


def temperature(policy: CanvasPolicy, step: int) -> float:
    """Of step 0, 1, ...: t_min + (t_max - t_min) * n / N with n = N for the first step and 1 for the last."""
    if policy.schedule == "constant":
        return policy.t_max
    # In float32, operation by operation as the reference does it.
    share_left = np.float32((policy.steps - step) / policy.steps)
    return float(np.float32(policy.t_min) + np.float32(policy.t_max - policy.t_min) * share_left)


def entropy_bound(entropy: np.ndarray, bound: float) -> np.ndarray:
    """Positions in ascending order of entropy while cumsum - cummax <= bound (Ben-Hamu 2025): bool [C].

    cumsum - cummax bounds what the accepted positions tell about each other, in nats. The surest position always
    passes. Revocable: nothing is remembered.
    """
    order = np.argsort(entropy, kind="stable")
    ranked = entropy[order].astype(np.float32)
    mask = np.zeros(entropy.shape, dtype=bool)
    mask[order] = np.cumsum(ranked, dtype=np.float32) - ranked <= bound
    return mask


def confident(confidence: np.ndarray, held: np.ndarray, threshold: float) -> np.ndarray:
    """Open positions whose proposal has at least this probability, or the surest one: the new ones, bool [C]."""
    new = ~held & (confidence >= threshold)
    return new if new.any() else surest(confidence, held, 1)


def surest(confidence: np.ndarray, held: np.ndarray, count: int) -> np.ndarray:
    """The `count` open positions of the highest probability (the first of equals): the new ones, bool [C]."""
    order = np.argsort(np.where(held, np.inf, -confidence), kind="stable")
    new = np.zeros(held.shape, dtype=bool)
    new[order[: min(count, int((~held).sum()))]] = True
    return new


def share(open_positions: int, steps_left: int) -> int:
    """How many of the open positions the next of so many steps takes: every position once, none left at the end."""
    return -(-open_positions // max(1, steps_left))


def accepted(
    policy: CanvasPolicy, step: int, entropy: np.ndarray, confidence: np.ndarray | None, held: np.ndarray
) -> np.ndarray:
    """The positions whose proposal is taken in this step: bool [C]. A monotone policy takes all open ones at last."""
    if policy.accept == "entropy":
        return entropy_bound(entropy, policy.bound)
    if step + 1 >= policy.steps:
        return ~held
    if policy.accept == "confidence":
        return confident(confidence, held, policy.threshold)
    return surest(confidence, held, policy.count or share(int((~held).sum()), policy.steps - step))


def forced(policy: CanvasPolicy, confidence: np.ndarray | None, held: np.ndarray) -> bool:
    """Whether the last step took open positions (not `held` before it) only because it was the last."""
    if policy.accept == "confidence":
        return bool((confidence[~held] < policy.threshold).any())
    return policy.accept == "count" and policy.count is not None and int((~held).sum()) > policy.count


def renoised(canvas: np.ndarray, held: np.ndarray, noise: np.ndarray | int | None) -> np.ndarray:
    """The next canvas: accepted positions stay, the others become noise ([C] ids or the mask id; None: as they are)."""
    return canvas if noise is None else np.where(held, canvas, noise).astype(canvas.dtype)


def stopped(policy: CanvasPolicy, unchanged: int, mean_entropy: float, held: np.ndarray) -> str | None:
    """Why the canvas is finished after this step, or None. `unchanged`: equal argmax canvases in a row before it.

    A stability of k needs k + 1 identical canvases.
    """
    if policy.stop == "stable" and unchanged >= policy.stability and mean_entropy < policy.confidence:
        return "stable"
    # Nothing in a full monotone canvas changes any more, which is as stable as it gets. `none` runs every step.
    if held.all() and (policy.stop == "accepted" or (policy.stop == "stable" and policy.monotone)):
        return "accepted"
    return None


def final(policy: CanvasPolicy, argmax: np.ndarray, canvas: np.ndarray, held: np.ndarray) -> np.ndarray:
    """The tokens to commit: the last step's most likely ones everywhere, or the accepted ones where there are any."""
    return argmax if policy.finalise == "argmax" else np.where(held, canvas, argmax)
