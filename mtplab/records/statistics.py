"""How sure a number is.

The unit is the prompt. The verify passes of one prompt resemble each other (an easy text is easy throughout), so an
interval that takes passes as independent is far too narrow: about 40 % coverage where it says 95 %. Intervals here
resample prompts and divide the resampled sums again. Speed is compared paired by prompt, as log-ratios.

scipy is imported inside the one function that needs it: reading records stays cheap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from mtplab.errors import RequestError

RESAMPLES = 2_000
SEED = 20_260_101  # fixed: the same records give the same interval
LEVEL = 0.95
FEW_PROMPTS = 20
NO_DIFFERENCE = "no difference at this sample size"
DRIFT_P = 0.02  # 5 rounds in perfect order have p = 2/120; chance alone flags 1 arm in 60
DRIFT_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % range over `n` units. low and high are None where there is no range; value may be."""

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A dict without NaN or infinity: those become None."""
        numbers = {k: _finite(getattr(self, k)) for k in ("value", "low", "high")}
        return numbers | {"n": self.n, "note": self.note}

    def contains(self, x: float) -> bool:
        return self.low is not None and self.high is not None and self.low <= x <= self.high


def _finite(x: float | None) -> float | None:
    return float(x) if x is not None and math.isfinite(x) else None


def _note(prompts: int) -> str | None:
    if prompts >= FEW_PROMPTS:
        return None
    if prompts < 2:
        return f"{prompts} prompt{'' if prompts == 1 else 's'}: no interval"
    return f"{prompts} prompts, fewer than {FEW_PROMPTS}: the interval is rough"


def _percentiles(value: float, samples: np.ndarray) -> tuple[float, float]:
    """The central LEVEL of the samples, widened by rounding at most so that it holds its own estimate."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(samples, [tail, 1 - tail])
    return min(float(low), value), max(float(high), value)


def prompt_bootstrap(
    numerators: Sequence[float], denominators: Sequence[float], *, resamples: int = RESAMPLES, seed: int = SEED
) -> Interval:
    """sum(numerators) / sum(denominators) with its percentile interval over prompts; one pair of sums per prompt.

    Prompts are drawn with replacement and the sums divided again (Efron 1979). Prompts whose denominator is 0 carry
    no information and are left out of `n`.
    """
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if top.shape != bottom.shape:
        raise RequestError(f"{top.size} numerators against {bottom.size} denominators; give one pair per prompt")
    top, bottom = top[bottom != 0], bottom[bottom != 0]
    if not top.size:
        return Interval(None, note="nothing to divide by")
    value = float(top.sum() / bottom.sum())
    if top.size == 1:
        return Interval(value, n=1, note=_note(1))
    pick = np.random.default_rng(seed).integers(top.size, size=(resamples, top.size))
    low, high = _percentiles(value, top[pick].sum(axis=1) / bottom[pick].sum(axis=1))
    return Interval(value, low, high, int(top.size), _note(top.size))


def paired_bootstrap(
    log_ratios: Mapping[str, float] | Sequence[float], *, resamples: int = RESAMPLES, seed: int = SEED
) -> Interval:
    """Geometric mean of paired ratios, given as one log-ratio per prompt, with its bootstrap interval over prompts."""
    logs = np.array(list(log_ratios.values() if isinstance(log_ratios, Mapping) else log_ratios), dtype=np.float64)
    if not logs.size:
        return Interval(None, note="no prompt was timed in both arms")
    mean = prompt_bootstrap(logs, np.ones_like(logs), resamples=resamples, seed=seed)
    bounds = [None if x is None else math.exp(x) for x in (mean.value, mean.low, mean.high)]
    return Interval(*bounds, n=mean.n, note=mean.note)


def wilson(successes: int, trials: int) -> Interval:
    """A share with Wilson's score interval (1927). It takes the trials as independent, which passes are not quite."""
    if trials == 0:
        return Interval(None, note="no trials")
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    share, scale = successes / trials, 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # Rounding must not put the end of the range inside a share of exactly 0 or 1.
    low, high = min(max(0.0, centre - half), share), max(min(1.0, centre + half), share)
    return Interval(share, low, high, trials)


@dataclass(frozen=True, slots=True)
class SurvivalStep:
    """At token `index`, `diverged` of the `at_risk` streams left; `survival` = estimated share equal through it."""

    index: int
    at_risk: int
    diverged: int
    survival: float


def kaplan_meier(divergences: Sequence[tuple[int | None, int]]) -> list[SurvivalStep]:
    """The share of streams still equal after each token index, from (index or None, tokens compared) per stream.

    A stream that was equal as far as it was compared is right-censored there: it counts as at risk up to its last
    compared token and then leaves without a divergence (Kaplan and Meier 1958). One step per index with an event.
    """
    watched = np.array([compared if index is None else index + 1 for index, compared in divergences], dtype=np.int64)
    steps, left = [], 1.0
    for i in sorted({index for index, _ in divergences if index is not None}):
        at_risk = int((watched > i).sum())
        events = sum(index == i for index, _ in divergences)
        left *= 1 - events / at_risk
        steps.append(SurvivalStep(i, at_risk, events, left))
    return steps


@dataclass(frozen=True, slots=True)
class Drift:
    """Spearman's `rho` of the round against a per-round value; `flag` says that chance does not explain it."""

    rho: float | None
    p: float | None
    rounds: int
    flag: bool
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"rho": self.rho, "p": self.p, "rounds": self.rounds, "flag": self.flag, "note": self.note}


def drift(rounds: Sequence[int], values: Sequence[float], *, seed: int = SEED) -> Drift:
    """Does the value move with the round (heat, load)? rounds and values are aligned, one entry per prompt and round.

    `rho` is Spearman's over all entries. Its p-value comes from permuting whole rounds: the entries of one round
    share the machine's state and are not independent. With fewer than 5 rounds nothing can be shown, and it says so.
    """
    from scipy.stats import rankdata

    r, x = np.asarray(rounds), rankdata(values)
    labels, group = np.unique(r, return_inverse=True)
    if labels.size < 2 or np.ptp(x) == 0:
        return Drift(None, None, int(labels.size), False, "one round, or no variation")
    sums = np.bincount(group, weights=x - x.mean())
    observed, orders = rankdata(r), _orders(labels.size, seed)
    rho = float(np.corrcoef(observed, x)[0, 1])
    ranks = np.array([observed[group == g][0] for g in range(labels.size)])
    null = np.abs((ranks - ranks.mean())[orders] @ sums)
    p = float((null >= abs((ranks - ranks.mean()) @ sums) * (1 - 1e-12)).mean())
    enough = labels.size >= DRIFT_ROUNDS
    note = None if enough else f"{labels.size} rounds, fewer than {DRIFT_ROUNDS}: drift cannot be tested"
    return Drift(rho, p, int(labels.size), enough and p < DRIFT_P, note)


def _orders(n: int, seed: int) -> np.ndarray:
    """Orders of n rounds, [P, n]: all of them up to 7 rounds, else 5,000 drawn ones and the actual one."""
    if n <= 7:
        return np.array(list(itertools.permutations(range(n))))
    rng = np.random.default_rng(seed)
    return np.array([np.arange(n), *(rng.permutation(n) for _ in range(5_000))])


def noise_floor(rounds_by_prompt: Mapping[str, Mapping[int, float]]) -> Interval:
    """An arm against itself: prompt -> round -> ms, split into two halves of rounds and compared as two arms are.

    Rounds are dealt out 0 1 1 0 0 1 1 0, so that a steady drift falls on both halves alike. Its range around 1 is
    what this many prompts and rounds cannot tell from nothing. None with a single round.
    """
    order = sorted({r for by_round in rounds_by_prompt.values() for r in by_round})
    half = {r: (i % 4) in (1, 2) for i, r in enumerate(order)}
    logs = {}
    for prompt, by_round in rounds_by_prompt.items():
        sides = [[x for r, x in by_round.items() if half[r] is side] for side in (False, True)]
        if all(sides):
            logs[prompt] = math.log(float(np.median(sides[0])) / float(np.median(sides[1])))
    return paired_bootstrap(logs) if logs else Interval(None, note="one round: no noise floor")


def verdict(ratio: Interval, *floors: Interval) -> str | None:
    """ "faster", "slower" or "no difference at this sample size" for a paired time ratio (above 1 = faster).

    It needs a range that leaves out 1 and a distance from 1 that neither arm shows against itself (`noise_floor`).
    """
    if ratio.value is None:
        return None
    noise = max(map(_reach, floors), default=0.0)
    if ratio.low is None or ratio.contains(1.0) or abs(math.log(ratio.value)) <= noise:
        return NO_DIFFERENCE
    return "faster" if ratio.value > 1 else "slower"


def _reach(floor: Interval) -> float:
    """The largest distance from 1 of a noise floor's value and ends, as a log."""
    ends = (floor.value, floor.low, floor.high)
    return max((abs(math.log(x)) for x in ends if x is not None), default=0.0)


def sample_range(samples: Sequence[float]) -> Interval:
    """Median, smallest and largest of repeated measurements: the range of a few runs, no claim of probability."""
    if not len(samples):
        return Interval(None, note="no samples")
    x = np.asarray(samples, dtype=np.float64)
    return Interval(float(np.median(x)), float(x.min()), float(x.max()), int(x.size), "range of the samples")


def compare_ranges(a: Interval, b: Interval) -> str:
    """ "first higher", "second higher", or "no difference at this sample size" where ranges overlap or are missing."""
    if None in (a.low, a.high, b.low, b.high) or (a.low <= b.high and b.low <= a.high):
        return NO_DIFFERENCE
    return "first higher" if a.low > b.high else "second higher"
