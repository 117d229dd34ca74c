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


class AdaptiveDepth:
    """Maximize expected tokens per nanosecond.

    With c_i the probability that draft i stands given that those before it stood, depth d commits
    E(d) = 1 + sum over i <= d of c_1 ... c_i tokens per pass and costs T(d), the median of the last passes that
    proposed d. The policy takes the d with the largest E(d)/T(d), and leaves its present depth only for a gain
    above `HYSTERESIS`. c_i are exponentially forgotten counts over a weak prior. A depth that is not being tried
    teaches nothing, so it is probed: `PROBE` passes one deeper, after a gap that doubles each time the probe
    changes nothing, and only if full acceptance there could pay at all. A depth whose cost was never measured is
    visited once, `PROBE` passes long, as soon as another one has been. Depth 0 is a depth like any other.
    """

    DECAY = 0.96
    PRIOR, PRIOR_WEIGHT = 0.6, 2.0
    HYSTERESIS = 0.03
    PROBE, GAP, MAX_GAP = 3, 16, 128
    KEPT_TIMES = 31

    def __init__(self, max_depth: int = 3, costs_ns: Mapping[int, float] | None = None):
        """`costs_ns`: measured time of a pass per depth 0..max_depth, the start of T(d)."""
        self.max_depth = check_depth(max_depth)
        prior = costs_ns or {d: 1.0 + 0.25 * d for d in range(max_depth + 1)}
        missing = [d for d in range(max_depth + 1) if d not in prior]
        if missing:
            raise RequestError(f"the cost model lacks depth {missing[0]}; measure 0 to {max_depth}")
        self.prior_ns = {d: float(prior[d]) for d in range(max_depth + 1)}
        self.times = {d: deque(maxlen=self.KEPT_TIMES) for d in range(max_depth + 1)}
        self.start_request()

    def start_request(self) -> None:
        """Forget the acceptance of the last text; what a pass costs stays known."""
        self.hits = [self.PRIOR * self.PRIOR_WEIGHT] * self.max_depth
        self.tries = [self.PRIOR_WEIGHT] * self.max_depth
        self.depth, self.since, self.gap = -1, 0, self.GAP
        self.probing = self.probed = 0
        self.visited = {d for d, t in self.times.items() if t}

    def cost_ns(self, depth: int) -> float:
        """T(depth): the median measured, else the prior scaled by how far the measured depths are off theirs."""
        if self.times[depth]:
            return statistics.median(self.times[depth])
        known = [statistics.median(t) / self.prior_ns[d] for d, t in self.times.items() if t]
        return self.prior_ns[depth] * (statistics.median(known) if known else 1.0)

    def conditional(self) -> list[float]:
        return [h / t for h, t in zip(self.hits, self.tries, strict=True)]

    def rates(self, conditional: Sequence[float]) -> list[float]:
        """E(d)/T(d) for d = 0..max_depth."""
        tokens, stands, out = 1.0, 1.0, []
        for d in range(self.max_depth + 1):
            if d:
                stands *= conditional[d - 1]
                tokens += stands
            out.append(tokens / self.cost_ns(d))
        return out

    def next_depth(self) -> int:
        if self.probing:
            self.probing -= 1
            return self.probed
        unknown = next((d for d, t in self.times.items() if not t and d not in self.visited), None)
        if unknown is not None and self.visited:
            return self._probe(unknown)
        conditional = self.conditional()
        rates = self.rates(conditional)
        best = max(range(len(rates)), key=rates.__getitem__)
        if self.depth < 0 or rates[best] > rates[self.depth] * (1 + self.HYSTERESIS):
            if best != self.depth:
                self.since, self.gap = 0, self.GAP
            self.depth = best
        self.visited.add(self.depth)
        self.since += 1
        if self.since >= self.gap and self._probe_could_pay(conditional, rates):
            self.since, self.gap = 0, min(2 * self.gap, self.MAX_GAP)
            return self._probe(self.depth + 1)
        return self.depth

    def _probe(self, depth: int) -> int:
        self.visited.add(depth)
        self.probed, self.probing = depth, self.PROBE - 1
        return depth

    def _probe_could_pay(self, conditional: list[float], rates: list[float]) -> bool:
        if self.depth >= self.max_depth:
            return False
        hopeful = conditional[: self.depth] + [1.0] * (self.max_depth - self.depth)
        return max(self.rates(hopeful)[self.depth + 1 :]) > rates[self.depth]

    def observe(self, record: Verify) -> None:
        if record.proposed <= self.max_depth:
            self.times[record.proposed].append(record.pass_ns)
        for i in range(min(record.examined, self.max_depth)):
            self.hits[i] = self.hits[i] * self.DECAY + (1.0 if record.accepted > i else 0.0)
            self.tries[i] = self.tries[i] * self.DECAY + 1.0

    def state(self) -> dict[str, Any]:
        """What a replay needs to start where this request started."""
        return {
            "max_depth": self.max_depth,
            "prior_ns": {str(d): ns for d, ns in self.prior_ns.items()},
            "times": {str(d): list(t) for d, t in self.times.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> AdaptiveDepth:
        policy = cls(state["max_depth"], {int(d): ns for d, ns in state["prior_ns"].items()})
        for d, times in state["times"].items():
            policy.times[int(d)].extend(times)
        return policy
