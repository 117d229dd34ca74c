"""What a benchmark prints: a table for people, then one JSON document as the last line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any


def emit(document: Mapping[str, Any]) -> None:
    """The table for people, then the JSON document as the last line."""
    for line in table(document):
        print(line)
    print(json.dumps(_finite(document), allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    """NaN and infinity are not JSON: null."""
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(document: Mapping[str, Any]) -> Iterator[str]:
    """Lines: what ran where, every ratio with interval and verdict, every warning."""
    m = document["machine"]
    blas = m.get("blas") or {}
    yield f"{document['benchmark']} on {document['model']}, {document['rounds']} rounds"
    yield (
        f"{m.get('cpu')}, {m.get('cores')} cores; mlx {m.get('mlx')}, mlx-lm {m.get('mlx_lm')}; BLAS "
        f"{blas.get('name')} {blas.get('version') or ''} x{blas.get('threads')}; load {m['load_average']['before']}"
    )
    for side, numbers in document.get("sides", {}).items():
        yield f"  {side:<28} " + "  ".join(f"{k} {_text(v)}" for k, v in numbers.items())
    for r in document["ratios"]:
        span = f"[{_text(r['low'])}, {_text(r['high'])}]"
        said = "" if r["wanted"] is None else f"  wanted {r['wanted']}: {_said(r)}"
        yield f"  {r['name']:<44} {_text(r['value'])} {span}{said}"
    for failure in document["failed"]:
        yield f"  left out: round {failure['round'] + 1}, {failure['side']}: {failure['reason']}"
    for warning in document["warnings"]:
        yield f"  warning: {warning}"


def _text(x: Any) -> str:
    return "-" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x)


def _said(ratio: Mapping[str, Any]) -> str:
    if ratio["met"] is None:
        return "not measured"
    return ("met" if ratio["met"] else "missed") + ("" if ratio["clear"] else ", within noise")
