"""One row per arm: the table a sweep prints, made from stored records alone.

`summarize` takes one corpus in one mode (greedy or sampled) and refuses to mix. Every arm is compared with the
baseline on the same prompts. What a reader could be misled by is part of the row: loops (`marked`), an order of trials
that cannot separate the arm from the machine's state (`order`), drift, the noise of an arm against itself, prompts
that only one side has (`unpaired`), and `warnings` in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtplab.errors import RequestError
from mtplab.records import metrics
from mtplab.records import statistics as stats
from mtplab.records.types import Request

ONE_AFTER_THE_OTHER = "undecided: the arms ran one after the other"


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm's requests, and the same by prompt and round: runs[prompt][round]."""

    name: str
    requests: list[Request]
    runs: dict[str, dict[int, Request]]

    @property
    def rounds(self) -> list[int]:
        return sorted({r for by_round in self.runs.values() for r in by_round})


def summarize(
    requests_by_arm: Mapping[str, Sequence[Request]],
    baseline: str = "baseline",
    costs: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """One JSON-able row per arm, in the order given, for ONE corpus and mode.

    `costs` is what `calibrate` measured (see `metrics.predicted_ratio_of`); without it `predicted_ratio` is None.
    Where the baseline did not run, everything that compares is None. Raises RequestError for mixed corpora or modes,
    for a prompt and round stored twice, for one prompt id with two lengths, and for arms of which one found more of
    the prompt in a cache.
    """
    arms = [_collect(name, requests) for name, requests in requests_by_arm.items()]
    everything = [r for arm in arms for r in arm.requests]
    corpus, mode = _only("corpus", (r.corpus for r in everything)), _only("mode", map(request_mode, everything))
    base = next((a for a in arms if a.name == baseline and a.requests), None)
    rows = []
    for arm in arms:
        if base is not None:
            _check_pairs(base, arm)
        head = {"corpus": corpus, "mode": mode, "arm": arm.name}
        rows.append(head | _counted(arm) | _compared(base, arm) | _equality(base, arm, mode) | _predicted(arm, costs))
        rows[-1]["warnings"] = _warnings(base, arm, rows[-1])
    return rows


def request_mode(request: Request) -> str:
    """ "greedy" or "sampled": the recorded mode, else by the temperature (absent: greedy)."""
    return request.settings.get("mode") or ("sampled" if request.settings.get("temp") else "greedy")


# Collecting and refusing ---------------------------------------------------------------------------------------


def _collect(name: str, requests: Sequence[Request]) -> Arm:
    runs: dict[str, dict[int, Request]] = {}
    for r in requests:
        by_round = runs.setdefault(r.id, {})
        index = int(r.settings.get("round", len(by_round)))
        if index in by_round:
            raise RequestError(
                f"arm {name} holds prompt {r.id} in round {index} twice; summarize each stored request once"
            )
        by_round[index] = r
    return Arm(name, list(requests), runs)


def _only(what: str, values: Iterable[str]) -> str | None:
    found = sorted(set(values))
    if len(found) > 1:
        raise RequestError(
            f"a summary is of one {what}, but the requests have {', '.join(found)}; summarize each apart"
        )
    return found[0] if found else None


def _check_pairs(base: Arm, arm: Arm) -> None:
    """Arms are comparable only if they processed the same prompt tokens, none of them from a cache on one side."""
    for prompt in base.runs.keys() & arm.runs.keys():
        one, two = ([r.prefill for r in a.runs[prompt].values()] for a in (base, arm))
        _same(prompt, base, arm, [p.prompt_tokens for p in one], [p.prompt_tokens for p in two], "prompt tokens")
        cached = [p.cached_tokens for p in one], [p.cached_tokens for p in two]
        _same(prompt, base, arm, *cached, "prompt tokens from a cache")


def _same(prompt: str, base: Arm, arm: Arm, one: Sequence[int], two: Sequence[int], what: str) -> None:
    if len({*one, *two}) <= 1:
        return
    a, b = ("/".join(map(str, sorted(set(x)))) for x in (one, two))
    raise RequestError(
        f"prompt {prompt} had {a} {what} in {base.name} and {b} in {arm.name}; rerun both with the same prompt and a "
        "cold cache"
    )


# What an arm did -----------------------------------------------------------------------------------------------


def _counted(arm: Arm) -> dict[str, Any]:
    """Everything that needs no second arm."""
    requests, c = arm.requests, metrics.counts(arm.requests)
    acceptance, forward = metrics.draft_acceptance(requests), metrics.tokens_per_forward(requests)
    positions, loops = metrics.position_counts(requests), metrics.loop_share(requests)
    return {
        "prompts": len(arm.runs),
        "rounds": len(arm.rounds),
        "tokens": metrics.emitted_total(requests),
        "passes": int(c.accepted.size),
        "proposed": int(c.proposed.sum()),
        "examined": int(c.examined.sum()),
        "accepted": int(c.accepted.sum()),
        "tok_s": metrics.tok_s(requests),
        "tokens_per_verify": _over_prompts(arm, lambda c: (c.accepted + 1).sum(), lambda c: c.accepted.size),
        "accepted_per_verify": metrics.accepted_per_verify(requests),
        "emitted_per_verify": metrics.emitted_per_verify(requests),
        "draft_acceptance": acceptance.value,
        "draft_acceptance_depth": acceptance.depth,
        "draft_acceptance_interval": _over_prompts(arm, lambda c: c.accepted.sum(), lambda c: c.proposed.sum()),
        "examined_acceptance": metrics.examined_acceptance(requests),
        "survival": metrics.survival(requests),
        "conditional": metrics.conditional(requests),
        "conditional_wilson": [
            stats.wilson(int(a), int(n)).to_json() for a, n in zip(positions.accepted, positions.reached, strict=True)
        ]
        or None,
        "draft_share": metrics.draft_share(requests),
        "tokens_per_forward_with_prefill": forward.with_prefill,
        "tokens_per_forward_without_prefill": forward.without_prefill,
        "mean_depth": metrics.mean_depth(requests),
        "loop_share": loops,
        "marked": loops is not None and loops > metrics.LOOP_LIMIT,
        "reproducible": _reproducible(arm),
    }


Total = Callable[[metrics.Counts], float]


def _over_prompts(arm: Arm, top: Total, bottom: Total) -> dict[str, Any]:
    """A pooled ratio with its prompt bootstrap; the rounds of a prompt are summed before."""
    sums = [metrics.counts(list(by_round.values())) for by_round in arm.runs.values()]
    return stats.prompt_bootstrap([top(c) for c in sums], [bottom(c) for c in sums]).to_json()


def _reproducible(arm: Arm) -> bool | None:
    """Do the rounds of each prompt agree token for token? None with one round. Sampled runs compare equal seeds only.

    This says nothing about equality with the baseline: a wrong decoder can be wrong the same way every time.
    """
    outputs: dict[tuple[str, Any], list[tuple[int, ...]]] = {}
    for r in arm.requests:
        seed = r.settings.get("seed") if request_mode(r) == "sampled" else None
        outputs.setdefault((r.id, seed), []).append(r.tokens)
    repeated = [x for x in outputs.values() if len(x) > 1]
    return all(len(set(x)) == 1 for x in repeated) if repeated else None


def _predicted(arm: Arm, costs: Mapping[str, Any] | None) -> dict[str, Any]:
    if costs is not None and arm.name.startswith("ngram"):
        # The drafts that were timed are the head's; looking up a prompt takes next to nothing.
        costs = {**costs, "draft_ms": {int(m) - 1: 0.0 for m in costs["verify_ms"] if int(m) > 1}}
    return {"predicted_ratio": None if costs is None else metrics.predicted_ratio_of(arm.requests, costs)}


# Against the baseline ------------------------------------------------------------------------------------------


def _compared(base: Arm | None, arm: Arm) -> dict[str, Any]:
    """Speed against the baseline, and what could make the comparison false."""
    floor = _noise(arm)
    row: dict[str, Any] = {"tpot_ms": _median_tpot(arm), "noise_floor": floor.to_json()}
    if base is None or base is arm:
        return row | _nothing_to_compare(base, arm)
    ratio = stats.paired_bootstrap(metrics.log_ratios(base.requests, arm.requests, metrics.tpot_ms))
    whole = stats.paired_bootstrap(metrics.log_ratios(base.requests, arm.requests, metrics.latency_ms))
    order, rounds = _order(base, arm), _paired_rounds(base, arm)
    undecided = order == "one after the other" and len(arm.rounds) > 1
    difference = stats.drift(*_centred(rounds))
    own = stats.drift(*_centred(_tpots(arm)))
    return row | {
        "tpot_ratio": ratio.to_json(),
        "e2e_ratio": whole.to_json(),
        "verdict": ONE_AFTER_THE_OTHER if undecided else stats.verdict(ratio, floor, _noise(base)),
        "order": order,
        "drift": {"difference": difference.to_json(), "own": own.to_json()},
        "drift_flag": difference.flag or own.flag,
        "unpaired": len(base.runs.keys() ^ arm.runs.keys()),
    }


def _nothing_to_compare(base: Arm | None, arm: Arm) -> dict[str, Any]:
    """The baseline's own row, and every row where there is no baseline."""
    ratio = stats.Interval(1.0, n=len(arm.runs), note="the baseline itself") if base else stats.Interval(None)
    own = stats.drift(*_centred(_tpots(arm)))
    return {
        "tpot_ratio": ratio.to_json(),
        "e2e_ratio": ratio.to_json(),
        "verdict": None,
        "order": None,
        "drift": {"difference": None, "own": own.to_json()},
        "drift_flag": own.flag,
        "unpaired": 0 if base else len(arm.runs),
    }


RoundValues = dict[str, dict[int, float]]  # prompt -> round -> value


def _tpots(arm: Arm) -> RoundValues:
    timed = {p: {i: metrics.tpot_ms(r) for i, r in by_round.items()} for p, by_round in arm.runs.items()}
    return {p: {i: t for i, t in by_round.items() if t is not None} for p, by_round in timed.items()}


def _noise(arm: Arm) -> stats.Interval:
    return stats.noise_floor(_tpots(arm))


def _median_tpot(arm: Arm) -> float | None:
    """Median over prompts of each prompt's median over rounds."""
    values = list(metrics.per_prompt(arm.requests, metrics.tpot_ms).values())
    return float(np.median(values)) if values else None


def _paired_rounds(base: Arm, arm: Arm) -> RoundValues:
    """prompt -> round -> TPOT(baseline) / TPOT(arm), where both ran in that round."""
    one, two = _tpots(base), _tpots(arm)
    return {p: {i: one[p][i] / t for i, t in two[p].items() if i in one[p]} for p in two if p in one}


def _centred(values: RoundValues) -> tuple[list[int], list[float]]:
    """(rounds, logs less their prompt's mean): what is left when easy and hard prompts are taken out."""
    rounds, logs = [], []
    for by_round in values.values():
        if by_round:
            x = np.log(list(by_round.values()))
            rounds += list(by_round)
            logs += (x - x.mean()).round(12).tolist()  # equal times stay ties
    return rounds, logs


def _order(base: Arm, arm: Arm) -> str | None:
    """ "one after the other" if all of one arm started before any of the other: then time and arm are one thing."""
    one, two = ([r.prefill.start_ns for r in a.requests] for a in (base, arm))
    if not one or not two:
        return None
    return "one after the other" if max(one) < min(two) or max(two) < min(one) else "interleaved"


# Equality ------------------------------------------------------------------------------------------------------


def _equality(base: Arm | None, arm: Arm, mode: str | None) -> dict[str, Any]:
    """Where greedy output leaves the baseline's, by prompt, in the first round both ran.

    first_divergence: the smallest index over prompts. equal_through: the largest n for which the first n tokens of
    every prompt are shown equal. Sampled streams differ by design and are not compared.
    """
    if base is None or mode == "sampled" or not (pairs := _first_rounds(base, arm)):
        return dict.fromkeys(("equal_prompts", "first_divergence", "equal_through", "divergence_curve"))
    found = [metrics.request_divergence(a, b) for a, b in pairs]
    indices = [d.index for d in found if d.index is not None]
    curve = stats.kaplan_meier([(d.index, d.compared) for d in found])
    return {
        "equal_prompts": len(found) - len(indices),
        "first_divergence": min(indices, default=None),
        "equal_through": _equal_through(pairs, found),
        "divergence_curve": [[s.index, s.survival] for s in curve],
    }


def _first_rounds(base: Arm, arm: Arm) -> list[tuple[Request, Request]]:
    pairs = []
    for prompt, by_round in arm.runs.items():
        if common := base.runs.get(prompt, {}).keys() & by_round.keys():
            pairs.append((base.runs[prompt][min(common)], by_round[min(common)]))
    return pairs


def _equal_through(pairs: Sequence[tuple[Request, Request]], found: Sequence[metrics.Divergence]) -> int:
    """A pair that ended equal by itself bounds nothing; a divergence or a cap does. All ended: the longest output."""
    bounds = [d.compared if d.index is None else d.index for d in found]
    ended = [
        d.index is None and a.finish != "cap" and b.finish != "cap" for (a, b), d in zip(pairs, found, strict=True)
    ]
    limits = [n for n, over in zip(bounds, ended, strict=True) if not over]
    return min(limits) if limits else max(bounds)


# Warnings ------------------------------------------------------------------------------------------------------


def _warnings(base: Arm | None, arm: Arm, row: Mapping[str, Any]) -> list[str]:
    """One sentence for each thing that limits what the row shows."""
    pairs = [] if base is None or base is arm else _first_rounds(base, arm)
    unequal = sum(len(a.tokens) != len(b.tokens) for a, b in pairs)
    steps = {r.prefill.step for pair in pairs for r in pair}
    found = {
        f"loop_share is {row['loop_share'] or 0:.2f}: the text repeats itself, and repeats are accepted": row["marked"],
        "the rounds of one prompt gave different tokens": row["reproducible"] is False,
        "speed moves with the round (heat or load)": row["drift_flag"],
        "the arm and the baseline ran one after the other": row["order"] == "one after the other",
        f"{unequal} of {len(pairs)} outputs differ in length: e2e_ratio compares unequal work": unequal,
        f"{row['unpaired']} prompts ran in only one of baseline and {arm.name}": row["unpaired"] and base,
        f"prefill chunks differ: {sorted(steps)} tokens": len(steps) > 1,
        "the baseline did not run": base is None,
    }
    return [text for text, holds in found.items() if holds]
