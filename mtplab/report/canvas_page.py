"""ONE self-contained HTML page from a `denoise` run folder: no script, no network, every name and text escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtplab.report import html
from mtplab.report.canvas_results import COLUMNS, CanvasResults, sentences
from mtplab.report.html import NAME, esc, section
from mtplab.report.page import TAIL, table
from mtplab.trials.files import write_text

CAPTIONS = {
    "Quality against tokens per forward": "One dot per number of steps (the label), with its 95 % interval over "
    "prompts. Filled and joined: the frontier, which no other row beats in both.",
    "Steps used": "Canvases of the longest run. Orange: canvases at the cap, which had not stopped by themselves; one "
    "that stopped in its very last step is not among them.",
    "When each position settled": "The longest run: the step since which a position held its final token.",
    "Entropy by step": "Mean over the canvases that took the step; canvases that stopped are no longer in it.",
}
WORDS = {
    "used": "mean number of denoising steps of a canvas; it may stop before its cap",
    "at cap": "share of canvases that did not stop by themselves",
    "tok/s": "tokens returned over the time from the end of the prefill to the last canvas",
    "tokens_per_forward": "valid tokens (to the end of text) over denoise and commit passes, without the prefill's",
    "agreement": "share of positions with the longest run's token, from the same starting canvases",
    "edit_distance": "Levenshtein distance over tokens to the longest run's text, by the longer length",
    "nll": "negative log-likelihood per token under the scorer, in nats; lower is likelier text, also where it repeats",
    "distinct_2": "different pairs of neighbouring tokens over all pairs",
    "repetition": "share of tokens equal to the one just before",
}


def write(results: CanvasResults) -> Path:
    """Write page.html into the run folder and return its path."""
    path = results.store.folder / NAME
    write_text(path, page(results))
    return path


def page(results: CanvasResults) -> str:
    """The whole document."""
    claims = "".join(f"<li>{esc(s)}</li>" for s in sentences(results))
    parts = [
        _header(results),
        section("What it shows", f"<ul class=claims>{claims}</ul>" if claims else "<p>No trial is complete yet.</p>"),
        section("Steps compared", table(COLUMNS, results.rows) if results.rows else ""),
        *_plots(results),
        section("Texts", _samples(results)),
        section("What to know before believing it", _warnings(results)),
        section("Words", html.words(WORDS)),
        section("Settings and machine", _settings(results)),
    ]
    return html.document(results.run, parts)


def _header(results: CanvasResults) -> str:
    plan, manifest = results.store.plan, results.store.manifest
    # Every arm's is the same, and a plan may leave it to the checkpoint.
    effective = next(iter((manifest.get("effective") or {}).values()), {})
    facts = html.machine_facts(manifest, plan.model) | {
        "plan": f"{len(plan.arms)} arms x {plan.seeds} seeds, {plan.prompts} prompts per text, "
        f"{plan.prompt_tokens} tokens in, {effective.get('max_tokens', plan.max_tokens)} out",
        "trials": f"{len(results.trials)} stored, {len(results.failed)} failed, each in a fresh process",
        "made": html.made_by(manifest),
    }
    return html.header("mtplab denoise", results.run, facts)


def _plots(results: CanvasResults) -> list[str]:
    from mtplab.report import canvas_plots

    return html.figures(lambda: canvas_plots.all_plots(results), CAPTIONS.__getitem__)


def _samples(results: CanvasResults) -> str:
    """The first prompt of every text, with what each number of steps made of it from the same canvases."""
    texts = {p.id: p.text for p in results.store.prompts()}
    shown: dict[str, str] = {}
    blocks: dict[str, list[str]] = {}
    for stored in results.trials:
        for request, pieces in zip(stored.requests, stored.pieces, strict=True):
            if shown.setdefault(request.corpus, request.id) == request.id and stored.trial.round == 0:
                made = "".join(pieces)
                label = f"{request.settings['arm']}, {len(request.steps)} steps in all"
                blocks.setdefault(request.corpus, []).append(f"<b>{esc(label)}</b>\n{esc(made)}")
    out = []
    for corpus, prompt in shown.items():
        text = texts.get(prompt, "")
        tail = ("\u2026" if len(text) > TAIL else "") + text[-TAIL:]
        body = "\n\n".join(sorted(blocks.get(corpus, [])))
        out.append(
            f"<details open><summary>{esc(corpus)} <code>{esc(prompt)}</code></summary>"
            f"<pre><span class=prompt>{esc(tail)}</span>\n\n{body}</pre></details>"
        )
    return "".join(out)


def _warnings(results: CanvasResults) -> str:
    items = [*map(str, results.store.manifest.get("notices") or [])]
    notes = {r[k].get("note") for r in results.rows for k in ("nll", "distinct_2")} - {None}
    items += [f"intervals: {n}" for n in sorted(notes)]
    return html.bullets(items + html.disturbed(results.trials, results.failed))


def _settings(results: CanvasResults) -> str:
    manifest = results.store.manifest
    shown: dict[str, Any] = {
        "plan": results.store.plan.to_json(),
        "effective settings": manifest.get("effective"),
        "model": manifest.get("model"),
        "machine": manifest.get("machine"),
    }
    return html.settings(shown)
