"""Text and drawing of `denoise --show` on one terminal, as a small emulator of one shows them."""

from __future__ import annotations

import os
import re
import sys

import pytest

from mtplab.cli import denoise
from mtplab.decode.settings import Settings
from mtplab.records.canvas import Canvas, DenoiseStep
from mtplab.records.types import Prefill
from mtplab.report.canvas_stream import Drawing

# By hand, not by the code under test: what terminals make of the characters used here; the others take one cell.
WIDE, NONE = "漢字世界の🙂", "\u0301\u200d\ufe0f"
STEERING = re.compile(r"\x1b\[(\d*)([A-Za-z])")


class Terminal:
    """Rows of cells as xterm and VTE keep them. A character in the last column leaves the cursor there: only the next
    one wraps (`pending`), and a tab never does. Rows above the last `height` have scrolled away from the cursor."""

    def __init__(self, width, height=24):
        self.width, self.height = width, height
        self.rows, self.row, self.column, self.pending = [[None] * width], 0, 0, False

    def write(self, text):
        at = 0
        while at < len(text):
            code = STEERING.match(text, at)
            if code:
                self._steer(int(code[1] or 0), code[2])
            else:
                self._put(text[at])
            at = code.end() if code else at + 1
        return len(text)

    def _steer(self, number, letter):
        if letter == "m":
            return
        if letter == "A":
            self.row = max(len(self.rows) - self.height, 0, self.row - max(1, number))
        elif letter == "G":
            self.column = min(max(1, number), self.width) - 1
        elif letter == "J" and not number:
            self.rows[self.row][self.column :] = [None] * (self.width - self.column)
            self.rows[self.row + 1 :] = [[None] * self.width for _ in self.rows[self.row + 1 :]]
        else:
            raise AssertionError(f"ESC[{number}{letter} is not among the codes of a drawing")
        if letter != "J":
            self.pending = False

    def _put(self, character):
        if character == "\r":
            self.column, self.pending = 0, False
        elif character == "\n":
            self._down()
        elif character == "\t":
            self.column = max(self.column, min(self.column // 8 * 8 + 8, self.width - 1))
        elif character in NONE:
            cells, at = self.rows[self.row], self.column if self.pending else self.column - 1
            cells[at if cells[at] else at - 1] += character
        else:
            assert character.isprintable() or character == " ", f"{character!r} steers the terminal"
            self._print(character, 2 if character in WIDE else 1)

    def _print(self, character, size):
        if self.pending or self.column + size > self.width:
            self._down()
        cells, end = self.rows[self.row], self.column + size
        # The second cell of a wide character holds no text of its own; one that loses a half is gone.
        if cells[self.column] == "":
            cells[self.column - 1] = " "
        if end < self.width and cells[end] == "":
            cells[end] = " "
        cells[self.column : end] = [character, ""][:size]
        self.pending = self.column + size == self.width
        self.column = min(self.column + size, self.width - 1)

    def _down(self):
        """A line feed as the terminal driver passes it on: with a carriage return."""
        self.row, self.column, self.pending = self.row + 1, 0, False
        if self.row == len(self.rows):
            self.rows.append([None] * self.width)

    @property
    def cursor(self):
        return self.row, self.column, self.pending

    def lines(self, first=0, last=None):
        """Rows as text; cells never written are blank inside a row and nothing at its end, and so are rows."""
        made = []
        for cells in self.rows[first:last]:
            used = max((i for i, c in enumerate(cells) if c is not None), default=-1) + 1
            made.append("".join(" " if c is None else c for c in cells[:used]))
        while made and not made[-1]:
            made.pop()
        return made

    def isatty(self):
        return True

    def flush(self):
        pass


def shown(text, width, height=24):
    """A terminal that was given this text and nothing else."""
    screen = Terminal(width, height)
    screen.write(text)
    return screen


def test_the_emulator_wraps_as_terminals_do():
    assert shown("abcd", 4).cursor == (0, 3, True) and shown("abcd\n", 4).cursor == (1, 0, False)
    assert shown("abcde", 4).lines() == ["abcd", "e"] and shown("abcd\re", 4).lines() == ["ebcd"]
    assert shown("abc字d", 4).lines() == ["abc", "字d"] and shown("ab字", 4).cursor == (0, 3, True)
    assert shown("字世\rab", 4).lines() == ["ab世"] and shown("字世\x1b[2Gab", 4).lines() == [" ab "]
    assert shown("a\tb\tc", 12).lines() == ["a       b  c"] and shown("abcd\te", 4).lines() == ["abcd", "e"]
    assert shown("abce\u0301f", 4).lines() == ["abce\u0301", "f"]
    assert shown("a\nbc\nd\x1b[9A\x1b[2GX\x1b[J", 4, height=2).lines() == ["a", "bX"], "no further than its top"


class Letters:
    """A tokenizer whose token i is the i-th of some texts."""

    def __init__(self, texts):
        self.texts = texts

    def decode(self, tokens):
        return "".join(self.texts[t] for t in tokens)

    def stream(self):
        return self

    def add(self, token):
        return self.texts[token]

    def flush(self):
        return ""


class Session:
    """Plays canvases, each a list of texts (its tokens), three steps each; `watch(text so far, step)` after each."""

    def __init__(self, canvases, watch, *, breaks=False):
        self.texts = [t for c in canvases for t in c]
        self.canvases, self.watch, self.breaks = canvases, watch, breaks
        self.tokenizer, self.denoiser = Letters(self.texts), self

    def settings(self, settings):
        return settings.effective()

    def run(self, tokens, *, request, settings):
        yield Prefill(3, 0, 2048, 1, 0, None, None, 0, 1)
        first = 0
        for index, texts in enumerate(self.canvases):
            ids, count = tuple(range(first, first + len(texts))), len(texts)
            for step in range(3):
                held = tuple(range(min(count, step)))
                record = DenoiseStep(index, step, 0.8, len(held), 0, None, 1.0, 1.0, 1, 2, ids, held)
                yield record
                self.watch("".join(self.texts[:first]), record)
                if self.breaks and index == len(self.canvases) - 1 and step == 1:
                    raise KeyboardInterrupt
            cut = "cap" if index == len(self.canvases) - 1 else None
            yield Canvas(index, first, count, 3, 3, "cap", ids, (1,) * count, None, count, count, cut, 1, 2, 3, None)
            first += count


def drawn(texts, record, width):
    """The rows of a frame: its last column stays free, so that no terminal is ever about to wrap."""
    rows, used = [""], 0
    signs = "".join(pictured(t).replace("\n", "⏎").replace("\t", " ") or "·" for t in texts)
    for character in f"step {record.index + 1}, {record.accepted} of {len(texts)} accepted: {signs}":
        size = 0 if character in NONE else 2 if character in WIDE else 1
        if used + size >= width:
            rows, used = [*rows, ""], 0
        rows[-1], used = rows[-1] + character, used + size
    return rows


@pytest.fixture
def play(monkeypatch):
    """`play(canvases, width, ...)` -> (terminal at the end, all text): every frame was looked at."""

    def run(canvases, width, *, height=24, breaks=False, before="", output="table"):
        screen, frames = Terminal(width, height), []
        screen.write(before)
        for stream in ("stdout", "stderr"):
            monkeypatch.setattr(sys, stream, screen)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("LINES", str(height))

        def watch(text, record):
            above = shown(before + pictured(text if output == "table" else ""), width, height)
            rows = above.row + (above.column > 0)
            assert screen.lines(0, rows) == above.lines(), f"{text!r} in step {record.index + 1}"
            # Just below it, and nothing of the frame before.
            assert screen.lines(rows) == drawn(canvases[record.canvas], record, width)[: height - 1]
            frames.append(record)

        session, said = Session(canvases, watch, breaks=breaks), []
        try:
            denoise.stream(session, [1], Settings(), output, drawing=True, say=said.append)
        except KeyboardInterrupt:
            assert breaks
        assert len(frames) == 3 * len(canvases) - breaks and len(said) == 1
        return screen, "".join(t for c in canvases[: len(canvases) - breaks] for t in c)

    return run


MID = [["On", "ce"], [" upon", " a"], [" time", "."]]
TEXTS = {
    "mid-line": MID,
    "ends in a newline": [["One line.", "\n"], ["Two", "\n", "\n"], ["three", "\n"]],
    "nothing before": [["\n"], ["", ""], ["a"]],
    "wrapped": [["word " * 5, "end"], [" and " * 9], ["."]],
    "wide": [["漢字世界の", "漢字"], ["世界", "の漢字世界の漢字世界"], ["x"]],
    "tabs": [["a\tb", "\tc"], ["\t", "d"], ["\te\t\t\t", "f\t"], ["g"]],
    "a tab after a wide character": [["漢字世界の", "\tx"], ["\ty"], ["z"]],
    "no width": [["cafe\u0301 ", "e\u0301"], ["🙂\u200d", "e\u0301\ufe0f"], ["x"]],
    "signs for what would steer": [["a\x1b[2J", "\r"], ["\tb\x07"], ["c"]],
}
FULL = {
    "one row": lambda w: [["x" * w], ["y", "z"]],
    "two rows": lambda w: [["x" * w, "x" * w], ["y", "z"]],
    "then a newline": lambda w: [["x" * w], ["\ny"], ["\n", "z"]],
    "then a tab": lambda w: [["x" * w], ["\ty"], ["z"]],
    "a tab to the last column": lambda w: [["x" * (w - 1), "\t"], ["\t"], ["yz"]],
    "wide": lambda w: [["x" * (w % 2), "漢" * (w // 2)], ["字", "z"]],
    "wide that does not fit": lambda w: [["x" * (w - 1), "漢"], ["字", "z"]],
    "a sign at its end": lambda w: [["x" * (w - 1), "\x07"], ["y"]],
    "no width at its end": lambda w: [["x" * (w - 1), "e\u0301"], ["y"]],
}


def pictured(text):
    return text.replace("\x1b", "␛").replace("\r", "␍").replace("\x07", "␇")


def ended(text, width):
    """What a terminal shows of a finished text without any drawing."""
    return shown(pictured(text) + ("" if text.endswith("\n") else "\n"), width)


@pytest.mark.parametrize("width", [12, 20, 33])
@pytest.mark.parametrize("canvases", TEXTS.values(), ids=TEXTS)
def test_text_and_drawing_on_one_terminal(play, canvases, width):
    screen, text = play(canvases, width)
    assert screen.lines() == ended(text, width).lines() and screen.cursor == ended(text, width).cursor


@pytest.mark.parametrize("width", [12, 33])
@pytest.mark.parametrize("canvases", FULL.values(), ids=FULL)
def test_a_text_that_fills_its_row_goes_on_as_if_nothing_had_been_drawn(play, canvases, width):
    screen, text = play(canvases(width), width)
    assert screen.lines() == ended(text, width).lines() and screen.cursor == ended(text, width).cursor


def test_at_the_bottom_of_the_screen_the_drawing_scrolls_the_text(play):
    before = "".join(f"line {i}\n" for i in range(9))
    screen, text = play(MID, 20, height=6, before=before)
    assert screen.lines() == [*before.splitlines(), text]


def test_a_canvas_that_is_longer_than_the_screen_is_cut_for_what_scrolls_away_cannot_be_redrawn(play):
    screen, text = play([["Once", " upon"], ["a long word "] * 30, ["."]], 20, height=6)
    assert screen.lines() == ended(text, 20).lines()


def test_ctrl_c_takes_the_drawing_away(play):
    screen, text = play(MID, 40, breaks=True)
    assert text == "Once upon a" and screen.lines() == [text] and screen.cursor == (1, 0, False)


def test_the_size_is_that_of_the_terminal_which_is_drawn_on(monkeypatch):
    """With the text in a file; and a terminal may not know its size."""
    size = [33, 9]

    def asked(number):
        if number != sys.stderr.fileno():
            raise OSError("not a terminal")
        return os.terminal_size(size)

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", asked)
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    drawing = Drawing(str)
    assert (drawing.width, drawing.height) == (33, 8), "one row is the text's"
    size[:] = 0, 0
    assert (Drawing(str).width, Drawing(str).height) == (80, 23)


def test_a_document_comes_after_drawings_that_no_text_is_above(play):
    screen, _ = play([["One", "\n"], ["two"], [" three"]], 5000, output="json")
    assert screen.rows[0][0] == "{" and len(screen.lines()) == 1 and '"text":' in screen.lines()[0]
