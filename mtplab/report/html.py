"""The frame that every page shares: ONE self-contained HTML file, no script, no network, every name and text escaped.

Model names, prompts and outputs come from anywhere: nothing of them reaches a page except through `esc`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

from mtplab.errors import RequestError
from mtplab.report.render import flatten
from mtplab.report.style import CSS

NAME = "page.html"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def esc(value: Any) -> str:
    return escape(str(value), quote=True)


def document(title: str, parts: Iterable[str]) -> str:
    """The whole page; empty parts are left out."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{esc(title)} - mtplab</title><style>{CSS}</style></head>\n<body><main>\n"
        + "\n".join(p for p in parts if p)
        + "\n</main></body></html>\n"
    )


def section(title: str, body: str) -> str:
    return f"<section><h2>{esc(title)}</h2>{body}</section>" if body else ""


def header(kind: str, title: str, facts: Mapping[str, str]) -> str:
    listed = f"<dl>{pairs(facts)}</dl>" if facts else ""
    return f"<header><p class=kind>{esc(kind)}</p><h1>{esc(title)}</h1>{listed}</header>"


def pairs(facts: Mapping[str, str]) -> str:
    return "".join(f"<dt>{esc(k)}</dt><dd>{esc(v)}</dd>" for k, v in facts.items())


def words(meanings: Mapping[str, str]) -> str:
    return f"<dl class=words>{pairs(meanings)}</dl>"


def bullets(items: Iterable[Any]) -> str:
    made = "".join(f"<li>{esc(i)}</li>" for i in items)
    return f"<ul>{made}</ul>" if made else ""


def figures(draw: Callable[[], Mapping[str, str | None]], caption: Callable[[str], str]) -> list[str]:
    """A section per drawing of `draw`, by title; where matplotlib is missing, the sentence that says so."""
    try:
        drawn = draw()
    except RequestError as error:
        return [section("Plots", f"<p class=note>{esc(error)}</p>")]
    return [
        section(title, f"<figure>{svg}<figcaption>{esc(caption(title))}</figcaption></figure>")
        for title, svg in drawn.items()
        if svg is not None
    ]


def machine_facts(manifest: Mapping[str, Any], model: str) -> dict[str, str]:
    """Model, machine and device of a run."""
    machine, blas = manifest.get("machine") or {}, manifest.get("blas") or {}
    return {
        "model": (manifest.get("model") or {}).get("model", model),
        "machine": f"{machine.get('cpu') or 'unknown processor'}, {machine.get('cores')} cores, {machine.get('os')}",
        "device": f"{machine.get('device')}, {blas.get('name') or 'no BLAS'} ({blas.get('threads')} thread)",
    }


def made_by(manifest: Mapping[str, Any]) -> str:
    mlx = (manifest.get("machine") or {}).get("mlx")
    return f"{manifest.get('created')} with mtplab {manifest.get('mtplab')}, mlx {mlx}"


def settings(shown: Mapping[str, Any]) -> str:
    """Nested settings, flat in one folded table per title."""
    blocks = []
    for title, value in shown.items():
        rows = "".join(f"<tr><td class=l>{esc(k)}</td><td class=l>{esc(v)}</td></tr>" for k, v in flatten(value or {}))
        blocks.append(
            f"<details><summary>{esc(title)}</summary><div class=scroll><table>{rows}</table></div></details>"
        )
    return "".join(blocks)


def disturbed(trials: Iterable[Any], failed: Iterable[Mapping[str, Any]]) -> list[str]:
    """What there is to say of trials that ran beside others, or failed."""
    busy = [t.trial.name for t in trials if (t.done.get("load") or {}).get("disturbed")]
    items = [f"{len(busy)} trials ran while other processes were busy: {', '.join(busy)}"] if busy else []
    return items + [f"failed and in no row: {f['trial']}: {f['reason']}" for f in failed]
