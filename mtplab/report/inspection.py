"""`mtplab inspect` for people: a few short tables instead of one list of dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mtplab.report import tables
from mtplab.report.render import facts, flatten, text_column

Rows = list[dict[str, Any]]


def inspection(found: Mapping[str, Any], form: str) -> str:
    """The description of a checkpoint: sections for people, flat facts for csv and jsonl, or as it is."""
    if form not in ("table", "md"):
        return facts(found, form)
    parts = []
    for title, rows in sections(found):
        if not rows:
            continue
        columns = [text_column(key) for key in rows[0]]
        table = tables.markdown(columns, rows) if form == "md" else tables.aligned(columns, rows)
        parts.append((f"### {title}\n\n" if form == "md" else f"{title}\n") + table)
    return "\n".join(parts)


def sections(found: Mapping[str, Any]) -> Iterator[tuple[str, Rows]]:
    """(title, rows) of everything that is there to show."""
    yield "checkpoint", _rows({
        "folder": found["folder"], "model_type": found["model_type"], "parameters": f"{found['parameters']:,}",
        "files, tensors": f"{found['files']}, {found['tensors']}", "context": found["context"],
        "dtypes": ", ".join(f"{k} ({n})" for k, n in found["dtypes"].items()), "problem": found["problem"],
    })  # fmt: skip
    yield "bytes by part", list(_parts(found))
    head = found["head"]
    yield "MTP head", _rows({
        "status": head["status"], "family": head.get("family"), "layers": head.get("layers"),
        "declared layers": head.get("declared_layers"), "why": head.get("why"), "stored in": _stored(head),
        "stored norms": head.get("norm_convention"),
        "wiring": _wiring(head["spec"]) if "spec" in head else None,
    })  # fmt: skip
    if head.get("roles"):
        yield "head tensors", list(_roles(head))
    if found.get("canvas"):
        yield "canvas", [{"fact": k, "value": v} for k, v in flatten(found["canvas"])]
    layers, back = found["cache"]["layers"], found["cache"]["rollback"]
    yield "state by layer", [{"state": k, "layers": n, "rolled back": back[k]} for k, n in layers.items()]
    yield "memory: weights as stored and cache at 16 bits", list(_memory(found))
    yield (
        "what mtplab can do",
        [
            *({"what": f"arm {k}", "answer": v} for k, v in found["arms"].items()),
            *({"what": f"verify: {k.replace('_', ' ')}", "answer": v} for k, v in found["verify"].items()),
        ],
    )


def _rows(pairs: Mapping[str, Any]) -> Rows:
    return [{"fact": k, "value": v} for k, v in pairs.items() if v not in (None, "")]


def _stored(head: Mapping[str, Any]) -> str | None:
    if "files" not in head:
        return None
    place = f"{head['folder']}/" if "folder" in head else ""
    files = ", ".join(place + f for f in head["files"])
    return f"{files} ({head['tensors']} tensors, {_size(head['bytes'])})"


def _wiring(spec: Mapping[str, Any]) -> str:
    fusions = {"eh": "concat(embedding, hidden)", "he": "concat(hidden, embedding)", "sum": "sum(embedding, hidden)"}
    return f"{fusions[spec['fusion']]}, takes the {spec['hidden']}-norm hidden state, recurses on {spec['recursion']}"


def _parts(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kinds = (found["quantization"] or {}).get("parts", {})
    for part, size in found["bytes"].items():
        stored = ", ".join(f"{kind} ({n})" for kind, n in kinds.get(part, {}).items())
        yield {"part": part, "size": _size(size), "matrices stored as": stored or None}


def _roles(head: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    means = head["norm_means"]
    for role, r in head["roles"].items():
        kind = r.get("kind") or ", ".join(f"{k} ({n})" for k, n in r["kinds"].items())
        shape = " x ".join(map(str, r["shape"])) if "shape" in r else f"{r['tensors']} tensors"
        mean = means.get(f"{r['name']}.weight")
        yield {"role": role, "tensor": r["name"], "shape": shape, "stored as": kind, "mean": mean}
    named = {f"{r['name']}.weight" for r in head["roles"].values()}
    for name, mean in means.items():
        if name not in named:
            yield {"role": "norm", "tensor": name.removesuffix(".weight"), "mean": mean}


def _memory(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    total = (found["machine"] or {}).get("total")
    for context, size in found["memory"].items():
        fits = None if size is None or total is None else "yes" if size < total else "no"
        yield {"context": context, "needed": _size(size), f"fits in {_size(total)}": fits}


def _size(value: int | None) -> str | None:
    if value is None:
        return "unknown"
    if value < 2**20:
        return f"{value / 2**10:.1f} KiB"
    return f"{value / 2**30:.1f} GiB" if value >= 10 * 2**30 else f"{value / 2**20:.1f} MiB"
