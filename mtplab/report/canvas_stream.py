"""Canvas records -> text as it commits, a picture of the canvas while it resolves, and the statistics line."""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

from mtplab.decode.canvas_policy import CanvasPolicy
from mtplab.records import canvas_metrics as metrics
from mtplab.records.canvas import Canvas, CanvasRequest, DenoiseStep
from mtplab.report.stream import FINISH, Painter
from mtplab.report.tables import number, picture

DIM, RESET, CLEAR = "\x1b[2m", "\x1b[0m", "\x1b[J"
TAB = 8  # columns between tab stops
LEAST_WIDTH = 3  # a wide character and the free last column


class CanvasPainter(Painter):
    """`Painter` for canvases: text appears a canvas at a time; an unfinished step adds none."""

    def feed(self, record: Any) -> str:
        if not isinstance(record, Canvas):
            return ""
        for token in record.emitted_tokens:
            self._held += [(c, "step") for c in self.stream.add(token)]
        return self._finish(record.cut) if record.cut else self._show(len(self._held) - self._keep)


class Drawing:
    """The canvas under way, redrawn in place. Accepted tokens stand, the others are dim: they may still change.

    `before`: the text on the same terminal so far; the drawing goes below its last line, wiping goes back to its end.
    What the screen does not hold of a canvas is not drawn.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Callable[[], str] = str):
        self.decode, self.before, self._rows, self._back = decode, before, 0, ""
        size = terminal_size()
        # The end of the text keeps its row: where it has scrolled away there is no way back to it.
        self.width, self.height = max(LEAST_WIDTH, size.columns), max(1, size.lines - 1)

    def frame(self, record: DenoiseStep) -> str:
        """What to write for a step: the frame before is wiped first."""
        held = set(record.held)
        text, column, rows, dim = self.wipe() + self._below(), 0, 1, None
        head = f"step {record.index + 1}, {record.accepted} of {len(record.tokens)} accepted: "
        cells = [(c, False) for c in head] + [
            (c, i not in held) for i, token in enumerate(record.tokens) for c in self._shown(token)
        ]
        for character, faint in cells:
            if column + cells_of(character) >= self.width:
                if rows == self.height:
                    break
                text, column, rows = text + "\r\n", 0, rows + 1
            if faint is not dim:
                text, dim = text + (DIM if faint else RESET), faint
            text, column = text + character, column + cells_of(character)
        self._rows = rows
        return text + RESET

    def _shown(self, token: int) -> str:
        """One line, nothing that steers the terminal."""
        text = self.decode([token]).replace("\n", "\u23ce").replace("\t", " ")
        return "".join(picture(c) for c in text) or "\u00b7"

    def wipe(self) -> str:
        """Go back to where the last frame began and clear from there."""
        if not self._rows:
            return ""
        up, self._rows = self._rows - 1, 0
        return "\r" + (f"\x1b[{up}A" if up else "") + CLEAR + self._back

    def _below(self) -> str:
        """Onto a row of its own, and how to come back from its beginning."""
        line = "".join(map(picture, self.before().rpartition("\n")[2]))
        column = column_after(line, self.width)
        if not column:
            self._back = ""
            return ""
        again = ""
        if column == self.width:
            # No code leaves the cursor where only the next character wraps; writing the row's last one again does.
            again = line[max(i for i, c in enumerate(line) if c != "\t" and cells_of(c)) :]
            column -= cells_of(again[0])
        self._back = f"\x1b[1A\x1b[{column + 1}G{again}"
        return "\r\n"


def terminal_size() -> os.terminal_size:
    """Of the terminal on stderr, where drawings go; stdout may be a file. COLUMNS and LINES win over it."""
    columns, lines = 0, 0
    with suppress(OSError, ValueError, AttributeError):
        columns, lines = os.get_terminal_size(sys.stderr.fileno())
    return shutil.get_terminal_size((columns or 80, lines or 24))


def column_after(line: str, width: int) -> int:
    """Where a terminal's cursor is after a line, from 0; `width`: its row is full and the next character wraps."""
    column = 0
    for character in line:
        if character == "\t":  # stays in its row
            column = max(column, min(column // TAB * TAB + TAB, width - 1))
        elif size := cells_of(character):
            column = size if column + size > width else column + size
    return column


def cells_of(character: str) -> int:
    """Columns of a terminal that a character takes: 0, 1 or 2."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf") and character != "\u00ad":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def effective_line(effective: Mapping[str, Any]) -> str:
    """The settings in force that are not the reference's, each with where it came from; not those that decide
    nothing beside the others."""
    idle = CanvasPolicy(**{f.name: effective[f.name] for f in fields(CanvasPolicy)}).idle
    sources = {k: v for k, v in effective["sources"].items() if k not in idle and v != "reference"}
    said = [f"{k} {effective[k]} ({v})" for k, v in sources.items()]
    return f"settings: {', '.join([*said, 'the rest as in the published reference'])}"


def statistics(request: CanvasRequest) -> dict[str, Any]:
    """The numbers of one request, by their names in the tables."""
    one, per = [request], metrics.tokens_per_forward([request])
    return {
        "tokens": metrics.emitted_total(one),
        "prompt_tokens": request.prefill.prompt_tokens,
        "canvases": len(request.canvases),
        "tok_s": metrics.tok_s(one),
        "positions_s": metrics.positions_s(one),
        "steps_used": metrics.steps_used(one),
        "stops": [c.stop for c in request.canvases],
        "cap_share": metrics.cap_share(one),
        "step_ms": metrics.step_ms(one),
        "commit_ms": metrics.commit_ms(one),
        "forwards": metrics.forwards(one)._asdict(),
        "tokens_per_forward": per.without_prefill,
        "tokens_per_forward_with_prefill": per.with_prefill,
        "emitted_per_forward": per.emitted,
        "prefill_ms": (request.prefill.end_ns - request.prefill.start_ns) / 1e6,
        "first_canvas_ms": (request.canvases[0].end_ns - request.prefill.start_ns) / 1e6 if request.canvases else None,
        "finish": request.finish,
    }


def statistics_line(request: CanvasRequest) -> str:
    """The same in one line."""
    s = statistics(request)
    used = ", ".join(f"{n} ({why})" for n, why in zip(s["steps_used"], s["stops"], strict=True))
    parts = [
        str(request.settings.get("sampler", "")),
        f"{s['tokens']} tokens in {s['canvases']} canvases of {request.settings.get('canvas')}",
        f"{number(s['tok_s'], 1)} tok/s",
        f"{number(s['positions_s'], 1)} positions/s",
        f"steps used {used}",
        f"tokens_per_forward {number(s['tokens_per_forward'])}",
        f"prefill {s['prompt_tokens']} tokens in {number(s['prefill_ms'], 0)} ms",
        f"ended by {FINISH.get(s['finish'], s['finish'])}",
    ]
    return " | ".join(p for p in parts if p)
