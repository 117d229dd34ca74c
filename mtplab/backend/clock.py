"""Clocks that a test can script, and the fence that makes a reading mean something.

mlx works lazily: without a fence a clock times the building of a graph. `fence` evaluates and waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import repeat
from typing import Any, Protocol


class Clock(Protocol):
    """What a decoder reads time from."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never goes back."""
        ...


class MonotonicClock:
    """The machine's monotonic clock, at the finest resolution Python has."""

    def now_ns(self) -> int:
        return time.perf_counter_ns()


class ScriptedClock:
    """A clock for tests and replays: every reading first advances by the next step.

    `steps`: nanoseconds, either one int for all readings or an iterable, one step a reading. `start` is the time
    before the first reading. A reading past the end of the script is an error, never a repeated value.
    """

    def __init__(self, steps: int | Iterable[int], *, start: int = 0):
        self._steps = repeat(steps) if isinstance(steps, int) else iter(steps)
        self._now = start
        self._readings = 0

    def now_ns(self) -> int:
        step = next(self._steps, None)
        if step is None:
            raise RuntimeError(f"the scripted clock has {self._readings} steps and was read once more; script more")
        if step < 0:
            raise ValueError(f"step {self._readings} of the scripted clock is {step}; a clock never goes back")
        self._readings += 1
        self._now += step
        return self._now


def fence(*arrays: Any) -> None:
    """Evaluate the arrays (or trees of them) and wait until the device is done."""
    import mlx.core as mx

    mx.eval(*arrays)
    mx.synchronize()
