"""Progress of a run on stderr: what runs, how far it is, when it will be over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

STEP_EVERY_S = 60.0


class Progress:
    """One living line on a terminal, one line per trial elsewhere. `quiet` keeps only the notes."""

    def __init__(
        self, stream: TextIO | None = None, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ):
        self.stream, self.quiet, self.clock = stream or sys.stderr, quiet, clock
        self.live = bool(getattr(self.stream, "isatty", lambda: False)())
        self.total = self.finished = 0
        self.began = clock()
        self._name, self._shown, self._said = "", False, float("-inf")

    def stage(self, text: str | None) -> None:
        """What happens before the first trial."""
        if text:
            self._line(f"{text} ...")

    def step(self, text: str) -> None:
        """One of many small steps: all of them on a terminal, one a minute elsewhere."""
        if self.live or self.clock() - self._said >= STEP_EVERY_S:
            self._said = self.clock()
            self._line(text)

    def begin(self, trials: int) -> None:
        self.total, self.finished, self.began = trials, 0, self.clock()

    def trial(self, name: str) -> None:
        self._name = name
        self._line(f"trial {self.finished + 1}/{self.total} {name}{self._eta(self.finished)}")

    def within(self, event: dict[str, Any]) -> None:
        """A worker's {"at": n, "of": m}."""
        if self.live and event.get("of"):
            at, of = event["at"], event["of"]
            share = self.finished + at / of
            self._line(f"trial {self.finished + 1}/{self.total} {self._name} {at}/{of} requests{self._eta(share)}")

    def next(self) -> None:
        self.finished += 1

    def note(self, text: str) -> None:
        """Something a person should read; it stays on the screen."""
        self._wipe()
        self._write(f"note: {text}\n")

    def close(self) -> None:
        self._wipe()

    def _eta(self, share: float) -> str:
        if share <= 0:
            return ""
        left = (self.clock() - self.began) / share * (self.total - share)
        return f", about {duration(left)} left"

    def _line(self, text: str) -> None:
        if self.quiet:
            return
        if self.live:
            self._write(f"\r\x1b[K{text}")
            self._shown = True
        else:
            self._write(f"{text}\n")

    def _wipe(self) -> None:
        if self._shown:
            self._write("\r\x1b[K")
            self._shown = False

    def _write(self, text: str) -> None:
        # A closed stderr must not end a measurement.
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):
            self.quiet = True


def duration(seconds: float) -> str:
    """3 -> "3 s", 130 -> "2 min 10 s", 7300 -> "2 h 1 min"."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"
