"""The page of a `sweep` run folder: see `html` for what every page promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtplab.records.types import Request
from mtplab.report import html, tables
from mtplab.report.conclusions import conclusions
from mtplab.report.html import NAME, esc, section
from mtplab.report.results import Results
from mtplab.report.roles import ROLES, request_roles
from mtplab.report.style import WORDS
from mtplab.trials.files import write_text

TAIL = 240  # characters of a prompt shown before its continuation
SAMPLES = 2  # texts per corpus and mode


def write(results: Results) -> Path:
    """Write page.html into the run folder and return its path."""
    path = results.store.folder / NAME
    write_text(path, page(results))
    return path


def page(results: Results) -> str:
    """The whole document."""
    parts = [
        _header(results),
        section("What it shows", _conclusions(results)),
        *(section(*part) for part in _tables(results)),
        *_plots(results),
        section("Texts", _samples(results)),
        section("What to know before believing it", _warnings(results)),
        section("Trials", _trials(results)),
        section("Words", html.words(WORDS)),
        section("Settings and machine", _settings(results)),
    ]
    return html.document(results.run, parts)


def _header(results: Results) -> str:
    plan, manifest = results.store.plan, results.store.manifest
    facts = html.machine_facts(manifest, plan.model) | {
        "plan": f"{len(plan.arms)} arms x {plan.rounds} rounds, {plan.prompts} prompts per text, "
        f"{plan.prompt_tokens} tokens in, {plan.max_tokens} out",
        "trials": f"{len(results.trials)} stored, {len(results.failed)} failed, each in a fresh process",
        "made": html.made_by(manifest),
    }
    return html.header("mtplab sweep", results.run, facts)


def _conclusions(results: Results) -> str:
    items = []
    for text in conclusions(results):
        where, _, rest = text.partition(": ")
        items.append(f"<li><b>{esc(where)}</b> {esc(rest)}</li>")
    return f"<ul class=claims>{''.join(items)}</ul>" if items else "<p>No trial is complete yet.</p>"


def _tables(results: Results) -> Iterable[tuple[str, str]]:
    for mode in results.store.plan.modes:
        rows = [r for r in results.rows if r["mode"] == mode]
        if rows:
            columns = tables.GREEDY if mode == "greedy" else tables.SWEEP
            yield tables.heading(results, mode), table(columns, rows)


VERDICTS = {"faster": "up", "slower": "down"}


def table(columns: Sequence[tables.Column], rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th{'' if c.right else ' class=l'}>{esc(c.title)}</th>" for c in columns)
    body, before = [], None
    for row in rows:
        corpus = row.get("corpus")
        classes = [*(["first"] if before not in (None, corpus) else []), *(["dim"] if row.get("marked") else [])]
        before = corpus
        cells = "".join(_cell(c, row) for c in columns)
        body.append(f'<tr class="{" ".join(classes)}">{cells}</tr>')
    note = (
        "<p class=note>* more than 0.3 of the text repeats itself, and repeats are accepted: left out of conclusions."
    )
    marked = note + "</p>" if any(r.get("marked") for r in rows) else ""
    return (
        f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>{marked}"
    )


def _cell(column: tables.Column, row: Mapping[str, Any]) -> str:
    kinds = [] if column.right else ["l"]
    if column.title == "tpot_ratio" and row.get("verdict") in VERDICTS and not row.get("marked"):
        kinds.append(VERDICTS[row["verdict"]])
    return f'<td class="{" ".join(kinds)}">{esc(column.show(row).strip())}</td>'


def _plots(results: Results) -> list[str]:
    from mtplab.report import plots

    if not results.rows:
        return []
    return html.figures(lambda: plots.all_plots(results), lambda title: CAPTIONS.get(title.split()[0], ""))


CAPTIONS = {
    "Time": "Dots: geometric mean over prompts with its 95 % interval. Hollow diamonds: predicted from the measured "
    "cost of a pass. Grey band: what the baseline against itself cannot tell from 1. Grey dots: text that repeats.",
    "What": "Solid, survival: share of passes whose first i drafts were all accepted. Dashed, conditional: accepted at "
    "i given that all before were; it rises by survivorship alone.",
    "Depth": "One line a prompt, first round. Light grey is depth 0: the controller stopped drafting.",
}


def _samples(results: Results) -> str:
    """Some outputs with every token coloured by where it came from."""
    prompts = {p.id: p.text for p in results.store.prompts()}
    pieces = _pieces(results)
    blocks = []
    for (mode, corpus), arms in results.requests.items():
        arm = _shown_arm(arms)
        for request in arms[arm][:SAMPLES]:
            key = (arm, mode, int(request.settings.get("round", 0)), request.id)
            blocks.append(_sample(f"{corpus}, {mode}, {arm}", prompts.get(request.id, ""), request, pieces[key]))
    legend = "".join(f"<span class=t-{role}>{esc(role)}</span> {esc(text)}; " for role, text in ROLES.items())
    return f"<p class=note>{legend}before it, in grey, the end of the prompt.</p>{''.join(blocks)}" if blocks else ""


def _pieces(results: Results) -> dict[tuple[str, str, int, str], list[str]]:
    out = {}
    for stored in results.trials:
        for request, made in zip(stored.requests, stored.pieces, strict=True):
            out[stored.trial.arm, request.settings.get("mode"), stored.trial.round, request.id] = made
    return out


def _shown_arm(arms: Mapping[str, Any]) -> str:
    """The arm with most drafts to look at: adaptive arms and the deepest fixed one come last in a plan."""
    drafting = [a for a in arms if a not in ("baseline", "depth0", "adaptive")]
    return max(drafting, default=next(iter(arms)))


def _sample(title: str, prompt: str, request: Request, made: Sequence[str]) -> str:
    text = "".join(
        f"<span class=t-{role}>{esc(piece)}</span>" if piece else ""
        for role, piece in zip(request_roles(request), made, strict=True)
    )
    tail = ("\u2026" if len(prompt) > TAIL else "") + prompt[-TAIL:]
    return (
        f"<details open><summary>{esc(title)} <code>{esc(request.id)}</code></summary>"
        f"<pre><span class=prompt>{esc(tail)}</span>{text}</pre></details>"
    )


def _warnings(results: Results) -> str:
    """Everything that limits the claims: few prompts, loops, drift, disturbed trials, failures, notices."""
    items = [*map(str, results.store.manifest.get("notices") or [])]
    items += [f"{r['corpus']}, {r['mode']}, {r['arm']}: {w}" for r in results.rows for w in r.get("warnings") or ()]
    notes = {r["tpot_ratio"].get("note") for r in results.rows if r["arm"] != "baseline"} - {None}
    items += [f"intervals: {n}" for n in sorted(notes)]
    if blind := [t.trial.name for t in results.trials if (t.done.get("load") or {}).get("alive") is not True]:
        items.append(f"the load of the machine could not be sampled in {len(blind)} of {len(results.trials)} trials")
    return html.bullets(items + html.disturbed(results.trials, results.failed))


def _trials(results: Results) -> str:
    """What each process says of itself, in the order they ran."""
    rows = [{"trial": t.trial.name, **t.done, **(t.done.get("load") or {})} for t in results.trials]
    return f"<details><summary>{len(rows)} trials</summary>{table(TRIALS, rows)}</details>" if rows else ""


def _share(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: tables.NONE if row.get(key) is None else f"{100 * row[key]:.0f} %"


def _mib(row: Mapping[str, Any]) -> str:
    return tables.NONE if row.get("peak_memory_bytes") is None else f"{row['peak_memory_bytes'] / 2**20:.1f}"


LOADS = {None: "not known", True: "disturbed", False: "quiet"}
TRIALS = (
    tables.Column("trial", lambda r: str(r["trial"]), right=False),
    tables.Column("seconds", lambda r: tables.number(r.get("wall_s"), 1)),
    tables.Column("peak memory, MiB", _mib),
    tables.Column("processors used", _share("own_mean")),
    tables.Column("by others", _share("other_mean")),
    tables.Column("machine", lambda r: LOADS.get(r.get("disturbed"), "not known"), right=False),
)


def _settings(results: Results) -> str:
    manifest = results.store.manifest
    shown = {"plan": results.store.plan.to_json(), "model": manifest.get("model"), "machine": manifest.get("machine")}
    return html.settings(shown | {"costs": results.store.costs})
