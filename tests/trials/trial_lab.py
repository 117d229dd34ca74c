"""A small run with a worker that needs no model."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from mtplab.trials import runner
from mtplab.trials.plan import Plan
from mtplab.trials.progress import Progress

FAKE = (sys.executable, str(Path(__file__).parent / "fake_worker.py"))


class Lab:
    """Plans, runs and looks at a run in a temporary folder."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch):
        self.place, self.folder, self.log = place, place / "run", place / "log"
        self.monkeypatch, self.stderr = monkeypatch, io.StringIO()
        (place / "words.txt").write_text("one two three")
        monkeypatch.setenv("FAKE_LOG", str(self.log))

    def plan(self, **changes) -> Plan:
        small = {"rounds": 2, "arms": ("baseline", "depth1"), "modes": ("greedy",), "prompts": 2, "max_tokens": 9}
        return Plan(model="fake", corpora=(str(self.place / "words.txt"),), **small | changes)

    def behave(self, **rules: str) -> None:
        self.monkeypatch.setenv("FAKE", json.dumps({k.replace("_", "-"): v for k, v in rules.items()}))

    def start(self, **changes):
        return runner.start(self.folder, self.plan(**changes), Progress(self.stderr), command=FAKE)

    def run(self, store) -> int:
        return runner.run(store, Progress(self.stderr), command=FAKE)

    def started(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

    def trials(self) -> list[str]:
        return sorted(p.name for p in (self.folder / "trials").iterdir())
