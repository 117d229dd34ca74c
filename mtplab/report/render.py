"""The result of a verb in the format that was asked for."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtplab.records.dialects import translate
from mtplab.report import tables
from mtplab.report.conclusions import conclusions
from mtplab.report.results import Results
from mtplab.report.tables import Column, number
from mtplab.trials.files import clean, dumps

WIDTH = 110


def plain(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], form: str, document: Any) -> str:
    """Rows in one of the five formats; `document` is what `json` prints."""
    if form == "json":
        return dumps(document) + "\n"
    if form == "jsonl":
        return tables.lines_of_json(rows)
    if form == "csv":
        return tables.comma_separated(rows)
    return tables.markdown(columns, rows) if form == "md" else tables.aligned(columns, rows)


def text_column(key: str) -> Column:
    return Column(key, lambda row: "" if row.get(key) is None else str(row[key]), right=False)


def sweep(results: Results, form: str, *, dialect: str | None = None) -> str:
    """A sweep: tables with conclusions for people, rows for machines. A dialect adds its own table (json: a key)."""
    extra = list(dialect_rows(results, dialect)) if dialect else []
    if form == "json":
        return dumps(results.document() | ({"dialect": extra} if dialect else {})) + "\n"
    if form in ("jsonl", "csv"):
        return plain(extra if dialect else results.rows, (), form, None)
    parts = [tables.sweep(results, form), paragraphs([*conclusions(results), *exactness(results)], form)]
    if extra:
        meant = {r["label"]: r["definition"] for r in extra}
        parts += [plain(extra, DIALECT, form, None), paragraphs([f"{k}: {v}" for k, v in meant.items()], form)]
    return "\n".join(p for p in parts if p)


def exactness(results: Results) -> list[str]:
    """What the arms' logits are equal to by the way drafts were checked, where that was chosen."""
    mode, equals = results.verify["mode"], results.verify["equals"]
    return [] if mode == "batched" else [f"verify {mode}: logits equal to {equals}."]


def paragraphs(texts: Sequence[str], form: str) -> str:
    """Sentences below a table, folded for a terminal; a list in Markdown."""
    if form == "md":
        return "".join(f"- {t}\n" for t in texts)
    return "".join(textwrap.fill(t, WIDTH, subsequent_indent="  ") + "\n" for t in texts)


def _dialect_value(row: Mapping[str, Any]) -> str:
    value = row["value"]
    return ", ".join(number(v) for v in value) if isinstance(value, list) else number(value)


DIALECT = (
    *(text_column(k) for k in ("corpus", "mode", "arm", "label")),
    Column("value", _dialect_value),
)


def dialect_rows(results: Results, dialect: str) -> Iterator[dict[str, Any]]:
    """The same counts as another system defines them, one row per number."""
    for (mode, corpus), arms in results.requests.items():
        for arm, requests in arms.items():
            for entry in translate(requests, dialect):
                yield {"corpus": corpus, "mode": mode, "arm": arm, **clean(entry.to_json())}


def checks(found: Sequence[Mapping[str, Any]], form: str) -> str:
    """The doctor's list."""
    columns = [text_column(k) for k in ("name", "status", "value", "advice")]
    return plain(found, columns, form, {"schema": 1, "checks": list(found)})


def facts(found: Mapping[str, Any], form: str) -> str:
    """A nested dict of facts as key and value; people get bytes as MiB."""
    readable = form in ("table", "md")
    rows = [{"key": k, "value": _mib(k, v) if readable else v} for k, v in flatten(found)]
    return plain(rows, [text_column("key"), text_column("value")], form, found)


def _mib(key: str, value: Any) -> Any:
    sized = key.startswith(("bytes.", "memory.")) or key.endswith("_bytes")
    return f"{value / 2**20:.1f} MiB" if sized and isinstance(value, int) else value


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a nested dict; lists of plain values stay one line."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(v, (Mapping, list, tuple)) for v in value):
        for i, inner in enumerate(value):
            yield from flatten(inner, f"{path}[{i}]")
    elif isinstance(value, (list, tuple)):
        yield path, ", ".join(map(str, value))
    else:
        yield path, value
