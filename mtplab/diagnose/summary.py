"""A diagnosis as one document of plain values: what `mtplab diverge -o json` prints and its page draws.

Every number is a pure function of what the lanes counted; nothing is measured here.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import Any

from mtplab.diagnose.diverge import AGAIN, Diagnosis
from mtplab.diagnose.seen import Leave, Seen
from mtplab.diagnose.verdict import VERDICTS, Evidence, Verdict, gravest
from mtplab.records.metrics import divergence_per_1k
from mtplab.records.statistics import kaplan_meier

SCHEMA = 1
MANTISSA = {"float32": 23, "bfloat16": 7, "float16": 10}
EDGES = [10.0 ** (d + q / 4) for d in range(-8, 4) for q in range(4)]  # of a histogram in logits
ULP_EDGES = [2.0**k for k in range(25)]  # and in units in the last place


def ulps(value: float, at: float, dtype: str) -> float | None:
    """`value` in units of the distance between neighbouring numbers of `dtype` around `at`."""
    if dtype not in MANTISSA or at == 0 or not math.isfinite(at):
        return None
    return value / 2.0 ** (math.floor(math.log2(abs(at))) - MANTISSA[dtype])


def percentile(value: float, ordered: Sequence[float]) -> float | None:
    """Share of the sorted values that are at most `value`."""
    return bisect.bisect_right(ordered, value) / len(ordered) if ordered else None


def histogram(values: Sequence[float], edges: Sequence[float] = EDGES) -> dict[str, list[float]]:
    """Counts over bins that are even in the logarithm; what is below the first edge (exact ties too) falls into it."""
    edges = list(edges)
    counts = [0] * (len(edges) + 1)
    for v in values:
        counts[bisect.bisect_right(edges, v)] += 1
    return {"edges": edges, "counts": counts}


def document(found: Diagnosis) -> dict[str, Any]:
    """The whole result. The keys of the first block are stable; `arms` holds the same for every arm."""
    arms = [arm_row(name, found) for name in found.arms]
    leaves = [x for a in arms for x in a["divergences"]]
    main = leading(found)
    verdict = gravest([a["verdict"] for a in arms])
    grave = next((a for a in arms if a["verdict"] == verdict), None)
    margins = [m for p in found.prompts for m in p.margins]
    return {
        "schema": SCHEMA,
        "verdict": verdict,
        "reason": grave["reason"] if grave else "nothing was compared",
        "first_divergence": least(a["first_divergence"] for a in arms),
        "compared": sum(a["compared"] for a in arms),
        "gap": main.leave.gap if main and main.leave else None,
        "noise": main.noise if main else None,
        "noise_by_width": {str(w): n for w, n in main.replay_noise.items()} if main else {},
        "first_module": next((a["first_module"] for a in arms if a["first_module"]), None),
        "explained_by": list(found.explained.by) if found.explained else [],
        "explained": explained_row(found),
        "controls": controls(found),
        "state": state_row([s for n in found.arms for s in lanes(found, n)], found, list(found.arms)),
        "looked": looked(found),
        "simulated": found.simulated,
        "dtype": found.dtype,
        "arms": arms,
        "divergences": leaves,
        "margins": histogram(margins),
        "gaps": gaps_row(leaves),
        "rows_that_differ": spread([d for n in found.arms for s in lanes(found, n) for d in s.row_diffs]),
        "growth": main.by_layer if main else [],
        "kinds": main.by_kind if main else {},
        "prompts": [{"id": p.text.id, "tokens": len(p.tokens), "finish": p.cut} for p in found.prompts],
    }  # fmt: skip


def gaps_row(leaves: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The gaps of all divergences of all arms, in logits and in ulps of the dtype at the row's largest logit."""
    gaps, units = [x["gap"] for x in leaves], [x["gap_ulps"] for x in leaves if x["gap_ulps"] is not None]
    logits, ulp = spread(gaps), spread(units)
    return {
        "count": len(gaps),
        "median": logits["median"],
        "largest": logits["largest"],
        "median_ulps": ulp["median"],
        "largest_ulps": ulp["largest"],
        "logits": histogram(gaps),
        "ulps": histogram(units, ULP_EDGES),
    }


def layer_rows(seen: Sequence[Seen], found: Diagnosis) -> list[dict[str, Any]]:
    """Per layer: states after passes that were equal in every bit, and not; how far off at most. An ulp of a row is
    taken at the size of the row."""
    audited, out = sum(s.state_equal + s.state_rounded for s in seen), []
    for i, path in enumerate(found.paths):
        differ = sum(s.layers.get(i, (0, 0.0))[0] for s in seen)
        most = max((s.layers.get(i, (0, 0.0))[1] for s in seen), default=0.0)
        units = most * 2.0 ** MANTISSA[found.dtype] if found.dtype in MANTISSA else None
        out.append({
            "layer": path, "equal": audited - differ, "differ": differ, "largest_relative": most, "largest_ulps": units
        })  # fmt: skip
    return out


def explained_row(found: Diagnosis) -> dict[str, Any] | None:
    """What the intervention found, without the list of everything it tried."""
    if found.explained is None:
        return None
    return {k: v for k, v in found.explained.to_json().items() if k != "tried"} | {"sentence": found.explained.sentence}


def lanes(found: Diagnosis, arm: str) -> list[Seen]:
    return [p.lanes[arm] for p in found.prompts]


def leading(found: Diagnosis) -> Evidence | None:
    """The evidence that the first block speaks of: of the gravest arm, with a divergence if there is one."""
    order = sorted(
        found.arms,
        key=lambda a: VERDICTS.index(arm_verdict(a, found).verdict),
    )
    every = [e for a in order for e in found.evidence.get(a, [])]
    return next((e for e in every if e.leave is not None), every[0] if every else None)


def arm_verdict(arm: str, found: Diagnosis) -> Verdict:
    """The gravest of its prompts'."""
    every = list(found.verdicts[arm].values())
    grave = gravest([v.verdict for v in every])
    return next((v for v in every if v.verdict == grave), Verdict("equal", "nothing was compared"))


def first_index(seen: Seen) -> int | None:
    """The first token that differs from the baseline's, also where a fault of the loop made it differ."""
    places = [x.position for x in seen.leaves[:1]]
    places += [f.position for f in seen.faults if f.kind == "selection"]
    return min(places, default=None)


def arm_row(arm: str, found: Diagnosis) -> dict[str, Any]:
    """One arm over all prompts."""
    seen, evidence = lanes(found, arm), found.evidence.get(arm, [])
    indices = [(first_index(s), s.compared) for s in seen]
    verdict = arm_verdict(arm, found)
    with_leave = next((e for e in evidence if e.leave is not None), None)
    main = with_leave or (evidence[0] if evidence else None)
    same = [i for i, _ in indices if i is not None]
    positions, compared = [[x.position for x in s.leaves] for s in seen], [s.compared for s in seen]
    if verdict.verdict == "equal":
        verdict_text = f"equal through {min((n for _, n in indices), default=0)} tokens over {len(seen)} prompts"
    else:
        verdict_text = verdict.reason
    return {
        "arm": arm,
        "verdict": verdict.verdict,
        "reason": verdict_text,
        "prompts": len(seen),
        "prompts_left": len(same),
        "first_divergence": min(same, default=None),
        "equal_through": min((n if i is None else i for i, n in indices), default=0),
        "compared": sum(compared),
        "divergence_per_1k": divergence_per_1k(positions, compared),
        "gap": with_leave.leave.gap if with_leave else None,
        "noise": main.noise if main else None,
        "first_module": verdict.module or (main.first_module if main else None),
        "module_at_fault": verdict.module if verdict.verdict == "logic" else None,
        "layer": layer_name(verdict, found),
        "first_bad_verify": verdict.verify if verdict.verdict == "logic" else None,
        "curve": [[s.index, s.survival] for s in kaplan_meier(indices)],
        "state": state_row(seen, found, [arm]),
        "by_prompt": {p.text.id: prompt_row(found.verdicts[arm][p.text.id], p.lanes[arm]) for p in found.prompts},
        "divergences": [leave_row(arm, p.text.id, x, found) for p in found.prompts for x in p.lanes[arm].leaves],
    }  # fmt: skip


def least(values: Iterable[int | None]) -> int | None:
    return min((v for v in values if v is not None), default=None)


def prompt_row(verdict: Verdict, seen: Seen) -> dict[str, Any]:
    return {"verdict": verdict.verdict, "first_divergence": first_index(seen), "compared": seen.compared}


def leave_row(arm: str, prompt: str, leave: Leave, found: Diagnosis) -> dict[str, Any]:
    return {
        "arm": arm, "prompt": prompt, "position": leave.position, "verify": leave.verify, "rows": leave.depth + 1,
        "baseline": [leave.baseline.first, leave.baseline.second], "baseline_gap": leave.baseline.gap,
        "arm_top2": [leave.arm.first, leave.arm.second], "arm_gap": leave.arm.gap,
        "gap": leave.gap, "gap_ulps": ulps(leave.gap, leave.logit, found.dtype), "row_diff": leave.row_diff,
        "percentile": percentile(leave.gap, found.sorted_margins()), "tie": leave.gap == 0,
    }  # fmt: skip


def layer_name(verdict: Verdict, found: Diagnosis) -> str | None:
    return None if verdict.layer is None else found.paths[verdict.layer]


def controls(found: Diagnosis) -> dict[str, Any]:
    """What must hold before a difference can be read: each true, false, or null where it was not run."""
    depth0 = [s for s in (p.lanes.get("depth0") for p in found.prompts) if s is not None]
    shadows = [e.seen for es in found.evidence.values() for e in es if e.seen.shadow_rows]
    same = [s.shadow_row_diff == 0 and s.shadow_states == s.shadow_states_equal for s in shadows]
    ones = [e.replay_noise[1] for es in found.evidence.values() for e in es if 1 in e.replay_noise]
    return {
        "baseline_reproducible": found.reproducible,
        "depth0_equal": not any(s.rows_differ or s.faults for s in depth0) if depth0 else None,
        "one_row_equal": max(ones) == 0 if ones else None,
        "equal_to_the_same_blocks": all(same) if same else None,
        "index_by_arm": {a: least(first_index(s) for s in lanes(found, a)) for a in found.arms},
        "index_moves_with_depth": moves(found),
    }  # fmt: skip


def moves(found: Diagnosis) -> bool | None:
    """Whether the first divergence of a prompt differs between depths; one that does not move hints at numerics. None
    with fewer than two fixed depths that leave."""
    told = None
    for p in found.prompts:
        places = [first_index(s) for n, s in p.lanes.items() if n.startswith(("depth", "scripted"))]
        places = [i for i in places if i is not None]
        if len(places) > 1:
            told = bool(told) or len(set(places)) > 1
    return told


def state_row(seen: Sequence[Seen], found: Diagnosis, arms: Sequence[str]) -> dict[str, Any]:
    """The audit over these lanes: passes whose whole state was equal in every bit, differed by rounding, was wrong."""
    worst = max((s.worst for s in seen if s.worst is not None), key=lambda d: d.relative, default=None)
    bad = [(v.verify, a, p, v) for a in arms for p, v in found.verdicts[a].items()
           if v.verdict == "logic" and v.kind in ("state", "rows", "head")]  # fmt: skip
    verify, arm, prompt, verdict = min(bad, key=lambda b: b[0]) if bad else (None,) * 4
    shadows = [e.seen for a in arms for e in found.evidence.get(a, []) if e.seen.shadow_states]
    first = None
    if bad:
        layer = layer_name(verdict, found)
        first = {"arm": arm, "prompt": prompt, "verify": verify, "layer": layer, "what": verdict.reason}
    return {
        "audited": sum(s.state_equal + s.state_rounded for s in seen),
        "equal": sum(s.state_equal for s in seen),
        "differ": sum(s.state_rounded for s in seen),
        "largest_relative": worst.relative if worst else 0.0,
        "largest_in": None if worst is None else f"{found.paths[worst.layer]} {worst.part}",
        "layers": layer_rows(seen, found),
        "beside_the_same_blocks": sum(s.shadow_states for s in shadows),
        "equal_to_the_same_blocks": sum(s.shadow_states_equal for s in shadows),
        "head_audited": sum(s.head_audited for s in seen),
        "clean": not bad and not any(v.kind == "state" for a in arms for v in found.verdicts[a].values()),
        "first_bad": first,
    }  # fmt: skip


def looked(found: Diagnosis) -> dict[str, Any]:
    """How far this run can speak: what happened in it at all."""
    seen = [s for n in found.arms for s in lanes(found, n)]
    return {
        "prompts": len(found.prompts),
        "tokens_per_prompt": max((len(p.tokens) for p in found.prompts), default=0),
        "arms": len(found.arms),
        "verifies": sum(sum(s.accepted.values()) for s in seen),
        "full_acceptance": sum(n for s in seen for (k, a), n in s.accepted.items() if k == a),
        "rejections": sum(n for s in seen for (k, a), n in s.accepted.items() if a < k),
        "second_rejects": sum(s.second_rejects for s in seen),
        "window_wrapped": any(s.wrapped for s in seen),
        "has_window": found.has_window,
        "closer_looks": sum(len(e) for e in found.evidence.values()),
        "closer_through": max((e.until for es in found.evidence.values() for e in es), default=None),
        "again": AGAIN in (found.prompts[0].lanes if found.prompts else {}),
    }  # fmt: skip


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Count, median, 99th percentile and largest: of the rows' largest |difference of logits|, of gaps."""
    x = sorted(values)
    at = lambda q: x[min(len(x) - 1, int(q * len(x)))] if x else None  # noqa: E731
    return {"rows": len(x), "median": at(0.5), "p99": at(0.99), "largest": x[-1] if x else None}
