"""The settings of one request, validated once; their effective values go into every record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mtplab.errors import RequestError

MAX_DEPTH = 8
HISTORIES = ("verified", "drafted", "none")  # what an MTP head's cache keeps after a verify
DRAFTS = ("sampled", "point")
# The ways of verifying (see `decode.verify`) and what the logits of each are equal to.
VERIFY = {
    "batched": "ordinary one-token decoding where no operation cares for the number of rows (see mtplab probe)",
    "rowwise": "ordinary one-token decoding, bit for bit",
    "fixed": "every depth and the baseline at the same fixed width, bit for bit; not ordinary one-token decoding",
    "serial": "ordinary one-token decoding, bit for bit: every row runs alone",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Defaults are mlx-lm's where the flag exists there. temp 0 is greedy; top_p 0 and top_k 0 are off."""

    max_tokens: int = 256
    temp: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    prefill_step: int = 2048

    def __post_init__(self) -> None:
        checks = (
            ("seed", self.seed, self.seed >= 0, "use 0 or more"),
            ("max-tokens", self.max_tokens, self.max_tokens >= 1, "use 1 or more"),
            ("temp", self.temp, math.isfinite(self.temp) and self.temp >= 0, "use 0 (greedy) or more"),
            ("top-p", self.top_p, 0 <= self.top_p <= 1, "use 0 (off) to 1"),
            ("top-k", self.top_k, self.top_k >= 0, "use 0 (off) or more"),
            ("prefill-step-size", self.prefill_step, self.prefill_step >= 1, "use 1 or more"),
            ("stop", self.stop, all(self.stop), "leave out empty stop strings"),
        )
        for name, value, ok, way_out in checks:
            if not ok:
                raise RequestError(f"--{name} {value!r} is out of range; {way_out}")
        if self.temp == 0 and (self.top_p or self.top_k):
            raise RequestError("--top-p and --top-k need --temp above 0: greedy decoding ignores them")

    @property
    def greedy(self) -> bool:
        return self.temp == 0

    def effective(self) -> dict[str, Any]:
        return asdict(self) | {"stop": list(self.stop), "mode": "greedy" if self.greedy else "sampled"}


def check_history(history: str) -> str:
    """What an MTP head keeps, or a RequestError that lists the choices."""
    if history not in HISTORIES:
        raise RequestError(f"history {history!r} is not one of {', '.join(HISTORIES)}")
    return history


def check_drafts(drafts: str) -> str:
    """How drafts are taken under temperature, or a RequestError that lists the choices."""
    if drafts not in DRAFTS:
        raise RequestError(f"drafts {drafts!r} is not one of {', '.join(DRAFTS)}")
    return drafts


def check_drafting(asked: Mapping[str, Any], *, head: bool, assistant: bool = False, sampled: bool = True) -> None:
    """`asked`: history, prime and drafts as far as somebody asked for them. RequestError for a value that is none, and
    for an option that nothing would use: no arm with a `head`, or an `assistant` in its place, or greedy decoding."""
    checks = {"history": check_history, "drafts": check_drafts}
    for name, value in asked.items():
        checks.get(name, bool)(value)
        if not head:
            way_out = "add depth1 or adaptive, or leave it out"
            raise RequestError(f"{name} {value!r} is for an MTP head, and no arm that is to run has one; {way_out}")
        if assistant and name != "drafts":
            raise RequestError(f"{name} {value!r} is for an MTP head, and an assistant keeps no rows; leave it out")
        if name == "drafts" and not sampled:
            raise RequestError(f"{name} {value!r} is for a temperature above 0, and all is greedy; leave it out")


def check_verify(mode: str) -> str:
    """A way of verifying, or a RequestError that lists them."""
    if mode not in VERIFY:
        raise RequestError(f"verify {mode!r} is not one of {', '.join(VERIFY)}")
    return mode


def check_depth(depth: int) -> int:
    """A draft depth of 0..MAX_DEPTH, or a RequestError that says so."""
    if not 0 <= depth <= MAX_DEPTH:
        raise RequestError(f"depth {depth} is out of range; use 0 to {MAX_DEPTH}")
    return depth
