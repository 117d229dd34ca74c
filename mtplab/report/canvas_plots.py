"""The pictures of a `denoise` run, as SVG text (see `mtplab.report.plots`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtplab.records import canvas_metrics as metrics
from mtplab.records.canvas_summary import identity
from mtplab.report.canvas_results import CanvasResults
from mtplab.report.plots import PALETTE, drawing, name, svg

CAPPED = "#D55E00"


def all_plots(results: CanvasResults) -> dict[str, str]:
    """Title -> SVG of everything this run can show. Raises RequestError where matplotlib is missing."""
    drawing()
    if not results.rows:
        return {}
    return {
        "Quality against tokens per forward": quality(results),
        "Steps used": histogram(results),
        "When each position settled": settling(results),
        "Entropy by step": entropy(results),
    }


def _corpora(results: CanvasResults) -> list[str]:
    return list(dict.fromkeys(r["corpus"] for r in results.rows))


def _kinds(results: CanvasResults) -> list[tuple[str, int]]:
    return list(dict.fromkeys((r["sampler"], r["canvas"]) for r in results.rows))


def _panels(results: CanvasResults, width: float = 4.8, height: float = 3.4) -> tuple[Any, Sequence[Any]]:
    corpora = _corpora(results)
    figure = drawing()(figsize=(width * len(corpora), height), layout="constrained")
    axes = figure.subplots(1, len(corpora), squeeze=False)[0]
    for axis, corpus in zip(axes, corpora, strict=True):
        axis.set_title(name(corpus), loc="left")
    return figure, axes


def quality(results: CanvasResults) -> str:
    """nll (down is better) against tokens_per_forward (right is faster); the frontier is joined and filled."""
    figure, axes = _panels(results)
    for axis, corpus in zip(axes, _corpora(results), strict=True):
        rows = [r for r in results.rows if r["corpus"] == corpus and (r["nll"] or {}).get("value") is not None]
        for place, kind in enumerate(_kinds(results)):
            _points(axis, [r for r in rows if (r["sampler"], r["canvas"]) == kind], PALETTE[place % len(PALETTE)], kind)
        best = sorted((r["tokens_per_forward"], r["nll"]["value"]) for r in rows if r["frontier"])
        if best:
            axis.plot(*zip(*best, strict=True), color="#888888", lw=1, zorder=0)
        axis.set(xlabel="tokens_per_forward", ylabel="nll, nats per token")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=8)
    return svg(figure, "canvas-quality")


def _points(axis: Any, rows: Sequence[Mapping[str, Any]], colour: str, kind: tuple[str, int]) -> None:
    for i, row in enumerate(rows):
        x, nll = row["tokens_per_forward"], row["nll"]
        if nll.get("low") is not None:
            axis.plot([x, x], [nll["low"], nll["high"]], color=colour, lw=1.2, alpha=0.6)
        fill = colour if row["frontier"] else "white"
        label = name(f"{kind[0]}, canvas {kind[1]}") if i == 0 else None
        axis.plot(x, nll["value"], "o", mfc=fill, mec=colour, ms=7, zorder=3, label=label, ls="none")
        axis.annotate(str(row["steps"]), (x, nll["value"]), xytext=(5, 4), textcoords="offset points", fontsize=8)


def _longest(results: CanvasResults, corpus: str) -> list[Any]:
    """The requests of the longest run of the first sampler: what settles when is a property of it."""
    sampler, canvas = _kinds(results)[0]
    mine = [r for r in results.requests if r.corpus == corpus]
    mine = [r for r in mine if (identity(r)["sampler"], identity(r)["canvas"]) == (sampler, canvas)]
    steps = max((identity(r)["steps"] for r in mine), default=0)
    return [r for r in mine if identity(r)["steps"] == steps]


def histogram(results: CanvasResults) -> str:
    """Steps used per canvas in the longest run, with the share of canvases that the cap stopped."""
    figure, axes = _panels(results)
    for axis, corpus in zip(axes, _corpora(results), strict=True):
        requests = _longest(results, corpus)
        found, share = metrics.steps_histogram(requests), metrics.cap_share(requests)
        axis.bar(list(found), list(found.values()), color=PALETTE[0], width=0.8)
        if share:
            # The last bar may hold both: canvases that stopped in their last step stand on top of those that did not.
            axis.bar(identity(requests[0])["steps"], metrics.cap_pair(requests)[0], color=CAPPED, width=0.8)
        axis.set(xlabel="steps used", ylabel="canvases")
        axis.text(0.98, 0.95, f"{100 * (share or 0):.0f} % at the cap", transform=axis.transAxes, ha="right", va="top")
        axis.xaxis.get_major_locator().set_params(integer=True)
    return svg(figure, "canvas-steps")


def settling(results: CanvasResults) -> str:
    """Position x step: the share of canvases whose position got its final token there, in the longest run."""
    figure, axes = _panels(results)
    for axis, corpus in zip(axes, _corpora(results), strict=True):
        table = metrics.settling(_longest(results, corpus))
        if not table.size:
            continue
        last = int(np.flatnonzero(table.sum(axis=1)).max(initial=0)) + 1
        image = axis.imshow(
            table[:last], aspect="auto", origin="lower", cmap="Blues", vmin=0, interpolation="nearest",
            extent=(-0.5, table.shape[1] - 0.5, 0.5, last + 0.5),
        )  # fmt: skip
        axis.set(xlabel="position in the canvas", ylabel="step")
        figure.colorbar(image, ax=axis, shrink=0.8).set_label("share of canvases")
    return svg(figure, "canvas-settling")


def entropy(results: CanvasResults) -> str:
    """Mean entropy of the canvas by step, one line per number of steps of the first sampler."""
    figure, axes = _panels(results)
    kind = _kinds(results)[0]
    for axis, corpus in zip(axes, _corpora(results), strict=True):
        mine = [r for r in results.requests if r.corpus == corpus]
        mine = [r for r in mine if (identity(r)["sampler"], identity(r)["canvas"]) == kind]
        for place, steps in enumerate(sorted({identity(r)["steps"] for r in mine})):
            means = metrics.entropy_by_step([r for r in mine if identity(r)["steps"] == steps])
            xs = range(1, len(means) + 1)
            axis.plot(xs, [v for v, _ in means], color=PALETTE[place % len(PALETTE)], label=f"{steps} steps")
        axis.set(xlabel="step", ylabel="mean entropy, nats")
        axis.set_ylim(bottom=0)
        if mine:
            axis.legend(frameon=False, fontsize=8)
    return svg(figure, "canvas-entropy")
