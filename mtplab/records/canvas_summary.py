"""One row per corpus and arm of a `denoise` run, and the number of steps it recommends; from stored records alone.

Every arm is compared with the longest run of the same sampler and canvas length, prompt by prompt and seed by seed:
both began with the same canvases. What two seeds of that longest run differ by is the noise floor: a loss inside it
cannot be told from drawing other noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mtplab.errors import RequestError
from mtplab.records import canvas_metrics as m
from mtplab.records import metrics
from mtplab.records.canvas import CanvasRequest
from mtplab.records.statistics import Interval, prompt_bootstrap

Key = tuple[str, int]  # prompt id, seed
Runs = dict[Key, CanvasRequest]
Measure = Callable[[CanvasRequest], m.Pair]

# Lower is better for these; the sign turns a difference into a loss.
LOSSES: dict[str, tuple[float, Measure]] = {
    "nll": (1.0, lambda r: (0.0, 0.0) if r.nll is None else (r.nll, r.scored)),
    "repetition": (1.0, lambda r: m.repetition(r.tokens)),
    "distinct_2": (-1.0, lambda r: m.distinct(r.tokens, 2)),
}


def identity(request: CanvasRequest) -> dict[str, Any]:
    """What makes an arm, from the effective settings that every request carries."""
    s = request.settings
    return {"steps": s["steps"], "sampler": s["sampler"], "canvas": s["canvas"]}


def summarize(requests: Iterable[CanvasRequest]) -> list[dict[str, Any]]:
    """One JSON-able row per corpus, sampler, canvas length and number of steps, in this order.

    Raises RequestError where one arm holds a prompt and seed twice.
    """
    groups: dict[tuple, Runs] = {}
    for r in requests:
        who = identity(r)
        runs = groups.setdefault((r.corpus, who["sampler"], who["canvas"], who["steps"]), {})
        key = (r.id, int(r.settings["seed"]))
        if key in runs:
            raise RequestError(f"prompt {r.id} with seed {key[1]} is stored twice in one arm; summarize each once")
        runs[key] = r
    return [_row(name, runs, _longest(name, groups)) for name, runs in groups.items()]


def _longest(name: tuple, groups: Mapping[tuple, Runs]) -> tuple[int, Runs]:
    steps = max(other[3] for other in groups if other[:3] == name[:3])
    return steps, groups[(*name[:3], steps)]


def _row(name: tuple, runs: Runs, longest: tuple[int, Runs]) -> dict[str, Any]:
    corpus, sampler, canvas, steps = name
    requests = list(runs.values())
    per_forward, used = m.tokens_per_forward(requests), m.steps_used(requests)
    row = {
        "corpus": corpus,
        "steps": steps,
        "sampler": sampler,
        "canvas": canvas,
        "prompts": len({k[0] for k in runs}),
        "seeds": len({k[1] for k in runs}),
        "canvases": len(used),
        "tokens": m.emitted_total(requests),
        "tok_s": m.tok_s(requests),
        "positions_s": m.positions_s(requests),
        "step_ms": m.step_ms(requests),
        "commit_ms": m.commit_ms(requests),
        "forwards": m.forwards(requests)._asdict(),
        "tokens_per_forward": per_forward.without_prefill,
        "tokens_per_forward_with_prefill": per_forward.with_prefill,
        "emitted_per_forward": per_forward.emitted,
        "steps_used": float(np.mean(used)) if used else None,
        "steps_histogram": m.steps_histogram(requests),
        "cap_share": m.cap_share(requests),
        "stops": {k: sum(c.stop == k for r in requests for c in r.canvases) for k in ("stable", "accepted", "cap")},
        "loop_share": metrics.loop_share(requests),
    }
    return row | _quality(runs) | _against(steps, runs, longest)


def _quality(runs: Runs) -> dict[str, Any]:
    """What needs no other run."""
    return {
        "nll": pooled(runs, LOSSES["nll"][1]).to_json(),
        "distinct_1": pooled(runs, lambda r: m.distinct(r.tokens, 1)).to_json(),
        "distinct_2": pooled(runs, LOSSES["distinct_2"][1]).to_json(),
        "repetition": pooled(runs, LOSSES["repetition"][1]).to_json(),
    }


def pooled(runs: Runs, measure: Measure) -> Interval:
    """Sums over everything, divided once; the interval resamples prompts, with all their seeds."""
    sums: dict[str, list[float]] = {}
    for (prompt, _), request in runs.items():
        top, bottom = measure(request)
        entry = sums.setdefault(prompt, [0.0, 0.0])
        entry[0], entry[1] = entry[0] + top, entry[1] + bottom
    return prompt_bootstrap([s[0] for s in sums.values()], [s[1] for s in sums.values()])


def _against(steps: int, runs: Runs, longest: tuple[int, Runs]) -> dict[str, Any]:
    """The same prompts and seeds in the longest run. The longest itself is compared with nothing."""
    most, base = longest
    if steps == most:
        none = Interval(None, note="the longest run").to_json()
        floor = {k: _floor(base, sign, measure) for k, (sign, measure) in LOSSES.items()}
        return {"agreement": none, "edit_distance": none, "loss": None, "noise_floor": floor, "inside_noise": None}
    shared = [k for k in runs if k in base]
    pairs = {k: (runs[k].tokens, base[k].tokens) for k in shared}
    loss, inside = {}, []
    for name, (sign, measure) in LOSSES.items():
        lost = difference({k: runs[k] for k in shared}, base, sign, measure)
        loss[name] = lost.to_json()
        inside.append(_inside(lost, _floor(base, sign, measure)))
    known = [x for x in inside if x is not None]
    return {
        "agreement": _paired(pairs, m.agreement).to_json(),
        "edit_distance": _paired(pairs, m.edit_distance).to_json(),
        "loss": loss,
        "noise_floor": None,
        "inside_noise": all(known) if len(known) == len(LOSSES) else None,
    }


def _paired(pairs: Mapping[Key, tuple], measure: Callable[..., m.Pair]) -> Interval:
    sums: dict[str, list[float]] = {}
    for (prompt, _), (a, b) in pairs.items():
        top, bottom = measure(a, b)
        entry = sums.setdefault(prompt, [0.0, 0.0])
        entry[0], entry[1] = entry[0] + top, entry[1] + bottom
    return prompt_bootstrap([s[0] for s in sums.values()], [s[1] for s in sums.values()])


def difference(runs: Runs, base: Runs, sign: float, measure: Measure) -> Interval:
    """Mean over prompts of the loss against the longest run: positive is worse. Its interval is over prompts."""
    return _mean({k: sign * d for k in runs if (d := _gap(measure(runs[k]), measure(base[k]))) is not None})


def _gap(a: m.Pair, b: m.Pair) -> float | None:
    return a[0] / a[1] - b[0] / b[1] if a[1] and b[1] else None


def _mean(by_key: Mapping[Key, float]) -> Interval:
    per_prompt: dict[str, list[float]] = {}
    for (prompt, _), value in by_key.items():
        per_prompt.setdefault(prompt, []).append(value)
    means = [float(np.mean(v)) for v in per_prompt.values()]
    return prompt_bootstrap(means, np.ones(len(means)))


def _floor(base: Runs, sign: float, measure: Measure) -> dict[str, Any]:
    """One seed of the longest run against the next, prompt by prompt: what other noise alone changes."""
    seeds = sorted({s for _, s in base})
    gaps = {}
    for a, b in pairwise(seeds):
        for prompt in dict.fromkeys(p for p, _ in base):
            if (prompt, a) in base and (prompt, b) in base:
                gap = _gap(measure(base[prompt, a]), measure(base[prompt, b]))
                if gap is not None:
                    gaps[prompt, a] = sign * gap
    if len(seeds) < 2:
        return Interval(None, note="one seed: no noise floor").to_json()
    return _mean(gaps).to_json()


def reach(floor: Mapping[str, Any]) -> float | None:
    """How far from 0 the floor gets: the largest of its value and ends."""
    ends = [abs(x) for k in ("value", "low", "high") if (x := floor.get(k)) is not None]
    return max(ends, default=None)


def _inside(loss: Interval, floor: Mapping[str, Any]) -> bool | None:
    limit = reach(floor)
    return None if loss.value is None or limit is None else loss.value <= limit


# Recommending --------------------------------------------------------------------------------------------------


def recommend(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per corpus, sampler and canvas length: the fewest steps whose losses (nll, repetition, distinct_2) are all
    inside the noise floor, and which stay inside with more steps. None where there is no floor, with the reason.
    """
    out = []
    for name in dict.fromkeys((r["corpus"], r["sampler"], r["canvas"]) for r in rows):
        group = [r for r in rows if (r["corpus"], r["sampler"], r["canvas"]) == name]
        steps, why = _fewest(sorted(group, key=lambda r: -r["steps"]))
        out.append({"corpus": name[0], "sampler": name[1], "canvas": name[2], "steps": steps, "reason": why})
    return out


def _fewest(group: Sequence[Mapping[str, Any]]) -> tuple[int | None, str]:
    longest, *shorter = group
    if not shorter:
        return None, "one number of steps: nothing to compare"
    if longest["seeds"] < 2:
        return None, "one seed: no noise floor; run two or more"
    found = longest
    for row in shorter:
        if row["inside_noise"] is None:
            return None, "a loss could not be measured"
        if not row["inside_noise"]:
            break
        found = row
    if found is longest:
        return longest["steps"], f"{shorter[0]['steps']} steps lose more than two seeds of {longest['steps']} differ by"
    return found["steps"], f"its losses are inside what two seeds of {longest['steps']} steps differ by"


def recommended_steps(recommendations: Sequence[Mapping[str, Any]]) -> int | None:
    """One number for the whole run: the most that any text needs; None where any is unknown."""
    steps = [r["steps"] for r in recommendations]
    return None if not steps or None in steps else max(steps)


def frontier(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of rows that no other row beats in both tokens per forward and nll (lower is better)."""
    points = [(i, r["tokens_per_forward"], (r["nll"] or {}).get("value")) for i, r in enumerate(rows)]
    known = [p for p in points if p[1] is not None and p[2] is not None]
    return [
        i for i, fast, nll in known
        if not any(f >= fast and n <= nll and (f > fast or n < nll) for _, f, n in known)
    ]  # fmt: skip
