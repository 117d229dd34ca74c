"""How deep to draft: fixed, replayed, or adaptive 0..K from a cost model.

A policy sees records only (counts and pass times), never a clock of its own: feed the same records again and it
takes the same decisions. `next_depth` is called once per pass, in order; after a pass of depth 0 was chosen it is
called for the following pass before that one was observed.
"""

from __future__ import annotations

import statistics
from collections import deque
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
    """T(d), what a pass of depth d costs now, learned from passes of other depths too.

    T(d) = prior(d) * shape(d) * level. A machine that slows down slows every depth, so a time seen some passes ago is
    compared with the level of then, not of now: `level` is the median of the last passes, each over its own
    prior * shape; `shape(d)` is the median of the last times at d over prior(d) * level, the prior itself counting as
    two of them. A step of depth 0 overlaps the next one, so that its own time says little: a run of them counts as
    one time, its mean.
    """

    KEPT, LEVEL, RUN, PRIORS = 31, 15, 8, 2

    def __init__(self, prior_ns: Mapping[int, float]):
        self.prior_ns = {d: float(ns) for d, ns in prior_ns.items()}
        self.ratios = {d: deque(maxlen=self.KEPT) for d in self.prior_ns}
        self.recent: deque[float] = deque(maxlen=self.LEVEL)
        self.run: list[int] = []

    @property
    def level(self) -> float:
        return statistics.median(self.recent) if self.recent else 1.0

    def shape(self, depth: int) -> float:
        return statistics.median([*self.ratios[depth], *[1.0] * self.PRIORS])

    def known(self, depth: int) -> bool:
        return bool(self.ratios[depth])

    def __getitem__(self, depth: int) -> float:
        return self.prior_ns[depth] * self.shape(depth) * self.level

    def observe(self, depth: int, ns: int) -> None:
        if depth == 0:
            self.run.append(ns)
        if self.run and (depth or len(self.run) == self.RUN):
            self._add(0, statistics.fmean(self.run))
            self.run = []
        if depth:
            self._add(depth, ns)

    def _add(self, depth: int, ns: float) -> None:
        here = max(ns, 1.0) / self.prior_ns[depth]
        self.ratios[depth].append(here / (self.level if self.recent else here))
        self.recent.append(here / self.shape(depth))

    def state(self) -> dict[str, Any]:
        by_depth = {str(d): list(r) for d, r in self.ratios.items()}
        prior = {str(d): ns for d, ns in self.prior_ns.items()}
        return {"prior_ns": prior, "ratios": by_depth, "recent": list(self.recent), "run": list(self.run)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PassCosts:
        costs = cls({int(d): ns for d, ns in state["prior_ns"].items()})
        for d, ratios in state["ratios"].items():
            costs.ratios[int(d)].extend(ratios)
        costs.recent.extend(state["recent"])
        costs.run = list(state["run"])
        return costs


class AdaptiveDepth:
    """Maximize expected tokens per nanosecond.

    With c_i the probability that draft i stands given that those before it stood, depth d commits
    E(d) = 1 + sum over i <= d of c_1 ... c_i tokens per pass and costs T(d) (`PassCosts`). The policy takes the d with
    the largest E(d)/T(d), and leaves its present depth only for a gain above `HYSTERESIS`. c_i are exponentially
    forgotten counts over a weak prior, which is what the text before brought. A depth that is not being tried teaches
    nothing, so it is probed: `PROBE` passes one deeper, after a gap that doubles each time the probe changes nothing,
    and only if it could pay with the doubt about c_i on its side. A depth whose cost was never measured is visited
    once, `PROBE` passes long, as soon as another one has been. Depth 0 is a depth like any other.
    """

    DECAY, FADE = 0.96, 0.99  # forgetting per look at a draft, and per pass that had none to look at
    PRIOR, PRIOR_WEIGHT = 0.6, 2.0
    CARRIED = 4.0  # looks at the text before that still count at the start of the next
    DOUBT = 2.0  # looks, all accepted, that a probe is granted
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
        self.hits = [self.PRIOR * self.PRIOR_WEIGHT] * self.max_depth
        self.tries = [self.PRIOR_WEIGHT] * self.max_depth
        self.start_request()

    def start_request(self) -> None:
        """Another text: what is known of acceptance becomes a weak prior; what a pass costs stays known."""
        kept = [min(1.0, self.CARRIED / t) for t in self.tries]
        self.hits = [h * k for h, k in zip(self.hits, kept, strict=True)]
        self.tries = [t * k for t, k in zip(self.tries, kept, strict=True)]
        self.depth, self.since, self.gap = -1, 0, self.GAP
        self.probing = self.probed = 0
        self.visited = {d for d in self.costs.prior_ns if self.costs.known(d)}

    def conditional(self, doubt: float = 0.0) -> list[float]:
        """c_i; with `doubt` as if so many more looks had all been accepted."""
        return [(h + doubt) / (t + doubt) for h, t in zip(self.hits, self.tries, strict=True)]

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
        unknown = next((d for d in self.costs.prior_ns if not self.costs.known(d) and d not in self.visited), None)
        if unknown is not None and self.visited:
            return self._probe(unknown)
        rates = self.rates(self.conditional())
        best = max(range(len(rates)), key=rates.__getitem__)
        if self.depth < 0 or rates[best] > rates[self.depth] * (1 + self.HYSTERESIS):
            if best != self.depth:
                self.since, self.gap = 0, self.GAP
            self.depth = best
        self.visited.add(self.depth)
        self.since += 1
        if self.since >= self.gap and self._probe_could_pay(rates[self.depth]):
            self.since, self.gap = 0, min(2 * self.gap, self.MAX_GAP)
            return self._probe(self.depth + 1)
        return self.depth

    def _probe(self, depth: int) -> int:
        self.visited.add(depth)
        self.probed, self.probing = depth, self.PROBE - 1
        return depth

    def _probe_could_pay(self, rate: float) -> bool:
        known, hopeful = self.conditional(), self.conditional(self.DOUBT)
        hopeful = known[: self.depth] + hopeful[self.depth :]
        return max(self.rates(hopeful)[self.depth + 1 :], default=0.0) > rate

    def observe(self, record: Verify) -> None:
        if record.proposed <= self.max_depth:
            self.costs.observe(record.proposed, record.pass_ns)
        for i in range(self.max_depth):
            seen = i < record.examined
            keep = self.DECAY if seen else self.FADE if self.tries[i] > 0.5 else 1.0
            self.hits[i] = self.hits[i] * keep + (seen and record.accepted > i)
            self.tries[i] = self.tries[i] * keep + seen

    def state(self) -> dict[str, Any]:
        """What a replay needs to start where this request started."""
        acceptance = {"hits": list(self.hits), "tries": list(self.tries)}
        return {"max_depth": self.max_depth} | acceptance | {"costs": self.costs.state()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> AdaptiveDepth:
        costs = PassCosts.from_state(state["costs"])
        policy = cls(state["max_depth"], costs.prior_ns)
        policy.costs, policy.hits, policy.tries = costs, list(state["hits"]), list(state["tries"])
        policy.start_request()
        return policy
