"""Was the machine ours while we measured? A small thread reads the system's own counters beside a trial.

Other people's work shows as processor time that is neither idle nor ours:

    other = (busy jiffies of the system - ticks of this process) / all jiffies,    a share of ALL cores

so one busy foreign process on a machine of 2 cores is 0.5. Time that a hypervisor took away ("steal") counts as
other: it disturbs as well. A reading costs about 0.1 ms; at the default interval that is 0.02 % of one core.

A sampler can fail without a sound (a container that shows zeros, a mocked /proc): `alive` says whether the
counters moved at all, and a run that cannot be judged is `disturbed: null`, never `false`.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

from . import machine

SHORT_NS = 200_000_000  # counters move in steps of 10 ms: below this a trial is too short to judge
DISTURBED = 0.15  # share of all cores that others may use before a trial counts as disturbed


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """One look at the counters: when, ticks since boot (system) or since the start (process), and bytes."""

    at_ns: int
    total: int
    busy: int
    own: int
    available: int | None
    swap_used: int | None


def _system(proc: Path) -> tuple[int, int] | None:
    """All ticks and busy ticks of the system; guest time is part of user time already."""
    first = (machine.read(proc / "stat") or "").partition("\n")[0].split()
    if len(first) < 5 or first[0] != "cpu" or not all(x.isdecimal() for x in first[1:]):
        return None
    ticks = [int(x) for x in first[1:9]]
    idle = ticks[3] + (ticks[4] if len(ticks) > 4 else 0)
    return sum(ticks), sum(ticks) - idle


def _own(proc: Path, pid: int) -> int:
    """Ticks of one process and its finished children (fields 14 to 17; the name in field 2 may hold blanks)."""
    fields = (machine.read(proc / str(pid) / "stat") or "").rpartition(")")[2].split()
    return sum(int(x) for x in fields[11:15]) if len(fields) > 14 else 0


def look(proc: Path = machine.PROC, pid: int | None = None) -> Reading | None:
    """Read all counters now, or None where the system has no /proc/stat."""
    system = _system(proc)
    if system is None:
        return None
    memory = machine.memory(proc)
    own = _own(proc, os.getpid() if pid is None else pid)
    return Reading(time.monotonic_ns(), *system, own, memory["available"], memory["swap_used"])


class LoadSampler:
    """Sample load, memory and swap beside a trial: `with LoadSampler() as s: ...; s.summary()`.

    `interval_s`: seconds between readings; one is also taken at the start and at the end. `limit`: the share of
    all cores above which others disturb. `pid`: whose ticks are ours (default this process).
    """

    def __init__(
        self,
        interval_s: float = 0.5,
        *,
        limit: float = DISTURBED,
        pid: int | None = None,
        proc: Path = machine.PROC,
    ):
        if not interval_s >= 0.02:
            raise ValueError(f"a sampling interval of {interval_s} s disturbs what it watches; use 0.02 s or more")
        self.interval_s, self.limit = interval_s, limit
        self._pid, self._proc = pid, proc
        self._readings: list[Reading] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> LoadSampler:
        if self._thread is not None:
            raise RuntimeError("this sampler was started before; make a new one for a new trial")
        self._sample()
        self._thread = threading.Thread(target=self._run, name="mtplab-load", daemon=True)
        # Without /proc there is nothing to wake up for.
        if self._readings:
            self._thread.start()
        return self

    def stop(self) -> None:
        if self._thread is not None and not self._stop.is_set():
            self._stop.set()
            if self._thread.ident is not None:
                self._thread.join()
            self._sample()

    def __enter__(self) -> LoadSampler:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self._sample()

    def _sample(self) -> None:
        reading = look(self._proc, self._pid)
        if reading is not None:
            self._readings.append(reading)

    def summary(self) -> dict[str, Any]:
        """JSON-able; see `summarize`."""
        return summarize(tuple(self._readings), interval_s=self.interval_s, limit=self.limit)


def _shares(first: Reading, last: Reading) -> tuple[float, float] | None:
    """(own, other) as shares of all cores between two readings, or None if they are too close to tell."""
    total = last.total - first.total
    if total < 5:
        return None
    busy, own = last.busy - first.busy, last.own - first.own
    # Both counters are rounded to ticks, each on its own: a small negative remainder is rounding.
    return own / total, max(0.0, busy - own) / total


def _empty(interval_s: float, limit: float, note: str) -> dict[str, Any]:
    names = ("alive", "disturbed", "other_mean", "other_max", "own_mean", "available_low", "swap_used_max")
    fixed = {"samples": 0, "interval_s": interval_s, "limit": limit, "note": note}
    return dict.fromkeys((*names, "swap_growth")) | fixed


def _alive(first: Reading, last: Reading) -> bool | None:
    """The counters moved: time passed, and something (we, at least) used a processor in it. None: cannot tell."""
    if last.at_ns - first.at_ns < SHORT_NS:
        return None
    return last.total > first.total and last.busy > first.busy


def summarize(readings: tuple[Reading, ...], *, interval_s: float, limit: float) -> dict[str, Any]:
    """What the readings say.

    `alive`: the counters moved (null: too short to tell); `other_mean`, `other_max`, `own_mean`: shares of all
    cores; `disturbed`: others used more than `limit` on average (null unless alive); `available_low`,
    `swap_used_max`, `swap_growth`: bytes; `note`: why something is null, else null.
    """
    if not readings:
        return _empty(interval_s, limit, "this system has no /proc/stat: load was not sampled")
    whole = _shares(readings[0], readings[-1])
    alive = _alive(readings[0], readings[-1])
    parts = [s for a, b in itertools.pairwise(readings) if (s := _shares(a, b)) is not None]
    judged = alive and whole is not None
    free = [r.available for r in readings if r.available is not None]
    swap = [r.swap_used for r in readings if r.swap_used is not None]
    note = None if judged else "the trial was too short to judge" if alive is not False else "the counters stand still"
    return {
        "alive": alive,
        "disturbed": whole[1] > limit if judged else None,
        "other_mean": round(whole[1], 4) if judged else None,
        "other_max": round(max(s[1] for s in parts), 4) if judged and parts else None,
        "own_mean": round(whole[0], 4) if judged else None,
        "available_low": min(free, default=None),
        "swap_used_max": max(swap, default=None),
        "swap_growth": swap[-1] - swap[0] if swap else None,
        "samples": len(readings),
        "interval_s": interval_s,
        "limit": limit,
        "note": note,
    }
