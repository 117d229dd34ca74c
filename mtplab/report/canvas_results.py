"""A `denoise` run folder -> rows, recommendation, tables. Everything is derived from stored records."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtplab.records.canvas import CanvasRequest
from mtplab.records.canvas_summary import frontier, recommend, recommended_steps, summarize
from mtplab.report import tables
from mtplab.report.tables import Column, interval, number
from mtplab.trials.files import clean, dumps
from mtplab.trials.store import Store, Stored, open_run

SCHEMA = 1
WIDTH = 110


@dataclass(frozen=True, slots=True)
class CanvasResults:
    """What tables, plots and page are drawn from. `rows` are in the order of the corpora, then of the plan's arms."""

    run: str
    store: Store
    rows: list[dict[str, Any]]
    recommendations: list[dict[str, Any]]
    requests: list[CanvasRequest]
    trials: list[Stored]

    @property
    def failed(self) -> list[dict[str, Any]]:
        return self.store.failed

    def document(self) -> dict[str, Any]:
        """The JSON document of `mtplab denoise -o json`: null where a value is not defined."""
        manifest = self.store.manifest
        return clean(
            {
                "schema": SCHEMA,
                "run": self.run,
                "model": (manifest.get("model") or {}).get("model"),
                "machine": manifest.get("machine"),
                "effective": manifest.get("effective"),
                "rows": self.rows,
                "recommendations": self.recommendations,
                "failed": self.failed,
                "recommended_steps": recommended_steps(self.recommendations),
            }
        )


def load_results(folder: Path | str) -> CanvasResults:
    """Read a run folder, complete or not. Raises RequestError if it is none, of another verb, or damaged."""
    store = open_run(Path(folder), kind="denoise")
    trials = list(store.completed())
    place = {arm: i for i, arm in enumerate(store.plan.arms)}
    corpora = {name: i for i, name in enumerate(dict.fromkeys(p.corpus for p in store.prompts()))}
    requests = [r for t in trials for r in t.requests]
    requests.sort(key=lambda r: (corpora[r.corpus], place[r.settings["arm"]], r.settings["round"]))
    rows = summarize(requests)
    for group in _groups(rows):
        best = {id(group[i]) for i in frontier(group)}
        for row in group:
            row["frontier"] = id(row) in best
    return CanvasResults(store.folder.name, store, rows, recommend(rows), requests, trials)


def _groups(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [[r for r in rows if r["corpus"] == name] for name in dict.fromkeys(r["corpus"] for r in rows)]


# Tables ----------------------------------------------------------------------------------------------------------


def _value(key: str, digits: int = 2) -> Any:
    return lambda row: interval(row.get(key), digits)


def _percent(key: str) -> Any:
    return lambda row: tables.NONE if row.get(key) is None else f"{100 * row[key]:.0f} %"


COLUMNS = (
    Column("corpus", lambda r: str(r["corpus"]), right=False),
    Column("sampler", lambda r: str(r["sampler"]), right=False),
    Column("canvas", lambda r: str(r["canvas"])),
    Column("steps", lambda r: str(r["steps"])),
    Column("used", lambda r: number(r.get("steps_used"), 1)),
    Column("at cap", _percent("cap_share")),
    Column("tok/s", lambda r: number(r.get("tok_s"), 1)),
    Column("ms/step", lambda r: number(r.get("step_ms"), 1)),
    Column("tokens_per_forward", lambda r: number(r.get("tokens_per_forward"))),
    Column("agreement", _value("agreement")),
    Column("edit_distance", _value("edit_distance")),
    Column("nll", _value("nll")),
    Column("distinct_2", _value("distinct_2")),
    Column("repetition", _value("repetition", 3)),
    Column("frontier", lambda r: "*" if r.get("frontier") else ""),
)


def rendered(results: CanvasResults, form: str) -> str:
    """The result of a run in one of the five formats; `json` is the document in one line."""
    if form == "json":
        return dumps(results.document()) + "\n"
    if form == "jsonl":
        return tables.lines_of_json(results.rows)
    if form == "csv":
        return tables.comma_separated(results.rows)
    if form == "md":
        table = tables.markdown(COLUMNS, results.rows)
        said = "".join(f"- {line}\n" for line in sentences(results))
    else:
        table = tables.aligned(COLUMNS, results.rows, group="corpus")
        said = "".join(textwrap.fill(x, WIDTH, subsequent_indent="  ") + "\n" for x in sentences(results))
    failed = "\n" + tables.failures(results, form) if results.failed else ""
    return f"{table}\n{said}{failed}"


def sentences(results: CanvasResults) -> list[str]:
    """The recommendation, in words, with what it rests on."""
    out = [_recommended(r, results.rows) for r in results.recommendations]
    seeds = {r["seeds"] for r in results.rows}
    if results.rows:
        scorer = next((r.scorer for r in results.requests if r.scorer), "none")
        out.append(
            f"nll: nats per token under the scorer ({scorer}); agreement and edit_distance: against the longest run "
            "of the same sampler on the same starting canvases; * on the frontier of tokens_per_forward and nll"
        )
    if seeds and min(seeds) < 2:
        out.append("one seed: there is no noise floor and so no recommendation; run with --seeds 2 or more")
    return out


def _recommended(r: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    where = f"{r['corpus']}, {r['sampler']}, canvas {r['canvas']}"
    if r["steps"] is None:
        return f"{where}: no recommendation ({r['reason']})"
    row = next(x for x in rows if all(x[k] == r[k] for k in ("corpus", "sampler", "canvas", "steps")))
    used = f"{number(row['steps_used'], 1)} used, {number(row['tokens_per_forward'])} tokens_per_forward"
    return f"{where}: {r['steps']} steps ({used}); {r['reason']}"
