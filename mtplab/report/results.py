"""A run folder -> rows. Everything is derived from the stored counts and times; nothing is decoded here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtplab.decode.settings import VERIFY
from mtplab.records.summary import summarize
from mtplab.records.types import Request
from mtplab.trials.files import clean
from mtplab.trials.store import Store, Stored, open_run

SCHEMA = 1
Group = tuple[str, str]  # (mode, corpus): what one summary may hold


@dataclass(frozen=True, slots=True)
class Results:
    """What tables and page are drawn from. `rows` are in the order mode, corpus, arm of the plan."""

    run: str
    store: Store
    rows: list[dict[str, Any]]
    requests: dict[Group, dict[str, list[Request]]]  # by group, then by arm
    trials: list[Stored]

    @property
    def failed(self) -> list[dict[str, Any]]:
        return self.store.failed

    def group(self, mode: str, corpus: str) -> list[dict[str, Any]]:
        return [r for r in self.rows if (r["mode"], r["corpus"]) == (mode, corpus)]

    def document(self) -> dict[str, Any]:
        """The JSON document of `mtplab sweep -o json`: no NaN in it, null where a value is not defined."""
        machine = self.store.manifest.get("machine")
        out = {"schema": SCHEMA, "run": self.run, "machine": machine, "verify": self.verify}
        return clean(out | {"rows": self.rows, "failed": self.failed})

    @property
    def verify(self) -> dict[str, str]:
        """How drafts were checked, and what the logits are equal to by that."""
        return {"mode": self.store.plan.verify, "equals": VERIFY[self.store.plan.verify]}


def load_results(folder: Path | str) -> Results:
    """Read a run folder, complete or not. Raises RequestError if it is none or is damaged."""
    store = open_run(Path(folder))
    trials = list(store.completed())
    requests = _by_group(store, trials)
    rows = [row for arms in requests.values() for row in summarize(arms, costs=store.costs)]
    return Results(store.folder.name, store, rows, requests, trials)


def _by_group(store: Store, trials: list[Stored]) -> dict[Group, dict[str, list[Request]]]:
    """Requests of completed trials, in plan order of modes, corpora and arms; arms that never completed are absent."""
    found: dict[Group, dict[str, list[Request]]] = {}
    corpora = list(dict.fromkeys(p.corpus for p in store.prompts()))
    for mode in store.plan.modes:
        for corpus in corpora:
            for arm in store.plan.arms:
                picked = [r for t in trials if t.trial.arm == arm for r in t.requests if _is(r, mode, corpus)]
                if picked:
                    found.setdefault((mode, corpus), {})[arm] = picked
    return found


def _is(request: Request, mode: str, corpus: str) -> bool:
    return request.corpus == corpus and request.settings.get("mode") == mode
