"""What a run shows, in plain words, one corpus and mode at a time; every claim carries its bound."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mtplab.records.statistics import NO_DIFFERENCE
from mtplab.records.summary import summarize
from mtplab.report.results import Results
from mtplab.report.tables import interval, number

Row = Mapping[str, Any]
FIXED = re.compile(r"(depth|ngram)[1-9]\d*")


def conclusions(results: Results) -> list[str]:
    """One short paragraph per corpus and mode, in the order of the tables."""
    return [text for mode, corpus in results.requests if (text := conclude(results, mode, corpus))]


def conclude(results: Results, mode: str, corpus: str) -> str:
    """Which depth pays on this text, how adaptive depth does, and how far greedy output is equal."""
    rows = results.group(mode, corpus)
    parts = [*_speed(results, rows, mode, corpus), *(_equality(rows) if mode == "greedy" else ())]
    return f"{corpus}, {mode}: " + " ".join(parts) if parts else ""


def _speed(results: Results, rows: Sequence[Row], mode: str, corpus: str) -> list[str]:
    timed = [r for r in rows if r["arm"] != "baseline" and _value(r) is not None]
    if not timed:
        return ["no arm could be timed against the baseline."]
    usable = [r for r in timed if not r.get("marked")]
    fixed = [r for r in usable if FIXED.fullmatch(r["arm"])]
    parts = []
    if len(usable) < len(timed):
        left_out = [r["arm"] for r in timed if r.get("marked")]
        parts.append(f"Left out, since more than 0.3 of their text repeats itself: {', '.join(left_out)}.")
    if fixed:
        parts.append(_best(max(fixed, key=_value)))
    adaptive = next((r for r in usable if r["arm"] == "adaptive"), None)
    if adaptive is not None:
        parts.append(_adaptive(adaptive))
        parts += _kept(results, fixed, mode, corpus)
    return parts


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _value(row: Row) -> float | None:
    return (row.get("tpot_ratio") or {}).get("value")


def _best(row: Row) -> str:
    name, size = row["arm"], f"{count(row['prompts'], 'prompt')}, {count(row['rounds'], 'round')}"
    shown, verdict = interval(row["tpot_ratio"]), row.get("verdict")
    guess = f"; predicted {number(row['predicted_ratio'])}" if row.get("predicted_ratio") is not None else ""
    if verdict == "faster":
        return f"{name} pays: {shown} times the baseline's tokens per second after the first ({size}{guess})."
    if verdict == "slower":
        return f"No fixed arm pays: the best, {name}, runs at {shown} of the baseline's speed ({size}{guess})."
    reason = f"{verdict or 'no interval'}{_floor(row)}"
    return f"No fixed arm is shown to pay: the best, {name}, is at {shown}: {reason} ({size}{guess})."


def _floor(row: Row) -> str:
    """An interval that leaves out 1 and still shows nothing needs its reason."""
    low, high = (row["tpot_ratio"].get(k) for k in ("low", "high"))
    clear = low is not None and high is not None and (low > 1 or high < 1)
    return " (an arm against itself differs as much)" if clear and row.get("verdict") == NO_DIFFERENCE else ""


def _adaptive(row: Row) -> str:
    depth = f", mean depth {number(row['mean_depth'], 1)}" if row.get("mean_depth") is not None else ""
    verdict = "" if row.get("verdict") in (None, "faster", "slower") else f": {row['verdict']}{_floor(row)}"
    return f"Adaptive depth: {interval(row['tpot_ratio'])}{depth}{verdict}."


def _kept(results: Results, fixed: Sequence[Row], mode: str, corpus: str) -> list[str]:
    """Adaptive against the best fixed arm, paired, where that one beats the baseline."""
    if not fixed or max(map(_value, fixed)) <= 1:
        return []
    best = max(fixed, key=_value)["arm"]
    arms = results.requests[mode, corpus]
    row = summarize({best: arms[best], "adaptive": arms["adaptive"]}, baseline=best)[1]
    doubt = "" if row["verdict"] in (None, "faster", "slower") else f": {row['verdict']}{_floor(row)}"
    return [f"That is {interval(row['tpot_ratio'])} of {best}{doubt}."]


def _equality(rows: Sequence[Row]) -> list[str]:
    others = [r for r in rows if r["arm"] != "baseline" and r.get("equal_prompts") is not None]
    if not others:
        return []
    leaving = [r for r in others if r.get("first_divergence") is not None]
    control = next((r for r in leaving if r["arm"] == "depth0"), None)
    parts = []
    if control is not None:
        parts.append(
            f"The control depth0 leaves the baseline at token {control['first_divergence']}: "
            "the loop itself differs, so no other difference can be read."
        )
    if not leaving:
        through, prompts = min(r["equal_through"] for r in others), min(r["prompts"] for r in others)
        return [
            *parts,
            f"Greedy output of every arm equals the baseline's through {through} tokens, {prompts} prompts.",
        ]
    where = "; ".join(_leaves(r) for r in leaving if r is not control)
    return [*parts, f"Greedy output leaves the baseline's: {where}."] if where else parts


def _leaves(row: Row) -> str:
    different = row["prompts"] - row["equal_prompts"]
    share = f"{different} of {count(row['prompts'], 'prompt')}"
    return f"{row['arm']} at token {row['first_divergence']} at the earliest, {share}"
