"""The probe's findings as a table and as sentences that claim no more than was looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mtplab.report.render import paragraphs, plain, text_column
from mtplab.report.tables import Column

SCHEMA = 1


def ranges(numbers: Iterable[int]) -> str:
    """[1, 2, 3, 8] -> "1-3, 8"."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per operation and width; what csv and jsonl hold."""
    out = []
    for op in found["operations"]:
        facts = {k: op[k] for k in ("kind", "module", "dtype", "quantization", "count", "example")}
        shape, simulated = "x".join(map(str, op["shape"])), "; ".join(op["simulated"])
        for seen in op["widths"]:
            out.append(facts | {"shape": shape, "simulated": simulated} | seen | {"rows": ranges(seen["rows"])})
    return out


def table_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per operation, for people: where it is equal, and the worst it does elsewhere."""
    out = []
    for op in found["operations"]:
        bad = [w for w in op["widths"] if w["differ"]]
        share = max((w["differ"] / w["elements"] for w in bad), default=0.0)
        quantized = "" if op["quantization"] is None else f", {op['quantization']}"
        out.append(
            {
                "operation": op["kind"] + (" (simulated)" if op["simulated"] else ""),
                "stored": op["dtype"] + quantized,
                "shape": "x".join(map(str, op["shape"])) or "-",
                "modules": op["count"],
                "equal at widths": ranges(op["equal_widths"]) or "none",
                "rows that differ": ranges({r for w in bad for r in w["rows"]}) or "-",
                "elements": f"{100 * share:.1f} %" if bad else "0",
                "ulp": max(w["ulp_max"] for w in op["widths"]),
                "example": op["example"],
            }
        )
    return out


COLUMNS = (
    *(text_column(k) for k in ("operation", "stored", "shape")),
    Column("modules", lambda r: str(r["modules"])),
    *(text_column(k) for k in ("equal at widths", "rows that differ")),
    Column("differ at most", lambda r: r["elements"]),
    Column("ulp at most", lambda r: str(r["ulp"])),
    text_column("example"),
)


def sentences(found: Mapping[str, Any]) -> list[str]:
    """What the table says, the controls, and the bound of all of it."""
    looked = sum(w["elements"] for op in found["operations"] for w in op["widths"])
    scope = (
        f"{looked:,} elements compared: widths {ranges(found['widths'])}, {found['seeds']} seeds, caches of "
        f"{', '.join(map(str, found['cache_lengths']))} rows"
    )
    if found["variant"]:
        verdict = (
            f"Not width-invariant here: {', '.join(found['variant'])}. A verify of several rows may change a token."
        )
    else:
        verdict = "No difference seen at any width: by what was looked at, a verify has the bits of one-token decoding."
    control = found["control"]
    seen = {True: "seen", False: "NOT SEEN, so this instrument proves nothing here", None: "no linear to try it on"}
    controls = (
        f"Control, {control['what'] or 'split-K'}: {seen[control['seen']]} "
        f"({control['differ']} of {control['elements']} elements)"
    )
    steady = {
        True: "Alone, every row gave the same bits twice.",
        False: "NOT reproducible: a row alone gives other bits each time, so nothing above is about the width.",
        None: "Width 1 was not asked for, so reproducibility is not known.",
    }[found["reproducible"]]
    simulated = [f"In force: {name}." for name in found["numerics"]]
    return [verdict, f"{controls}. {steady}", *simulated, f"{scope}."]


def render(found: Mapping[str, Any], form: str) -> str:
    """The probe in one of the five formats."""
    if form in ("json", "jsonl", "csv"):
        return plain(rows(found), (), form, {"schema": SCHEMA, **found})
    return "\n".join([plain(table_rows(found), COLUMNS, form, None), paragraphs(sentences(found), form)])
