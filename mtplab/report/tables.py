"""Tables for people and machines: aligned text, Markdown, CSV, JSON, JSON lines, all from the same rows.

A cell that is not defined (no drafts proposed, one burst, no second round) is a dash for people and null for machines.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtplab.report.results import Results
from mtplab.trials.files import clean, dumps

FORMATS = ("table", "md", "csv", "json", "jsonl")
NONE = "-"
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A title and how a row fills it; numbers stand right-aligned."""

    title: str
    show: Callable[[Row], str]
    right: bool = True


def printable(text: str) -> str:
    """One line without control characters: a name from a file must not steer a terminal or break a table."""
    return "".join(c if c.isprintable() else picture(c) for c in " ".join(text.split("\n")))


def picture(character: str) -> str:
    """A control character as its visible sign; line feed and tab stay."""
    code = ord(character)
    if character in "\n\t" or 32 <= code < 127 or code >= 160:
        return character
    return chr(0x2400 + code) if code < 32 else "\u2421" if code == 127 else "\ufffd"


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def interval(value: Mapping[str, Any] | None, digits: int = 2) -> str:
    """`1.42 [1.38, 1.47]`; without a range only the value."""
    if not value or value.get("value") is None:
        return NONE
    text = number(value["value"], digits)
    if value.get("low") is None or value.get("high") is None:
        return text
    return f"{text} [{number(value['low'], digits)}, {number(value['high'], digits)}]"


def acceptance(row: Row) -> str:
    """draft_acceptance with its K: without K the number means nothing."""
    value, depth = row.get("draft_acceptance"), row.get("draft_acceptance_depth")
    return NONE if value is None else f"{value:.2f}@{depth if depth is not None else 'mixed'}"


def loops(row: Row) -> str:
    value = row.get("loop_share")
    return NONE if value is None else f"{value:.2f}{' *' if row.get('marked') else '  '}"


def equality(row: Row) -> str:
    """How far greedy output is shown to equal the baseline's, always with its bound."""
    if row.get("equal_prompts") is None or row["arm"] == "baseline":
        return NONE
    equal, prompts = row["equal_prompts"], row["prompts"]
    if row.get("first_divergence") is None:
        return f"{equal}/{prompts} through {row['equal_through']}"
    return f"{equal}/{prompts}, leaves at {row['first_divergence']}"


def ratio(key: str) -> Callable[[Row], str]:
    return lambda row: "1" if row["arm"] == "baseline" else interval(row.get(key))


SWEEP = (
    Column("corpus", lambda r: str(r["corpus"]), right=False),
    Column("arm", lambda r: str(r["arm"]), right=False),
    Column("tok/s", lambda r: number(r.get("tok_s"), 1)),
    Column("tpot_ratio", ratio("tpot_ratio")),
    Column("e2e_ratio", ratio("e2e_ratio")),
    Column("predicted", lambda r: number(r.get("predicted_ratio"))),
    Column("tokens_per_verify", lambda r: interval(r.get("tokens_per_verify"))),
    Column("draft_acceptance", acceptance),
    Column("depth", lambda r: number(r.get("mean_depth"), 1)),
    Column("loop_share", loops),
)
GREEDY = (*SWEEP, Column("equal to baseline", equality, right=False))
TITLES = {
    "greedy": "Greedy (temperature 0)",
    "sampled": "Sampled (temperature {temp:g}, {drafts} drafts, exact acceptance)",
}


def aligned(columns: Sequence[Column], rows: Sequence[Row], *, group: str | None = None) -> str:
    """Plain text with a rule under the titles; an empty line wherever the value of `group` changes."""
    cells = [[c.title for c in columns], *([printable(c.show(r)) for c in columns] for r in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    pads = [str.rjust if c.right else str.ljust for c in columns]
    lines = ["  ".join(p(x, w) for p, x, w in zip(pads, row, widths, strict=True)).rstrip() for row in cells]
    out = [lines[0], "  ".join("-" * w for w in widths)]
    for i, line in enumerate(lines[1:]):
        if group and i and rows[i].get(group) != rows[i - 1].get(group):
            out.append("")
        out.append(line)
    return "\n".join(out) + "\n"


def markdown(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """A GitHub table; a pipe or a line break inside a cell cannot break it."""

    def line(cells: Iterable[str]) -> str:
        safe = (" ".join(printable(c).replace("\\", "\\\\").replace("|", "\\|").split()) for c in cells)
        return "| " + " | ".join(safe) + " |"

    rule = "|" + "|".join("---:" if c.right else "---" for c in columns) + "|"
    return "\n".join([line(c.title for c in columns), rule, *(line(c.show(r) for c in columns) for r in rows)]) + "\n"


def flat(row: Row) -> dict[str, Any]:
    """A row without nesting: intervals become key, key_low, key_high; lists are joined by semicolons."""
    out: dict[str, Any] = {}
    for key, value in clean(dict(row)).items():
        if isinstance(value, dict) and "value" in value:
            out |= {key: value["value"], f"{key}_low": value.get("low"), f"{key}_high": value.get("high")}
        elif isinstance(value, list):
            simple = all(not isinstance(v, (dict, list)) for v in value)
            out[key] = ";".join("" if v is None else str(v) for v in value) if simple else dumps(value)
        else:
            out[key] = dumps(value) if isinstance(value, dict) else value
    return out


def comma_separated(rows: Iterable[Row]) -> str:
    """CSV with one header: the union of all keys, in order of appearance. Undefined cells are empty."""
    flats = [flat(r) for r in rows]
    keys = list(dict.fromkeys(k for f in flats for k in f))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, keys, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flats)
    return buffer.getvalue()


def lines_of_json(rows: Iterable[Row]) -> str:
    return "".join(dumps(dict(r)) + "\n" for r in rows)


def sweep(results: Results, form: str) -> str:
    """The result of a sweep in one of FORMATS. `json` is one line: the document of `Results.document`."""
    if form == "json":
        return dumps(results.document()) + "\n"
    if form == "jsonl":
        return lines_of_json(results.rows)
    if form == "csv":
        return comma_separated(results.rows)
    parts = [_mode_table(results, mode, form) for mode in results.store.plan.modes]
    return "\n".join(p for p in parts if p) + ("\n" + failures(results, form) if results.failed else "")


def heading(results: Results, mode: str) -> str:
    plan = results.store.plan
    return TITLES[mode].format(temp=plan.temp, drafts=plan.drafts)


def _mode_table(results: Results, mode: str, form: str) -> str:
    rows = [r for r in results.rows if r["mode"] == mode]
    if not rows:
        return ""
    columns = GREEDY if mode == "greedy" else SWEEP
    title = heading(results, mode)
    marked = any(r.get("marked") for r in rows)
    note = "* more than 0.3 of the text repeats itself, and repeats are accepted: left out of conclusions\n"
    if form == "md":
        return f"**{title}**\n\n{markdown(columns, rows)}" + (f"\n\\{note}" if marked else "")
    return f"{title}\n\n{aligned(columns, rows, group='corpus')}" + (note if marked else "")


def failures(results: Results, form: str = "table") -> str:
    """Failed trials, with their reasons; they are in no row."""
    columns = (
        Column("failed trial", lambda f: str(f["trial"]), right=False),
        Column("reason", lambda f: str(f["reason"]), right=False),
    )
    return markdown(columns, results.failed) if form == "md" else aligned(columns, results.failed)
