"""A diagnosis in words: the verdict, the evidence for it, what the controls say, and how far it looked."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtplab.report.render import WIDTH, plain
from mtplab.report.tables import NONE, Column, printable
from mtplab.trials.files import clean, dumps, explained, write_json

Found = Mapping[str, Any]
MEANING = {
    "equal": "no arm left the baseline as far as was compared",
    "numeric": "the widths round differently and a near-tie fell the other way; state and loop are sound",
    "logic": "something is wrong that rounding cannot do",
    "length": "the same tokens, but the texts end at different places",
    "unknown": "the evidence does not decide",
}


def small(value: float | None, digits: int = 3) -> str:
    return NONE if value is None else f"{value:.{digits}g}"


def _first(row: Mapping[str, Any]) -> str:
    index, left = row["first_divergence"], row["prompts_left"]
    return NONE if index is None else f"{index} ({left} of {row['prompts']})"


def _audit(row: Mapping[str, Any]) -> str:
    state = row["state"]
    if not state["clean"]:
        bad = state["first_bad"]
        return (
            f"WRONG at verify {bad['verify']}" if bad else f"off by {small(state['largest_relative'], 2)}, why unknown"
        )
    if not state["differ"]:
        return f"{state['equal']} equal"
    return f"{state['equal']} equal, {state['differ']} within {small(state['largest_relative'], 2)}"


ARMS = (
    Column("arm", lambda r: r["arm"], right=False),
    Column("verdict", lambda r: r["verdict"], right=False),
    Column("first", _first),
    Column("equal through", lambda r: str(r["equal_through"])),
    Column("compared", lambda r: f"{r['compared']:,}"),
    Column("per 1k", lambda r: small(r["divergence_per_1k"])),
    Column("gap", lambda r: small(r["gap"])),
    Column("noise", lambda r: small(r["noise"])),
    Column("states after passes", _audit, right=False),
    Column("first module", lambda r: printable(r["module_at_fault"] or r["first_module"] or NONE), right=False),
)


def render(found: Found, form: str) -> str:
    """The document in one of the five formats; jsonl and csv hold one row per arm."""
    if form == "json":
        return dumps(found) + "\n"
    rows = [
        clean({k: v for k, v in r.items() if k not in ("divergences", "by_prompt", "curve")}) for r in found["arms"]
    ]
    if form in ("jsonl", "csv"):
        return plain(rows, (), form, None)
    head = f"{found['verdict']}: {MEANING[found['verdict']]}"
    parts = [_wrapped([head, *first_lines(found)], form), plain(found["arms"], ARMS, form, None)]
    parts += [_wrapped(evidence(found), form), _wrapped(bounds(found), form)]
    return "\n".join(p for p in parts if p)


def _wrapped(texts: Sequence[str], form: str) -> str:
    if form == "md":
        return "".join(f"- {printable(t)}\n" for t in texts)
    return "".join(
        textwrap.fill(printable(t), WIDTH, subsequent_indent="  ", break_on_hyphens=False) + "\n" for t in texts
    )


def first_lines(found: Found) -> list[str]:
    """Why, and in which arm."""
    grave = [a for a in found["arms"] if a["verdict"] == found["verdict"]]
    if found["verdict"] == "equal":
        least = min((a["equal_through"] for a in found["arms"]), default=0)
        return [f"all {len(grave)} arms equal through {least} tokens over {found['looked']['prompts']} prompts"]
    return [f"{a['arm']}: {a['reason']}" for a in grave[:3]]


def evidence(found: Found) -> list[str]:
    """The controls and what the closer look found, one sentence each."""
    controls, out = found["controls"], []
    again = "the same" if controls["baseline_reproducible"] else "NOT the same: this model is not reproducible"
    out.append(f"baseline run twice: {again}")
    if controls["depth0_equal"] is not None:
        out.append(f"depth0, the loop without drafts: {'equal' if controls['depth0_equal'] else 'NOT equal: the loop'}")
    if controls["equal_to_the_same_blocks"] is not None:
        same = "in every bit" if controls["equal_to_the_same_blocks"] else "NOT in every bit"
        out.append(f"the arm beside the same blocks fed without its loop and its roll-back: equal {same}")
    if found["noise_by_width"]:
        widths = ", ".join(f"{w}: {small(n)}" for w, n in found["noise_by_width"].items())
        out.append(f"noise of the logits by rows at once, from the one-token state: {widths}")
    if (first := next(iter(_worth_showing(found)), None)) is not None:
        out.append(describe(first))
    if (gaps := found["gaps"])["count"] > 1:
        text = (
            f"gaps of all {gaps['count']} divergences: median {small(gaps['median'])}, largest {small(gaps['largest'])}"
        )
        ulp = (
            ""
            if gaps["largest_ulps"] is None
            else f" ({small(gaps['median_ulps'])} and {small(gaps['largest_ulps'])} ulp)"
        )
        out.append(text + ulp)
    layers = [x for x in found["state"]["layers"] if x["differ"]]
    if layers:
        most = max(layers, key=lambda x: x["largest_relative"])
        out.append(
            f"states after passes: {len(found['state']['layers']) - len(layers)} layers equal in every bit throughout, "
            f"{len(layers)} not; furthest off {most['layer']}: {small(most['largest_relative'], 2)} of itself"
            + ("" if most["largest_ulps"] is None else f", {small(most['largest_ulps'], 2)} ulp")
        )
    if controls["index_moves_with_depth"] is False:
        out.append("the first divergence is at the same token at every depth that leaves: a hint at numerics, no more")
    if found["kinds"]:
        kinds = [f"{k} {v['differ']} of {v['modules']}" for k, v in found["kinds"].items() if v["differ"]]
        out.append(f"modules that differ between a block and single rows: {', '.join(kinds) or 'none'}")
    if found["first_module"]:
        out.append(f"first module that computes other bits: {found['first_module']}")
    elif found["verdict"] == "numeric":
        why = "every module of the block gave the same bits, taken apart" if found["kinds"] else "its state was gone"
        out.append(f"the module that computes other bits was not found: {why}")
    if found["explained"]:
        out.append(f"run row by row: {found['explained']['sentence']}")
    if found["simulated"]:
        out.append(f"these numerics are made, not measured: {found['simulated']}")
    return out


def _worth_showing(found: Found) -> list[Mapping[str, Any]]:
    """Divergences of the gravest arms, the earliest first."""
    grave = {a["arm"] for a in found["arms"] if a["verdict"] == found["verdict"]}
    return sorted((d for d in found["divergences"] if d["arm"] in grave), key=lambda d: d["position"])


def describe(d: Mapping[str, Any]) -> str:
    """One divergence in a sentence."""
    size = f"{small(d['gap'])}" + ("" if d["gap_ulps"] is None else f" ({small(d['gap_ulps'])} ulp)")
    share = (
        "" if d["percentile"] is None else f", smaller than {100 * (1 - d['percentile']):.1f} % of the run's margins"
    )
    return (
        f"{d['arm']} on {d['prompt']}, token {d['position']}: baseline {d['baseline'][0]}, arm {d['arm_top2'][0]}; "
        f"gap {size}{share}; the row's logits differ by up to {small(d['row_diff'])}"
    )


def bounds(found: Found) -> list[str]:
    """How far this speaks."""
    looked = found["looked"]
    text = (
        f"looked at {looked['tokens_per_prompt']} tokens of {looked['prompts']} prompts in {looked['arms']} arms: "
        f"{looked['verifies']} verifies with drafts, {looked['full_acceptance']} of them accepted whole, "
        f"{looked['rejections']} with a reject, {looked['second_rejects']} right after another"
    )
    out = [text]
    if looked["has_window"]:
        out.append(
            "the sliding window was " + ("full" if looked["window_wrapped"] else "NEVER full: use a longer text")
        )
    if not looked["full_acceptance"] or not looked["rejections"]:
        what = "full acceptance" if not looked["full_acceptance"] else "reject"
        out.append(f"no {what} happened, so faults that need one were not looked for; add --arm scripted3")
    return out + list(map(str, found.get("notices") or []))


def write(found: Found, folder: Path) -> Path:
    """diverge.json and page.html into `folder`; returns the page's path."""
    from mtplab.report import divergence_page

    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "diverge.json", found)
    return divergence_page.write(found, folder)
