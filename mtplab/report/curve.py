"""The learning curve of a head: what `mtplab head train` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtplab.report.render import plain
from mtplab.report.tables import Column, number


def render(made: Mapping[str, Any], form: str) -> str:
    """A finished training in one of the five formats; `json` is the whole summary."""
    rows = made.get("curve") or []
    return plain(rows, COLUMNS, form, {"schema": 1, **made})


def _depths(key: str) -> Column:
    return Column(key, lambda row: " / ".join("-" if v is None else f"{v:.3f}" for v in row[key]))


COLUMNS = (
    Column("step", lambda row: str(row["step"])),
    Column("tokens", lambda row: str(row["tokens"])),
    Column("s", lambda row: f"{row['seconds']:.0f}"),
    Column("loss", lambda row: number(row["loss"])),
    *(_depths(k) for k in ("match_text", "overlap_text", "match_own", "overlap_own")),
)
