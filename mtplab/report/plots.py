"""Plots as SVG text. matplotlib is optional: it is imported in here, and its absence is one sentence.

Names of corpora and arms come from files: they are drawn as plain text, never as markup or math.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mtplab.errors import RequestError
from mtplab.records.types import Request
from mtplab.report.results import Results

MISSING = "plots need matplotlib; install it with: pip install 'mtplab[plots]'"
# Okabe and Ito's palette: distinct for colour-blind readers, too.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mtplab",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 11,
    "figure.facecolor": "white",
}


def drawing() -> Any:
    """matplotlib's Figure class, or RequestError naming the extra. No window system is touched."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError(MISSING) from error
    matplotlib.rcParams.update(STYLE)
    return Figure


def name(text: str, limit: int = 28) -> str:
    """A label: one line, printable, short; a leading underscore would hide it from a legend."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    shown = shown if len(shown) <= limit else shown[: limit - 1] + "\u2026"
    return f" {shown}" if shown.startswith("_") else shown


def svg(figure: Any, prefix: str) -> str:
    """The figure as an <svg> element whose ids are its own on a page with several of them."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Two equal pictures get one id, and nothing refers to it.
    text = re.sub(r' id="image\w+"', "", text)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    return re.sub(r'(url\(|href=")#', rf"\g<1>#{prefix}-", text)


def all_plots(results: Results) -> dict[str, str]:
    """Title -> SVG of everything this run can show. Raises RequestError where matplotlib is missing."""
    drawing()
    plots = {}
    for mode in results.store.plan.modes:
        if any(r["mode"] == mode for r in results.rows):
            plots[f"Time per token against the baseline, {mode}"] = speed(results, mode)
    if (deep := depths(results)) is not None:
        plots["What survives along a draft"] = deep
    if (timeline := adaptive(results)) is not None:
        plots["Depth chosen by the adaptive arm"] = timeline
    return plots


def speed(results: Results, mode: str) -> str:
    """tpot_ratio per arm with its interval, one panel a corpus; hollow diamonds: predicted; grey band: noise floor."""
    corpora = [c for m, c in results.requests if m == mode]
    figure = drawing()(figsize=(5.4 * max(1, len(corpora)), 0.42 * len(results.store.plan.arms) + 1.3))
    axes = figure.subplots(1, len(corpora), sharey=True, squeeze=False)[0]
    for axis, corpus in zip(axes, corpora, strict=True):
        _speed_panel(axis, results.group(mode, corpus))
        axis.set_title(name(corpus), loc="left")
        axis.set_xlabel("tpot_ratio (above 1: faster than the baseline)")
    return svg(figure, f"speed-{mode}")


def _speed_panel(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    reach = _reach(next((r["noise_floor"] for r in rows if r["arm"] == "baseline"), None) or {})
    axis.axvspan(1 / reach, reach, color="#eeeeee", zorder=0, lw=0)
    axis.axvline(1, color="#888888", lw=1, zorder=1)
    for place, row in enumerate(rows):
        ratio, colour = row["tpot_ratio"], "#aaaaaa" if row.get("marked") else PALETTE[place % len(PALETTE)]
        if ratio.get("value") is None:
            continue
        if ratio.get("low") is not None:
            axis.plot([ratio["low"], ratio["high"]], [place, place], color=colour, lw=2.5, solid_capstyle="butt")
        axis.plot(ratio["value"], place, "o", color=colour, ms=7, zorder=3)
        if row.get("predicted_ratio") is not None and row["arm"] != "baseline":
            axis.plot(row["predicted_ratio"], place, "D", mfc="none", mec=colour, ms=9, zorder=2)
    axis.set_yticks(range(len(rows)), [name(r["arm"]) for r in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)


def _reach(floor: Mapping[str, Any]) -> float:
    """How far from 1 an arm gets against itself: the larger of the floor's ends, as a factor of at least 1."""
    ends = [floor.get(k) for k in ("value", "low", "high")]
    return max((max(x, 1 / x) for x in ends if x), default=1.0)


def depths(results: Results) -> str | None:
    """survival (solid) and conditional (dashed) by position in the draft, for the deepest fixed arm of each group."""
    found = [(mode, corpus, _deepest(results.group(mode, corpus))) for mode, corpus in results.requests]
    found = [(m, c, row) for m, c, row in found if row is not None]
    if not found:
        return None
    modes = list(dict.fromkeys(m for m, _, _ in found))
    figure = drawing()(figsize=(5.4 * len(modes), 3.4))
    axes = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    for axis, mode in zip(axes, modes, strict=True):
        for place, (corpus, row) in enumerate((c, r) for m, c, r in found if m == mode):
            _curves(axis, row, name(corpus), PALETTE[place % len(PALETTE)])
        axis.set(xlabel="draft position", ylim=(0, 1.03))
        axis.set_title(f"{mode}, {next(r['arm'] for m, _, r in found if m == mode)}", loc="left")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(frameon=False, fontsize=9)
    axes[0].set_ylabel("share of passes")
    return svg(figure, "depths")


def _deepest(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    fixed = [r for r in rows if re.fullmatch(r"depth[1-9]\d*", r["arm"]) and r.get("survival")]
    return max(fixed, key=lambda r: len(r["survival"]), default=None)


def _curves(axis: Any, row: Mapping[str, Any], label: str, colour: str) -> None:
    for key, line in (("survival", "-"), ("conditional", "--")):
        points = [(i + 1, v) for i, v in enumerate(row[key]) if v is not None]
        axis.plot(*zip(*points, strict=True), line, marker="o", ms=4, color=colour, label=f"{label} {key}")


def adaptive(results: Results) -> str | None:
    """Depth by token position: one line of pixels a prompt, one panel a group, first round."""
    groups = [(g, arms["adaptive"]) for g, arms in results.requests.items() if arms.get("adaptive")]
    if not groups:
        return None
    from matplotlib.colors import BoundaryNorm, ListedColormap

    top = max(v.depth for _, requests in groups for r in requests for v in r.verifies or ()) if _any(groups) else 0
    shades = ListedColormap(["#f2f2f2", "#c6dbef", "#6baed6", "#2171b5", "#08306b"][: max(2, top + 1)])
    norm = BoundaryNorm([x - 0.5 for x in range(shades.N + 1)], shades.N)
    columns = min(2, len(groups))
    height = (len(groups) + columns - 1) // columns
    figure = drawing()(figsize=(5.6 * columns, 2.0 * height), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False).flat
    for axis, ((mode, corpus), requests) in zip(axes, groups, strict=False):
        image = axis.imshow(_timeline(requests), aspect="auto", cmap=shades, norm=norm, interpolation="nearest")
        axis.set_title(f"{name(corpus)}, {mode}", loc="left")
        axis.set(xlabel="token", ylabel="prompt", yticks=[])
    for axis in list(axes)[len(groups) :]:
        axis.set_visible(False)
    bar = figure.colorbar(image, ax=figure.axes[: len(groups)], ticks=range(shades.N), shrink=0.8)
    bar.set_label("depth")
    return svg(figure, "adaptive")


def _any(groups: Sequence[tuple[Any, Sequence[Request]]]) -> bool:
    return any(r.verifies for _, requests in groups for r in requests)


def _timeline(requests: Sequence[Request]) -> list[list[float]]:
    """[prompts, longest output]: the depth of the pass that made each token; NaN past the end and for the first."""
    first = min(int(r.settings.get("round", 0)) for r in requests)
    chosen = [r for r in requests if int(r.settings.get("round", 0)) == first]
    width = max(len(r.tokens) for r in chosen)
    rows = []
    for request in chosen:
        row = [float("nan")] * width
        for v in request.verifies:
            row[v.position : v.position + v.emitted] = [float(v.depth)] * v.emitted
        rows.append(row)
    return rows


def have_plots() -> bool:
    with suppress(RequestError):
        drawing()
        return True
    return False
