"""Every number mtplab prints about a run, as a pure function of the records.

A record holds counts and nanoseconds; a ratio is made here and nowhere else. One request has verify passes
s = 1..S. Pass s proposes k_s drafts, of which the first A_s match; it commits A_s + 1 tokens (before the cut) and
emits E_s <= A_s + 1 of them (after it). Names say which of these they use: `accepted` never counts the bonus or
correction token, `tokens` and `emitted` always do.

Counts are pooled: numerators and denominators are summed over requests, then divided once. Times are compared per
prompt. A number without a denominator ("no drafts proposed", one burst) is None: not 0, not NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mtplab.errors import RequestError
from mtplab.records.types import Request

LOOP_GRAM = 8  # tokens; shorter grams repeat in ordinary prose and code
LOOP_LIMIT = 0.3  # above this share a row is marked and left out of headlines

Measure = Callable[[Request], float | None]


class Counts(NamedTuple):
    """The passes of some requests as aligned integer arrays, each [S]."""

    depth: np.ndarray
    proposed: np.ndarray
    accepted: np.ndarray
    examined: np.ndarray
    emitted: np.ndarray


def counts(requests: Sequence[Request]) -> Counts:
    """Gather the passes of all requests, in order."""
    rows = [(v.depth, v.proposed, v.accepted, v.examined, v.emitted) for r in requests for v in r.verifies]
    table = np.array(rows, dtype=np.int64).reshape(-1, len(Counts._fields))
    return Counts(*table.T)


def divide(numerator: float, denominator: float) -> float | None:
    """A quotient as a plain float, None where the denominator is 0."""
    return float(numerator / denominator) if denominator else None


# Counts --------------------------------------------------------------------------------------------------------


def emitted_total(requests: Sequence[Request]) -> int:
    """N: tokens returned, the first token of the prefill included."""
    return sum(r.prefill.emitted + sum(v.emitted for v in r.verifies) for r in requests)


def tokens_per_verify(requests: Sequence[Request]) -> float | None:
    """sum(A_s + 1) / S, before the cut. The headline count; 1.0 for the baseline."""
    c = counts(requests)
    return divide((c.accepted + 1).sum(), c.accepted.size)


def accepted_per_verify(requests: Sequence[Request]) -> float | None:
    """sum(A_s) / S: accepted drafts per verify pass, without bonus or correction."""
    c = counts(requests)
    return divide(c.accepted.sum(), c.accepted.size)


def emitted_per_verify(requests: Sequence[Request]) -> float | None:
    """sum(E_s) / S, after the cut: what the user got. Equals tokens_per_verify where nothing was cut."""
    c = counts(requests)
    return divide(c.emitted.sum(), c.emitted.size)


class DraftAcceptance(NamedTuple):
    """`value` = accepted / proposed; `depth` names K, without which the value cannot be compared."""

    value: float | None
    depth: str


def draft_acceptance(requests: Sequence[Request]) -> DraftAcceptance:
    """sum(A_s) / sum(k_s) with its K. It falls as K grows with an unchanged drafter, hence the K."""
    c = counts(requests)
    return DraftAcceptance(divide(c.accepted.sum(), c.proposed.sum()), depth_label(requests))


def depth_label(requests: Sequence[Request]) -> str:
    """The K of `draft_acceptance@K`: "3" where every pass asked for 3 drafts, "0-3" where depths were mixed."""
    depth = counts(requests).depth
    if depth.size == 0:
        return "0"
    low, high = int(depth.min()), int(depth.max())
    return str(low) if low == high else f"{low}-{high}"


def examined_acceptance(requests: Sequence[Request]) -> float | None:
    """sum(A_s) / sum(examined_s): drafts after the first rejection are not held against the drafter."""
    c = counts(requests)
    return divide(c.accepted.sum(), c.examined.sum())


class PositionCounts(NamedTuple):
    """Per draft position i, each [max k]: passes with k > i, of those the passes with A >= i, and with A > i."""

    proposed: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray


def position_counts(requests: Sequence[Request]) -> PositionCounts:
    """The counts behind `survival` and `conditional`. A pass counts at position i only if it proposed a draft there."""
    c = counts(requests)
    position = np.arange(c.proposed.max(initial=0))[:, None]  # [max k, 1] against [S]
    proposed = c.proposed > position
    reached = proposed & (c.accepted >= position)
    accepted = proposed & (c.accepted > position)
    return PositionCounts(*(x.sum(axis=1) for x in (proposed, reached, accepted)))


def survival(requests: Sequence[Request]) -> list[float | None] | None:
    """P(A > i) over passes with k > i, for i = 0, 1, ...; None where no drafts were proposed."""
    p = position_counts(requests)
    return [divide(a, n) for a, n in zip(p.accepted, p.proposed, strict=True)] or None


def conditional(requests: Sequence[Request]) -> list[float | None] | None:
    """P(A > i given A >= i) over passes with k > i; a position that no pass reached is None, as is an undrafted run.

    It rises along i by survivorship alone: the passes that come far are the easy ones.
    """
    p = position_counts(requests)
    return [divide(a, n) for a, n in zip(p.accepted, p.reached, strict=True)] or None


def mean_depth(requests: Sequence[Request]) -> float | None:
    """Mean over passes of the depth that the policy asked for (a drafter may have proposed fewer)."""
    depth = counts(requests).depth
    return divide(depth.sum(), depth.size)


def draft_share(requests: Sequence[Request]) -> float | None:
    """Share of returned tokens that came from a draft. The first A_s tokens of a pass are drafts, cut or not."""
    c = counts(requests)
    return divide(np.minimum(c.accepted, c.emitted).sum(), emitted_total(requests))


class TokensPerForward(NamedTuple):
    """Emitted tokens per target-size forward pass, under both conventions."""

    with_prefill: float | None
    without_prefill: float | None


def tokens_per_forward(requests: Sequence[Request]) -> TokensPerForward:
    """with_prefill: all N tokens over prefill and verify passes. without_prefill: the passes' own tokens over them."""
    c = counts(requests)
    prefills = sum(r.prefill.forwards for r in requests)
    everything = divide(emitted_total(requests), prefills + c.emitted.size)
    return TokensPerForward(everything, divide(c.emitted.sum(), c.emitted.size))


# Drafter quality, free of depth --------------------------------------------------------------------------------


def match(head: Sequence[int], target: Sequence[int]) -> float | None:
    """Share of positions where head and target agree on the top token, teacher-forced; both [T], aligned."""
    a, b = np.asarray(head), np.asarray(target)
    _same_shape("match", a, b)
    return float((a == b).mean()) if a.size else None


def overlap(p: np.ndarray, q: np.ndarray) -> float | None:
    """Mean over positions of sum_x min(p(x), q(x)); p target, q draft, both [T, V] and aligned.

    It equals the expected acceptance of rejection sampling (Leviathan 2023, with p and q as there).
    """
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    _same_shape("overlap", p, q)
    return float(np.minimum(p, q).sum(axis=-1).mean()) if p.size else None


def _same_shape(name: str, a: np.ndarray, b: np.ndarray) -> None:
    if a.shape != b.shape:
        raise RequestError(
            f"{name} compares the same positions, but the shapes are {a.shape} and {b.shape}; align the arrays first"
        )


# Loops ---------------------------------------------------------------------------------------------------------


def loop_counts(request: Request) -> tuple[int, int]:
    """(8-grams that occurred before in the same output, all 8-grams) of one request's emitted tokens."""
    tokens = request.tokens
    grams = [tokens[i : i + LOOP_GRAM] for i in range(len(tokens) - LOOP_GRAM + 1)]
    return len(grams) - len(set(grams)), len(grams)


def loop_share(requests: Sequence[Request]) -> float | None:
    """Share of emitted 8-grams that occurred before in their own output; None where no output has 8 tokens."""
    pairs = [loop_counts(r) for r in requests]
    return divide(sum(p[0] for p in pairs), sum(p[1] for p in pairs))


# Divergence ----------------------------------------------------------------------------------------------------


class Divergence(NamedTuple):
    """`index` of the first differing token (None: equal as far as compared) and the number of positions `compared`.

    None is right-censored, not "equal": the claim is bounded by `compared`.
    """

    index: int | None
    compared: int


def first_divergence(a: Sequence[int], b: Sequence[int], *, a_ended: bool = False, b_ended: bool = False) -> Divergence:
    """Compare two token streams. `*_ended` says that a stream ended by itself (EOS, stop string), not at a cap.

    If one stream is a prefix of the other, a shorter one that hit its cap is censored there. One that ended by
    itself while the other went on differs at its end: the end is a decision of the decoder like any token.
    """
    n = min(len(a), len(b))
    x, y = np.asarray(a[:n], dtype=np.int64), np.asarray(b[:n], dtype=np.int64)
    differs = np.flatnonzero(x != y)
    if differs.size:
        return Divergence(int(differs[0]), int(differs[0]) + 1)
    short_ended = (len(a) < len(b) and a_ended) or (len(b) < len(a) and b_ended)
    return Divergence(n, n + 1) if short_ended else Divergence(None, n)


def request_divergence(a: Request, b: Request) -> Divergence:
    """`first_divergence` of two requests, with the end of a stream taken from its `finish`."""
    ended = [r.finish in ("eos", "stop") for r in (a, b)]
    return first_divergence(a.tokens, b.tokens, a_ended=ended[0], b_ended=ended[1])


def divergence_per_1k(positions: Sequence[Sequence[int]], compared: Sequence[int]) -> float | None:
    """Divergences per 1,000 compared tokens, pooled over streams re-joined by teacher forcing after each one.

    positions[i]: indices of the divergences of stream i; compared[i]: tokens compared in it.
    """
    return divide(1000 * sum(len(p) for p in positions), sum(compared))


def divergence_gaps(positions: Sequence[Sequence[int]]) -> list[int]:
    """Tokens from one divergence to the next within a stream: what the histogram beside `divergence_per_1k` shows."""
    return [int(g) for p in positions for g in np.diff(np.sort(np.asarray(p, dtype=np.int64)))]


# Time ----------------------------------------------------------------------------------------------------------


def token_times(request: Request) -> np.ndarray:
    """When each returned token was on the host, in ns: [N]. The tokens of one pass share a time (a burst)."""
    ends = [request.prefill.end_ns, *(v.end_ns for v in request.verifies)]
    sizes = [request.prefill.emitted, *(v.emitted for v in request.verifies)]
    return np.repeat(np.array(ends, dtype=np.int64), sizes)


def span_ms(request: Request) -> float | None:
    """From the first returned token to the last; None for fewer than 2 tokens and for one burst."""
    times = token_times(request)
    if times.size < 2 or times[-1] <= times[0]:
        return None
    return float(times[-1] - times[0]) / 1e6


def tpot_ms(request: Request) -> float | None:
    """(t_last - t_first) / (N - 1): ms per output token after the first. None when N < 2 or all came in one burst."""
    span = span_ms(request)
    return None if span is None else span / (emitted_total([request]) - 1)


def latency_ms(request: Request) -> float:
    """From the start of the prefill to the last token: what the user waits for a finished request."""
    end = request.verifies[-1].end_ns if request.verifies else request.prefill.end_ns
    return (end - request.prefill.start_ns) / 1e6


def tok_s(requests: Sequence[Request]) -> float | None:
    """(N - 1) / (t_last - t_first), sums over the prompts that have a span; None where none has one.

    A prompt counts with the medians of its rounds, as in the ratios: a slow moment of the machine in one round must
    not put an arm below another that it beats in every ratio.
    """
    timed: dict[str, list[tuple[int, float]]] = {}
    for r in requests:
        if (span := span_ms(r)) is not None:
            timed.setdefault(r.id, []).append((emitted_total([r]) - 1, span))
    tokens = [float(np.median([n for n, _ in rounds])) for rounds in timed.values()]
    each = [float(np.median([span / n for n, span in rounds])) for rounds in timed.values()]
    return divide(1e3 * sum(tokens), sum(n * ms for n, ms in zip(tokens, each, strict=True)))


def per_prompt(requests: Sequence[Request], measure: Measure) -> dict[str, float]:
    """Prompt id -> median of `measure(request)` over the prompt's rounds; prompts without a value are left out."""
    values: dict[str, list[float]] = {}
    for r in requests:
        if (x := measure(r)) is not None:
            values.setdefault(r.id, []).append(x)
    return {k: float(np.median(v)) for k, v in values.items()}


def log_ratios(baseline: Sequence[Request], arm: Sequence[Request], measure: Measure = tpot_ms) -> dict[str, float]:
    """Prompt id -> log(measure of the baseline / measure of the arm), paired: prompts that one side lacks drop out.

    Each side is the median over its rounds first, so that a prompt counts once however often it ran.
    """
    base, other = per_prompt(baseline, measure), per_prompt(arm, measure)
    return {k: math.log(base[k] / other[k]) for k in base if other.get(k, 0) > 0 and base[k] > 0}


def geometric_mean(logs: Mapping[str, float]) -> float | None:
    """exp of the mean log; None of nothing."""
    return math.exp(sum(logs.values()) / len(logs)) if logs else None


def tpot_ratio(baseline: Sequence[Request], arm: Sequence[Request]) -> float | None:
    """Geometric mean over prompts of TPOT(baseline) / TPOT(arm), paired. Above 1: the arm needs less time per token."""
    return geometric_mean(log_ratios(baseline, arm, tpot_ms))


def e2e_ratio(baseline: Sequence[Request], arm: Sequence[Request]) -> float | None:
    """`tpot_ratio`'s twin over whole request latencies, prefill included. Printed beside it, always."""
    return geometric_mean(log_ratios(baseline, arm, latency_ms))


# Cost model ----------------------------------------------------------------------------------------------------


def verify_width(verify_ms: Mapping[int, float]) -> dict[int, float]:
    """M -> t(M rows) / t(1 row), from the time of a target forward pass at each width."""
    times = {int(k): float(v) for k, v in verify_ms.items()}  # JSON turns the keys into strings
    one = times.get(1)
    if not one:
        raise RequestError(f"verify_width needs the time of 1 row, but widths {sorted(times)} were measured; add 1")
    return {m: t / one for m, t in sorted(times.items())}


def predicted_ratio(tokens_per_verify: float | None, k: float, c: float, v: float, h: float) -> float | None:
    """tokens_per_verify / (k*c + v + h): what drafting k should bring if nothing but these costs mattered.

    c = cost of one draft, v = `verify_width` at k + 1 rows, h = host time, all in units of t(1).
    """
    return None if tokens_per_verify is None else divide(tokens_per_verify, k * c + v + h)


def predicted_ratio_of(requests: Sequence[Request], costs: Mapping[str, object]) -> float | None:
    """`predicted_ratio` of an arm from its own mix of proposed depths: the cost is the mean over its passes.

    costs = {"verify_ms": {rows: ms}, "draft_ms": {depth: ms for all of its drafts}, "host_ms": ms}. None if a
    depth that occurred was not measured. For a fixed depth this is the formula of `predicted_ratio`.
    """
    width = verify_width(costs["verify_ms"])
    one = {int(k): float(x) for k, x in costs["verify_ms"].items()}[1]
    draft = {0: 0.0} | {int(k): float(x) / one for k, x in costs["draft_ms"].items()}
    depths, passes = np.unique(counts(requests).proposed, return_counts=True)
    if not depths.size or any(int(k) + 1 not in width or int(k) not in draft for k in depths):
        return None
    host = float(costs["host_ms"]) / one  # of passes with drafts; the baseline's own is in verify_ms[1]
    each = (draft[int(k)] + width[int(k) + 1] + (host if k else 0.0) for k in depths)
    cost = sum(n * c for n, c in zip(passes, each, strict=True)) / passes.sum()
    return divide(tokens_per_verify(requests), cost)
