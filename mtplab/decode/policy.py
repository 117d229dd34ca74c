"""How deep to draft: fixed, replayed, or adaptive 0..K from a cost model.

A policy sees records only (counts and pass times), never a clock of its own: feed the same records again and it
takes the same decisions. `next_depth` is called once per pass, in order; after a pass of depth 0 was chosen it is
called for the following pass before that one was observed.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mtplab.decode.settings import check_depth
from mtplab.errors import RequestError
from mtplab.records.types import Verify


class DepthPolicy(Protocol):
    def next_depth(self) -> int:
        """Drafts wanted in the next pass."""

    def observe(self, record: Verify) -> None:
        """What the pass brought and cost."""


class FixedDepth:
    """Always k."""

    def __init__(self, depth: int):
        self.depth = check_depth(depth)

    def next_depth(self) -> int:
        return self.depth

    def observe(self, record: Verify) -> None:
        pass


class ReplayDepth:
    """The depths of a logged run, in order; 0 after its end."""

    def __init__(self, depths: Sequence[int]):
        self.depths, self.at = list(depths), 0

    def next_depth(self) -> int:
        self.at += 1
        return self.depths[self.at - 1] if self.at <= len(self.depths) else 0

    def observe(self, record: Verify) -> None:
        pass


class PassCosts:
    """How much longer a pass of one depth takes than one of another: T(d), up to a factor common to all depths.

    A machine that slows down slows every depth, so a time is only ever compared with those right before it: where the
    depth changes, the passes after the change against those before it give one look at log T(new) / T(old). Looks are
    weighed against the prior as a Kalman filter does (Kalman 1960, no dynamics): the prior is taken to be right
    within `PRIOR_SD`, a look within `LOOK_SD`. A look further off than `SURPRISE`
    may be a machine that changed its speed at that moment and counts as one that far off; a second one in the same
    sense says that the prior is wrong, and it is given up.
    """

    PRIOR_SD, LOOK_SD, SURPRISE = 0.07, 0.15, 0.3  # of log T
    LOOK, LOOK_0 = 3, 6  # passes; steps of depth 0 overlap, so that only the mean of a run says what one takes

    def __init__(self, prior_ns: Mapping[int, float]):
        self.prior_ns = {d: float(ns) for d, ns in prior_ns.items()}
        self.log = {d: math.log(max(ns, 1e-9)) for d, ns in self.prior_ns.items()}
        self.variance = dict.fromkeys(self.log, self.PRIOR_SD**2)
        self.looks = dict.fromkeys(self.log, 0)
        self.surprise = dict.fromkeys(self.log, 0.0)
        self.depth, self.run, self.before = -1, [], None

    def __getitem__(self, depth: int) -> float:
        return math.exp(self.log[depth])

    def visits_wanted(self, depth: int) -> int:
        """How often a depth must have been looked at: once, and again if that contradicts the prior."""
        return 1 if not self.looks[depth] else 2 if self.surprise[depth] else 0

    def observe(self, depth: int, ns: int) -> None:
        if depth != self.depth:
            self._compare()
            self.before = (self.depth, self._typical(self.run)) if self.run else None
            self.depth, self.run = depth, []
        self.run.append(max(ns, 1))
        if len(self.run) == (self.LOOK if depth else self.LOOK_0):
            self._compare()
        del self.run[: -2 * self.LOOK_0]

    def _typical(self, run: Sequence[int]) -> float:
        last = run[-self.LOOK_0 :]
        return math.log(statistics.median(last) if self.depth else statistics.fmean(last))

    def _compare(self) -> None:
        if self.before is None or not self.run:
            return
        (old, then), new = self.before, self.depth
        self.before = None
        off = self._typical(self.run) - then - (self.log[new] - self.log[old])
        believed = [self._believe(d, sign * off) for d, sign in ((new, 1.0), (old, -1.0))]
        if not any(believed):
            off = max(-self.SURPRISE, min(self.SURPRISE, off))
        noise = self.LOOK_SD**2 * self.LOOK / min(len(self.run), self.LOOK)
        total = self.variance[new] + self.variance[old] + noise
        for d, sign in ((new, 1.0), (old, -1.0)):
            gain = self.variance[d] / total
            self.log[d] += sign * gain * off
            self.variance[d] *= 1 - gain

    def _believe(self, depth: int, off: float) -> bool:
        """Is a look that contradicts what is known the second in the same sense?"""
        self.looks[depth] += 1
        if abs(off) < self.SURPRISE:
            self.surprise[depth] = 0.0
            return False
        confirmed = self.surprise[depth] * off > 0
        if confirmed:
            self.variance[depth] = max(self.variance[depth], off * off)
        self.surprise[depth] = off
        return confirmed

    def state(self) -> dict[str, Any]:
        by_depth = {name: {str(d): x for d, x in getattr(self, name).items()} for name in self._BY_DEPTH}
        return by_depth | {"depth": self.depth, "run": list(self.run), "before": self.before}

    _BY_DEPTH = ("prior_ns", "log", "variance", "looks", "surprise")

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PassCosts:
        costs = cls({int(d): ns for d, ns in state["prior_ns"].items()})
        for name in cls._BY_DEPTH:
            setattr(costs, name, {int(d): x for d, x in state[name].items()})
        costs.depth, costs.run = state["depth"], list(state["run"])
        costs.before = None if state["before"] is None else tuple(state["before"])
        return costs


class AdaptiveDepth:
    """Maximize expected tokens per nanosecond.

    With c_i the probability that draft i stands given that those before it stood, depth d commits
    E(d) = 1 + sum over i <= d of c_1 ... c_i tokens per pass and costs T(d) (`PassCosts`). The policy takes the d with
    the largest E(d)/T(d), and leaves its present depth only for a gain above `HYSTERESIS`. c_i are exponentially
    forgotten counts, which begin with a little of what the text before brought. What they do not tell is taken from
    the draft before, c_(i-1), and hoped for: only drafting brings evidence, and a text may be over before a probe. A
    depth that is not being tried teaches nothing, so a deeper one is probed for `PROBE` passes, after a gap that
    doubles each time the probe changes nothing, and only if it could pay with the doubt about c_i on its side. A depth
    whose cost was never measured is visited, `PROBE` passes long, as soon as another one has been. Depth 0 is a depth
    like any other.
    """

    DECAY = 0.98  # forgetting per look at a draft
    PRIOR, PRIOR_WEIGHT, DEEPER_WEIGHT = 0.6, 1.0, 4.0  # in looks
    CARRIED = 16.0  # looks at the text before that still count at the start of the next
    FRESH, FRESH_LOOKS = 2.0, 8.0  # looks, all accepted, that no evidence counts as; gone after so many real ones
    DOUBT, IDLE = 1.0, 32  # looks, all accepted, that a probe is granted; one more for so many passes without a look
    HYSTERESIS = 0.03
    PROBE, GAP, MAX_GAP = 3, 16, 128

    def __init__(self, max_depth: int = 3, costs_ns: Mapping[int, float] | None = None):
        """`costs_ns`: measured time of a pass per depth 0..max_depth, the start of T(d)."""
        self.max_depth = check_depth(max_depth)
        prior = costs_ns or {d: 1.0 + 0.25 * d for d in range(max_depth + 1)}
        missing = [d for d in range(max_depth + 1) if d not in prior]
        if missing:
            raise RequestError(f"the cost model lacks depth {missing[0]}; measure 0 to {max_depth}")
        self.costs = PassCosts({d: prior[d] for d in range(max_depth + 1)})
        self.hits = [0.0] * self.max_depth
        self.tries = [0.0] * self.max_depth
        self.idle = [0] * self.max_depth
        self.since, self.gap, self.kept = 0, self.GAP, -1
        self.start_request()

    def start_request(self) -> None:
        """Another text: what is known of acceptance becomes a weak prior; what a pass costs stays known."""
        kept = [min(1.0, self.CARRIED / t) if t else 1.0 for t in self.tries]
        self.hits = [h * k for h, k in zip(self.hits, kept, strict=True)]
        self.tries = [t * k for t, k in zip(self.tries, kept, strict=True)]
        self.depth, self.gap = -1, max(self.GAP, self.gap // 2)
        self.probing = self.probed = 0
        self.visits: Counter[int] = Counter()

    def conditional(self, *, hopeful: bool = False) -> list[float]:
        """c_i; `hopeful`: with the doubt about each on its side, as for a probe."""
        out, before, weight = [], self.PRIOR, self.PRIOR_WEIGHT
        for hits, tries, idle in zip(self.hits, self.tries, self.idle, strict=True):
            doubt = self.FRESH * max(0.0, 1.0 - tries / self.FRESH_LOOKS)
            doubt += self.DOUBT + idle / self.IDLE if hopeful else 0.0
            before = (hits + weight * before + doubt) / (tries + weight + doubt)
            weight = self.DEEPER_WEIGHT
            out.append(before)
        return out

    def rates(self, conditional: Sequence[float]) -> list[float]:
        """E(d)/T(d) for d = 0..max_depth."""
        tokens, stands, out = 1.0, 1.0, []
        for d in range(self.max_depth + 1):
            if d:
                stands *= conditional[d - 1]
                tokens += stands
            out.append(tokens / self.costs[d])
        return out

    def next_depth(self) -> int:
        if self.probing:
            self.probing -= 1
            return self.probed
        wanted = (d for d in self.costs.prior_ns if self.visits[d] < self.costs.visits_wanted(d))
        if self.depth >= 0 and (unknown := next(wanted, None)) is not None:
            return self._probe(unknown)
        rates = self.rates(self.conditional())
        best = max(range(len(rates)), key=rates.__getitem__)
        if self.depth < 0 or rates[best] > rates[self.depth] * (1 + self.HYSTERESIS):
            if best != self.kept:
                self.since, self.gap = 0, self.GAP
            self.depth = self.kept = best
        self.visits[self.depth] += 1
        self.since += 1
        if self.since >= self.gap and (deeper := self._worth_a_probe(rates[self.depth])):
            self.since, self.gap = 0, min(2 * self.gap, self.MAX_GAP)
            return self._probe(deeper)
        return self.depth

    def _probe(self, depth: int) -> int:
        self.visits[depth] += 1
        self.probed, self.probing = depth, self.PROBE - 1
        return depth

    def _worth_a_probe(self, rate: float) -> int:
        """The deeper depth that would gain most with the doubt about its drafts on its side; 0: none would."""
        hopeful = self.conditional()[: self.depth] + self.conditional(hopeful=True)[self.depth :]
        rates = self.rates(hopeful)
        best = max(range(self.depth, self.max_depth + 1), key=rates.__getitem__)
        return best if rates[best] > rate else 0

    def observe(self, record: Verify) -> None:
        if record.proposed <= self.max_depth:
            self.costs.observe(record.proposed, record.pass_ns)
        for i in range(self.max_depth):
            seen = i < record.examined
            self.idle[i] = 0 if seen else self.idle[i] + 1
            if seen:
                self.hits[i] = self.hits[i] * self.DECAY + (record.accepted > i)
                self.tries[i] = self.tries[i] * self.DECAY + 1.0

    def state(self) -> dict[str, Any]:
        """What a replay needs to start where this request started."""
        acceptance = {"hits": list(self.hits), "tries": list(self.tries), "idle": list(self.idle)}
        probes = {"since": self.since, "gap": self.gap, "kept": self.kept}
        return {"max_depth": self.max_depth} | acceptance | probes | {"costs": self.costs.state()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> AdaptiveDepth:
        costs = PassCosts.from_state(state["costs"])
        policy = cls(state["max_depth"], costs.prior_ns)
        policy.costs, policy.idle = costs, list(state["idle"])
        policy.hits, policy.tries = list(state["hits"]), list(state["tries"])
        policy.since, policy.gap, policy.kept = state["since"], state["gap"], state["kept"]
        return policy
