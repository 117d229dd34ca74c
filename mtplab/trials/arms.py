"""Arms: named, complete decoder configurations, and the session that runs one on a loaded model.

baseline      one token at a time (its own loop)
depth0        the speculative loop without drafts: the control
depth1..8     the model's MTP head, fixed depth
adaptive      the MTP head, depth 0..3 chosen by the cost model
ngram1..8     prompt lookup, fixed depth
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mtplab.backend import numerics
from mtplab.backend.clock import Clock, MonotonicClock
from mtplab.decode.baseline import baseline
from mtplab.decode.drafters.assistant import AssistantDrafter
from mtplab.decode.drafters.mtp import MTPDrafter
from mtplab.decode.drafters.simple import NgramDrafter
from mtplab.decode.policy import AdaptiveDepth, DepthPolicy, FixedDepth
from mtplab.decode.selection import Draws
from mtplab.decode.settings import Settings, check_depth, check_verify
from mtplab.decode.speculative import speculative
from mtplab.decode.stopping import Stops
from mtplab.decode.verify import Batched, Fixed, Rowwise, Serial
from mtplab.diagnose import probe
from mtplab.errors import RequestError
from mtplab.models.assistant import Assistant
from mtplab.models.loader import Loaded
from mtplab.records.types import Prefill, Request, Verify

ADAPTIVE_DEPTH = 3
CALIBRATION_ROOM = 512  # tokens that the passes of a calibration may generate before they start over


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
    (r"depth(0|[1-9]\d*)", lambda name, k: Arm(name, "mtp" if k else "none", check_depth(k))),
    (r"adaptive", lambda name, _: Arm(name, "mtp", None)),
    (r"ngram([1-9]\d*)", lambda name, k: Arm(name, "ngram", check_depth(k))),
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
        drafts: str = "sampled",
        costs_ns: dict[int, float] | None = None,
        verify: str = "batched",
        width: int | None = None,
    ):
        """`verify`: see `decode.verify`; `width`: rows of every pass of `fixed`, the same for all arms compared."""
        if arm.needs_head and loaded.head is None:
            raise RequestError(f"arm {arm.name} needs an MTP head and {loaded.folder.name} was loaded without one")
        self.loaded, self.arm, self.clock = loaded, arm, clock or MonotonicClock()
        self.history, self.prime, self.drafts = history, prime, drafts
        adaptive = arm.name == "adaptive"
        self.policy = AdaptiveDepth(ADAPTIVE_DEPTH, costs_ns) if adaptive else FixedDepth(arm.depth or 0)
        self.verifier = open_verifier(loaded, arm, verify, width)
        self.cache = None
        self.started_from: dict[str, Any] | None = None

    @property
    def effective(self) -> dict[str, Any]:
        """Every setting of the arm as it is used."""
        mtp = self.arm.drafter == "mtp"
        keeps = mtp and not isinstance(self.loaded.head, Assistant)  # an assistant has no rows of its own
        return {
            "arm": self.arm.name,
            "drafter": self.arm.drafter,
            "depth": self.arm.depth,
            "history": self.history if keeps else None,
            "prime": self.prime if keeps else None,
            "drafts": self.drafts if mtp else None,
            "head": self.loaded.facts.get("head") if mtp else None,
            "numerics": numerics.in_force(self.loaded.target) or None,
        } | self.verifier.effective()

    def settings(self, settings: Settings) -> dict[str, Any]:
        """The effective value of everything in a request. Greedy drafts are the head's first choice either way."""
        unused = {"drafts": None} if settings.greedy else {}
        return settings.effective() | self.effective | unused

    def knows_costs_of(self, other: Session) -> None:
        """Go on with what another session of this arm on this machine learned of the cost of a pass, and with nothing
        of what its texts accepted."""
        if isinstance(self.policy, AdaptiveDepth) and isinstance(other.policy, AdaptiveDepth):
            self.policy.costs = other.policy.costs

    def run(self, prompt: Sequence[int], *, request: int, settings: Settings) -> Iterator[Prefill | Verify]:
        """Decode one prompt from an empty cache. Too long a prompt is refused before anything runs."""
        room = self.loaded.context - len(prompt)
        if room < settings.max_tokens:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and {settings.max_tokens} more are asked for, but the model's "
                f"context is {self.loaded.context}; shorten the prompt or lower --max-tokens"
            )
        tokenizer, target = self.loaded.tokenizer, self.verifier
        stops = Stops(settings, tokenizer.eos_ids, tokenizer.decode)
        self.cache = target.new_cache(len(prompt) + settings.max_tokens)
        common = {"settings": settings, "stops": stops, "clock": self.clock, "request": request}
        if self.arm.name == "baseline":
            return baseline(target, self.cache, prompt, **common)
        return speculative(
            target, self.cache, prompt, drafter=self._drafter(settings, request), policy=self._policy(), **common
        )

    def _drafter(self, settings: Settings, request: int) -> Any:
        if self.arm.drafter == "mtp":
            draws = Draws(settings.seed, request)
            if isinstance(self.loaded.head, Assistant):
                return AssistantDrafter(self.loaded.head, self.cache, settings, draws, drafts=self.drafts)
            return MTPDrafter(
                self.loaded.head, settings, draws, history=self.history, prime=self.prime, drafts=self.drafts
            )
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
        effective = self.settings(settings)
        if self.started_from is not None:
            effective["policy"] = self.started_from
        finish = (passes[-1].cut if passes else prefill.cut) or "cap"
        return Request(id, corpus, prefill, tuple(passes), finish, effective)


def fixed_width(arms: Sequence[Arm]) -> int:
    """Rows of every pass where these arms are to be compared under `--verify fixed`."""
    return 1 + max([ADAPTIVE_DEPTH, *(arm.depth or 0 for arm in arms)])


def open_verifier(loaded: Loaded, arm: Arm, mode: str, width: int | None = None) -> Batched:
    """The way of verifying that this arm uses, opened once per model, width and numerics in force.

    An arm without drafts never verifies a block: it decodes as it is, but for `fixed`, which changes every pass.
    """
    check_verify(mode)
    rows = 1 + (ADAPTIVE_DEPTH if arm.name == "adaptive" else arm.depth or 0)
    if mode == "fixed":
        rows = max(fixed_width([arm]), width or 0)
    key = (mode, rows, *numerics.in_force(loaded.target))
    if key not in loaded.verifiers:
        loaded.verifiers[key] = _open(loaded, mode, rows)
    return loaded.verifiers[key]


def _open(loaded: Loaded, mode: str, rows: int) -> Batched:
    if mode == "rowwise" and rows == 1:
        return Rowwise(loaded.target, (), "this arm verifies no block")
    if mode == "rowwise":
        return probe.rowwise(loaded.target, rows, context=loaded.context)
    return (
        {"batched": Batched, "serial": Serial}[mode](loaded.target) if mode != "fixed" else Fixed(loaded.target, rows)
    )


def calibrate(
    loaded: Loaded,
    max_depth: int = 3,
    repeats: int = 15,
    rows: int = 192,
    *,
    verify: str = "batched",
    width: int | None = None,
) -> dict[str, Any]:
    """What a pass costs here, measured on this model with a cache of about `rows` rows.

    Returns {"verify_ms": {M: ms}, "draft_ms": {k: ms}, "host_ms": ms, ...}, medians of `repeats` turns that everything
    takes one after the other. A real pass with k drafts takes draft_ms[k] + verify_ms[k + 1] + host_ms, by definition:

    verify_ms[1]  one step of the baseline as it runs, the next one launched before this one is read
    verify_ms[M]  forward pass and argmax of M rows, fenced
    host_ms       what a pass with one draft takes beyond its fenced draft and verify: the verdict, the transaction and
                  the records, less what one fence instead of two saves. The baseline's own is in verify_ms[1].
    draft_ms[k]   what k drafts add to a pass in place: the rest. (`fenced` has them, and the one-row pass, in the
                  manner of the other widths; `pass_ms[k]` are the real passes, 0 the baseline's.)
    """
    rows = max(1, min(rows, loaded.context - min(CALIBRATION_ROOM, loaded.context // 2)))
    bench, depths = (
        _Bench(loaded, rows, max_depth, verify, width),
        range(1, max_depth + 1 if loaded.head is not None else 1),
    )
    turns = [bench.turn(depths, max_depth) for _ in range(repeats + 2)][2:]
    verify, drafts, passes = (_medians_ms(turns, kind) for kind in ("verify", "draft", "pass"))
    fenced = {"verify_ms": verify[1], "draft_ms": drafts}
    host = passes[1] - drafts[1] - verify[2] if depths else 0.0
    draft = {k: passes[k] - verify[k + 1] - host for k in depths}
    costs = {"verify_ms": verify | {1: passes[0]}, "draft_ms": draft, "host_ms": host}
    return costs | {"rows": rows, "fenced": fenced, "pass_ms": passes}


def _medians_ms(turns: Sequence[dict[tuple[str, int], int]], kind: str) -> dict[int, float]:
    """size -> median over the turns, in milliseconds, of one kind of measurement."""
    sizes = [size for what, size in turns[0] if what == kind]
    return {size: statistics.median(t[kind, size] for t in turns) / 1e6 for size in sizes}


def costs_ns(costs: dict[str, Any], max_depth: int = ADAPTIVE_DEPTH) -> dict[int, float]:
    """Pass time per measured depth from `calibrate`'s result: the adaptive policy's start. Without a head: depth 0."""
    verify = {int(m): ms for m, ms in costs["verify_ms"].items()}
    draft = {0: 0.0} | {int(k): ms for k, ms in costs["draft_ms"].items()}
    return {
        d: (verify[d + 1] + draft[d] + (costs["host_ms"] if d else 0.0)) * 1e6
        for d in range(max_depth + 1)
        if d in draft and d + 1 in verify
    }


class _Bench:
    """One measurement at a time on a cache filled with `rows` rows of ordinary token ids."""

    def __init__(self, loaded: Loaded, rows: int, max_depth: int, verify: str, width: int | None):
        deepest = Arm(f"ngram{max_depth}", "ngram", max_depth)
        self.target, self.clock = open_verifier(loaded, deepest, verify, width), MonotonicClock()
        self.cache, self.settings = self.target.new_cache(max(rows, max_depth + 1)), Settings()
        prompt = [7 * i % min(97, self.target.vocab or 97) for i in range(max(rows, max_depth + 1))]
        ids = mx.array(prompt)
        out = self.target.forward(ids[:rows], self.cache)
        mx.eval(out.logits[-1:], out.hidden, self.cache.arrays())
        self.block, self.drafter = ids[: max_depth + 1], None
        self.arms = {0: _Passes(loaded, "baseline", prompt[:rows], verify, width)}
        if loaded.head is not None:
            self.drafter = (
                AssistantDrafter(loaded.head, self.cache, self.settings, Draws(0, 0))
                if isinstance(loaded.head, Assistant)
                else MTPDrafter(loaded.head, self.settings, Draws(0, 0))
            )
            if rows > 1:
                mx.eval(self.drafter.prime(ids[1:rows], out.hidden[:-1]))
            self.hidden = out.hidden[-1:]
            depths = range(1, max_depth + 1)
            self.arms |= {k: _Passes(loaded, f"depth{k}", prompt[:rows], verify, width) for k in depths}

    def turn(self, depths: Sequence[int], max_depth: int) -> dict[tuple[str, int], int]:
        """Everything once, in nanoseconds, by (what, size)."""
        out = {("verify", m): self.verify(m) for m in range(1, max_depth + 2)}
        out |= {("draft", k): self.draft(k) for k in depths}
        return out | {("pass", k): self.arms[k].next_ns() for k in (0, *depths)}

    def verify(self, m: int) -> int:
        began = self.clock.now_ns()
        with self.cache.attempt(m):
            out = self.target.forward(self.block[:m], self.cache)
            mx.eval(mx.argmax(out.logits, axis=-1), self.cache.arrays())
            took = self.clock.now_ns() - began
        return took

    def draft(self, k: int) -> int:
        began = self.clock.now_ns()
        self.drafter.observe([0], self.hidden, 0)
        mx.eval(self.drafter.draft(k, 0).tokens)
        return self.clock.now_ns() - began


class _Passes:
    """The real passes of an arm, a few at a time, so that arms can take turns."""

    def __init__(self, loaded: Loaded, name: str, prompt: list[int], verify: str, width: int | None):
        self.session, self.prompt = Session(loaded, parse_arm(name), verify=verify, width=width), prompt
        self.settings = Settings(max_tokens=min(CALIBRATION_ROOM, loaded.context - len(prompt)), ignore_eos=True)
        self.records: Iterator[Prefill | Verify] = iter(())

    def next_ns(self, count: int = 3) -> int:
        """Median time of `count` passes. The one before them, which finds its step finished or none under way, does
        not count. A request that has ended is started again."""
        times = self._take(count + 1)
        if len(times) < 2:
            self.records = self.session.run(self.prompt, request=0, settings=self.settings)
            times = self._take(count + 1)
        mx.synchronize()  # the step that is under way must not run into the next measurement
        return int(statistics.median(times[1:] or times))

    def _take(self, count: int) -> list[int]:
        passes = (r.pass_ns for r in self.records if isinstance(r, Verify))
        return list(itertools.islice(passes, count))
