"""Arms: named, complete decoder configurations, and the session that runs one on a loaded model.

baseline      one token at a time (its own loop)
depth0        the speculative loop without drafts: the control
depth1..8     the model's MTP head, fixed depth
adaptive      the MTP head, depth 0..3 chosen by the cost model
ngram1..8     prompt lookup, fixed depth
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mtplab.backend.clock import Clock, MonotonicClock
from mtplab.decode.baseline import baseline
from mtplab.decode.drafters.mtp import MTPDrafter
from mtplab.decode.drafters.simple import NgramDrafter
from mtplab.decode.policy import AdaptiveDepth, DepthPolicy, FixedDepth
from mtplab.decode.selection import Draws
from mtplab.decode.settings import Settings, check_depth
from mtplab.decode.speculative import speculative
from mtplab.decode.stopping import Stops
from mtplab.errors import RequestError
from mtplab.models.loader import Loaded
from mtplab.records.types import Prefill, Request, Verify

ADAPTIVE_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Arm:
    """`drafter` is "none", "mtp" or "ngram"; `depth` is None where a policy chooses."""

    name: str
    drafter: str
    depth: int | None

    @property
    def needs_head(self) -> bool:
        return self.drafter == "mtp"


PATTERNS: tuple[tuple[str, Callable[[str, int], Arm]], ...] = (
    (r"baseline", lambda name, _: Arm(name, "none", None)),
    (r"depth(\d+)", lambda name, k: Arm(name, "mtp" if k else "none", check_depth(k))),
    (r"adaptive", lambda name, _: Arm(name, "mtp", None)),
    (r"ngram(\d+)", lambda name, k: Arm(name, "ngram", check_depth(k))),
)


def parse_arm(name: str) -> Arm:
    """An arm by name; an unknown one is a RequestError that lists the known."""
    for pattern, make in PATTERNS:
        match = re.fullmatch(pattern, name)
        if match:
            return make(name, int(match[1]) if match.groups() else 0)
    raise RequestError(f"unknown arm {name!r}; there is baseline, depth0..8, adaptive, ngram1..8")


class Session:
    """One loaded model under one arm. The adaptive policy's cost model lives as long as the session."""

    def __init__(
        self,
        loaded: Loaded,
        arm: Arm,
        *,
        clock: Clock | None = None,
        history: str = "verified",
        prime: bool = True,
        costs_ns: dict[int, float] | None = None,
    ):
        if arm.needs_head and loaded.head is None:
            raise RequestError(f"arm {arm.name} needs an MTP head and {loaded.folder.name} was loaded without one")
        self.loaded, self.arm, self.clock = loaded, arm, clock or MonotonicClock()
        self.history, self.prime = history, prime
        adaptive = arm.name == "adaptive"
        self.policy = AdaptiveDepth(ADAPTIVE_DEPTH, costs_ns) if adaptive else FixedDepth(arm.depth or 0)
        self.cache = None
        self.started_from: dict[str, Any] | None = None

    @property
    def effective(self) -> dict[str, Any]:
        """Every setting of the arm as it is used."""
        mtp = self.arm.drafter == "mtp"
        return {
            "arm": self.arm.name,
            "drafter": self.arm.drafter,
            "depth": self.arm.depth,
            "history": self.history if mtp else None,
            "prime": self.prime if mtp else None,
            "head": self.loaded.facts.get("head") if mtp else None,
        }

    def run(self, prompt: Sequence[int], *, request: int, settings: Settings) -> Iterator[Prefill | Verify]:
        """Decode one prompt from an empty cache. Too long a prompt is refused before anything runs."""
        room = self.loaded.context - len(prompt)
        if room < settings.max_tokens:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and {settings.max_tokens} more are asked for, but the model's "
                f"context is {self.loaded.context}; shorten the prompt or lower --max-tokens"
            )
        tokenizer, target = self.loaded.tokenizer, self.loaded.target
        stops = Stops(settings, tokenizer.eos_ids, tokenizer.decode)
        self.cache = target.new_cache()
        common = {"settings": settings, "stops": stops, "clock": self.clock, "request": request}
        if self.arm.name == "baseline":
            return baseline(target, self.cache, prompt, **common)
        return speculative(
            target, self.cache, prompt, drafter=self._drafter(settings, request), policy=self._policy(), **common
        )

    def _drafter(self, settings: Settings, request: int) -> Any:
        if self.arm.drafter == "mtp":
            draws = Draws(settings.seed, request)
            return MTPDrafter(self.loaded.head, settings, draws, history=self.history, prime=self.prime)
        return NgramDrafter() if self.arm.drafter == "ngram" else None

    def _policy(self) -> DepthPolicy:
        if isinstance(self.policy, AdaptiveDepth):
            self.policy.start_request()
            self.started_from = self.policy.state()
        return self.policy

    def request(
        self, prompt: Sequence[int], *, request: int, settings: Settings, id: str = "0", corpus: str = ""
    ) -> Request:
        """Run to the end and collect the records."""
        prefill, *passes = self.run(prompt, request=request, settings=settings)
        effective = settings.effective() | self.effective
        if self.started_from is not None:
            effective["policy"] = self.started_from
        finish = (passes[-1].cut if passes else prefill.cut) or "cap"
        return Request(id, corpus, prefill, tuple(passes), finish, effective)


def calibrate(loaded: Loaded, max_depth: int = 3, repeats: int = 15, rows: int = 192) -> dict[str, Any]:
    """What a pass costs here, measured on this model with a cache of about `rows` rows.

    Returns {"verify_ms": {M: ms}, "draft_ms": {k: ms}, "host_ms": ms}: the forward pass and verdict of M rows,
    k chained drafts, and the host's share of a pass, each the median of `repeats` interleaved repetitions.
    """
    bench = _Bench(loaded, rows, max_depth)
    widths, depths = range(1, max_depth + 2), range(1, max_depth + 1 if loaded.head is not None else 1)
    verify = {m: [] for m in widths}
    draft = {k: [] for k in depths}
    for _ in range(repeats + 2):
        for m in widths:
            verify[m].append(bench.verify(m))
        for k in depths:
            draft[k].append(bench.draft(k))
    verify_ms = {m: statistics.median(t[2:]) / 1e6 for m, t in verify.items()}
    draft_ms = {k: statistics.median(t[2:]) / 1e6 for k, t in draft.items()}
    return {"verify_ms": verify_ms, "draft_ms": draft_ms, "host_ms": 0.0, "rows": rows}


def costs_ns(costs: dict[str, Any], max_depth: int = ADAPTIVE_DEPTH) -> dict[int, float]:
    """Pass time per depth from `calibrate`'s result: the adaptive policy's start."""
    verify = {int(m): ms for m, ms in costs["verify_ms"].items()}
    draft = {0: 0.0} | {int(k): ms for k, ms in costs["draft_ms"].items()}
    return {d: (verify[d + 1] + draft[d] + (costs["host_ms"] if d else 0.0)) * 1e6 for d in range(max_depth + 1)}


class _Bench:
    """Fenced single measurements on a cache filled with `rows` rows of ordinary token ids."""

    def __init__(self, loaded: Loaded, rows: int, max_depth: int):
        self.target, self.clock = loaded.target, MonotonicClock()
        self.cache, self.settings = self.target.new_cache(), Settings()
        ids = mx.array([2 + 7 * i % 97 for i in range(rows)])
        out = self.target.forward(ids, self.cache)
        mx.eval(out.logits[-1:], out.hidden, self.cache.arrays())
        self.block, self.drafter = ids[: max_depth + 1], None
        if loaded.head is not None:
            self.drafter = MTPDrafter(loaded.head, self.settings, Draws(0, 0))
            mx.eval(self.drafter.prime(ids[1:], out.hidden[:-1]))
            self.hidden = out.hidden[-1:]

    def verify(self, m: int) -> int:
        began = self.clock.now_ns()
        with self.cache.attempt(m):
            out = self.target.forward(self.block[:m], self.cache)
            mx.eval(mx.argmax(out.logits, axis=-1), self.cache.arrays())
            took = self.clock.now_ns() - began
        return took

    def draft(self, k: int) -> int:
        began = self.clock.now_ns()
        self.drafter.observe([5], self.hidden, 0)
        mx.eval(self.drafter.draft(k, 0).tokens)
        return self.clock.now_ns() - began
