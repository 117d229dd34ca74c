"""A diagnosis as one self-contained HTML page: verdict, margins with the noise band, growth by layer, survival."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtplab.report import divergence as words
from mtplab.report import html
from mtplab.report.html import NAME, esc, section
from mtplab.report.plots import PALETTE, drawing, name, svg
from mtplab.report.tables import Column
from mtplab.trials.files import write_text

Found = Mapping[str, Any]
SHOWN = 200  # divergences in the page's table; the document holds all

DIVERGENCES = (
    Column("arm", lambda d: d["arm"], right=False),
    Column("prompt", lambda d: d["prompt"], right=False),
    Column("token", lambda d: str(d["position"])),
    Column("rows", lambda d: str(d["rows"])),
    Column("baseline, second", lambda d: "{} {}".format(*d["baseline"])),
    Column("its gap", lambda d: words.small(d["baseline_gap"])),
    Column("arm, second", lambda d: "{} {}".format(*d["arm_top2"])),
    Column("its gap", lambda d: words.small(d["arm_gap"])),
    Column("gap of the two", lambda d: words.small(d["gap"])),
    Column("in ulp", lambda d: words.small(d["gap_ulps"])),
    Column("row difference", lambda d: words.small(d["row_diff"])),
)
CAPTIONS = {
    "Margins": "Grey: the baseline's top-2 gap at every position. Ticks: gaps at which an arm left. Band: up to twice "
    "the measured noise, where a flip can be rounding.",
    "Growth": "Largest distance, in representable values, between a block's rows and the same rows one by one, after "
    "each layer, from one identical state.",
    "Survival": "Kaplan-Meier: estimated share of prompts still equal to the baseline after so many tokens; ticks mark "
    "the ends of texts that never left.",
}


def write(found: Found, folder: Path) -> Path:
    """Write page.html into the folder and return its path."""
    path = folder / NAME
    write_text(path, page(found))
    return path


def page(found: Found) -> str:
    """The whole document; everything that comes from files is escaped."""
    model = (found.get("model") or {}).get("model", "model")
    parts = [
        html.header("mtplab diverge", f"{model}: {found['verdict']}", {}),
        section(words.MEANING[found["verdict"]], _claims(found)),
        section("Arms", _table(words.ARMS, found["arms"])),
        *_plots(found),
        section("Evidence", "".join(f"<p>{esc(t)}</p>" for t in words.evidence(found))),
        section("Divergences", _divergences(found)),
        section("How far it looked", "".join(f"<p>{esc(t)}</p>" for t in words.bounds(found))),
    ]
    return html.document(f"{model} diverge", parts)


def _claims(found: Found) -> str:
    return "<ul class=claims>" + "".join(f"<li>{esc(t)}</li>" for t in words.first_lines(found)) + "</ul>"


def _table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th{'' if c.right else ' class=l'}>{esc(c.title)}</th>" for c in columns)
    body = "".join(
        "<tr>" + "".join(f"<td{'' if c.right else ' class=l'}>{esc(c.show(r))}</td>" for c in columns) + "</tr>"
        for r in rows
    )
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _divergences(found: Found) -> str:
    rows = found["divergences"]
    if not rows:
        return ""
    more = f"<p class=note>The first {SHOWN} of {len(rows)}.</p>" if len(rows) > SHOWN else ""
    return _table(DIVERGENCES, rows[:SHOWN]) + more


def _plots(found: Found) -> list[str]:
    def drawn() -> dict[str, str | None]:
        return {"Margins and noise": margins(found), "Growth by layer": growth(found), "Survival": survival(found)}

    return html.figures(drawn, lambda title: CAPTIONS[title.split()[0]])


def margins(found: Found) -> str | None:
    """The baseline's margins as a histogram, the gaps of the divergences as ticks, the noise as a band."""
    edges, counts = found["margins"]["edges"], found["margins"]["counts"]
    if not any(counts):
        return None
    figure = drawing()(figsize=(8, 3.2))
    axis = figure.subplots()
    low = edges[0] / (edges[1] / edges[0])
    axis.bar(
        [low, *edges[:-1]],
        counts[:-1],
        width=[edges[0] - low, *(b - a for a, b in itertools.pairwise(edges))],
        align="edge",
        color="#b8bec6",
        lw=0,
    )
    if found["noise"]:
        axis.axvspan(low, 2 * found["noise"], color="#f2c14e", alpha=0.35, lw=0, zorder=0)
    for place, arm in enumerate(dict.fromkeys(d["arm"] for d in found["divergences"])):
        gaps = [max(low, d["gap"]) for d in found["divergences"] if d["arm"] == arm]
        height = max(counts) * (1.04 + 0.05 * place)
        axis.plot(gaps, [height] * len(gaps), "|", ms=9, color=PALETTE[place % len(PALETTE)], label=name(arm))
    axis.set(xscale="log", xlabel="top-2 gap of the baseline's logits (left end: and below)", ylabel="positions")
    axis.xaxis.set_major_formatter(_plain)
    filled = [e for e, n in zip([low, *edges], counts, strict=True) if n]
    axis.set_xlim(min(filled[0], 2 * (found["noise"] or 1)) / 3, filled[-1] * 4)
    if found["divergences"]:
        axis.legend(frameon=False, fontsize=9, loc="upper left")
    return svg(figure, "margins")


def _plain(value: float, _place: int) -> str:
    """A tick's label. matplotlib's own are in its markup for formulas, which names from files switch off."""
    return f"{value:g}"


def growth(found: Found) -> str | None:
    """ulp by layer; None where nothing was taken apart."""
    rows = found["growth"]
    if not any(r["ulp_max"] for r in rows):
        return None
    figure = drawing()(figsize=(8, 2.8))
    axis = figure.subplots()
    axis.plot(range(len(rows)), [r["ulp_max"] for r in rows], "-o", color=PALETTE[0], ms=5)
    axis.set_yscale("symlog", linthresh=1)
    axis.yaxis.set_major_formatter(_plain)
    axis.set(xlabel="layer", ylabel="largest difference, ulp")
    axis.xaxis.get_major_locator().set_params(integer=True)
    return svg(figure, "growth")


def survival(found: Found) -> str | None:
    """One stair per arm; a curve that stays at one ends where the shortest comparison did."""
    figure = drawing()(figsize=(8, 3.0))
    axis = figure.subplots()
    for place, arm in enumerate(found["arms"]):
        ends = [p["compared"] for p in arm["by_prompt"].values() if p["first_divergence"] is None]
        last = max([*ends, *(i for i, _ in arm["curve"])], default=0)
        xs, ys, now = [0], [1.0], 1.0
        for index, share in arm["curve"]:
            xs, ys, now = [*xs, index, index], [*ys, now, share], share
        colour = PALETTE[place % len(PALETTE)]
        # Curves that lie on one another must all be seen: the later ones have gaps.
        line = ("-", (0, (6, 4)), (0, (2, 4)), (0, (1, 6)))[place % 4]
        axis.plot([*xs, last], [*ys, now], color=colour, lw=2, ls=line, label=name(arm["arm"]))
        axis.plot(ends, [_at(arm["curve"], e) for e in ends], "|", color=colour, ms=7)
    axis.set(xlabel="token", ylabel="share still equal", ylim=(-0.03, 1.05))
    axis.legend(frameon=False, fontsize=9, loc="lower left")
    return svg(figure, "survival")


def _at(curve: Sequence[Sequence[float]], index: int) -> float:
    return next((share for i, share in reversed(curve) if i <= index), 1.0)
