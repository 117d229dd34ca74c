"""The run folder: everything a table or a page needs, readable at any moment, whatever killed the run.

    manifest.json   schema, versions, machine, BLAS, model facts, effective settings, notices
    plan.json       the plan and its digest
    prompts.jsonl   id, corpus, hash, text and tokens of every prompt
    costs.json      what a pass costs here (from the calibration before the first trial)
    trials/NNN-arm-round.jsonl   one line a request, the last line what the worker says of its process
    failed.json     trials that failed, with the reason; an error is never a row

A folder appears complete in its head (all but the trials) by one rename. A trial is written as `.part` and renamed when
it is whole, so a killed run leaves at most one `.part`, which a resume throws away.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtplab import __version__
from mtplab.errors import RequestError
from mtplab.records.canvas import KIND as CANVAS
from mtplab.records.canvas import CanvasRequest
from mtplab.records.types import Request
from mtplab.trials.canvas_plan import DenoisePlan
from mtplab.trials.corpus import Prompt
from mtplab.trials.files import dumps, explained, write_json
from mtplab.trials.plan import Plan, Trial, differences, order

# The plan of each verb that makes runs.
PLANS: dict[str, Any] = {p.kind: p for p in (Plan, DenoisePlan)}

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Stored:
    """One completed trial: its requests, per request the text of each token, and the worker's last words."""

    trial: Trial
    requests: tuple[Any, ...]  # Request, or CanvasRequest in a run of `denoise`
    pieces: tuple[list[str], ...]
    done: dict[str, Any]


class Store:
    """A run folder that exists. Make one with `create`, open one with `open_run`."""

    def __init__(self, folder: Path):
        self.folder = folder
        stored = _read(folder / "plan.json")
        self.plan = PLANS[stored.get("kind", Plan.kind)].from_json(stored["plan"])

    @property
    def manifest(self) -> dict[str, Any]:
        return _read(self.folder / "manifest.json")

    @property
    def costs(self) -> dict[str, Any]:
        return _read(self.folder / "costs.json")

    @property
    def failed(self) -> list[dict[str, Any]]:
        path = self.folder / "failed.json"
        return _read(path) if path.exists() else []

    def prompts(self) -> list[Prompt]:
        lines = _lines(self.folder / "prompts.jsonl")
        return [Prompt.from_json(record) for record in lines]

    def path(self, trial: Trial) -> Path:
        return self.folder / "trials" / f"{trial.name}.jsonl"

    def part(self, trial: Trial) -> Path:
        return self.folder / "trials" / f"{trial.name}.jsonl.part"

    def open_trials(self) -> list[Trial]:
        """Trials of the plan that are not completed, in order."""
        return [t for t in order(self.plan) if not self.path(t).exists()]

    def discard_parts(self) -> None:
        """Throw away what an interrupted trial left: half a trial is no trial."""
        for path in (self.folder / "trials").glob("*.part"):
            path.unlink(missing_ok=True)

    def complete(self, trial: Trial) -> dict[str, Any]:
        """Check that a trial's file is whole, give it its name, return the worker's last words."""
        done = read_trial(self.part(trial), trial).done
        with explained(self.path(trial)):
            os.replace(self.part(trial), self.path(trial))
        self._forget_failure(trial)
        return done

    def set_aside(self, trial: Trial) -> None:
        """Keep a disturbed trial for the record, under a name that no table reads."""
        with explained(self.path(trial)):
            os.replace(self.path(trial), self.path(trial).with_suffix(".disturbed"))

    def fail(self, trial: Trial, failure: dict[str, Any]) -> None:
        """Store a failed trial as failed; its partial file goes."""
        self.part(trial).unlink(missing_ok=True)
        entry = {"trial": trial.name, "arm": trial.arm, "round": trial.round, **failure}
        others = [f for f in self.failed if f["trial"] != trial.name]
        write_json(self.folder / "failed.json", [*others, entry])

    def _forget_failure(self, trial: Trial) -> None:
        failed = self.failed
        rest = [f for f in failed if f["trial"] != trial.name]
        if len(rest) < len(failed):
            write_json(self.folder / "failed.json", rest)

    def completed(self) -> Iterator[Stored]:
        """All completed trials in plan order."""
        for trial in order(self.plan):
            if self.path(trial).exists():
                yield read_trial(self.path(trial), trial)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One runner at a time. The lock belongs to the process, so a killed runner leaves none behind."""
        try:
            import fcntl
        except ImportError:
            yield
            return
        with explained(self.folder):
            file = open(self.folder / ".lock", "w")  # noqa: SIM115 (the lock lives as long as the file is open)
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RequestError(f"{self.folder} is being written by another mtplab; wait for it to end") from None
            yield


def is_run(folder: Path, kind: str | None = None) -> bool:
    """Whether the folder holds a run that this version can go on with, of the verb `kind` where that is given."""
    with suppress(RequestError):
        return bool(open_run(folder, kind=kind))
    return False


def check_free(folder: Path) -> None:
    """Refuse an output folder that exists or cannot be made, before any work is done for it."""
    with explained(folder):
        if folder.exists() or folder.is_symlink():
            also = ", or continue that run with --resume" if is_run(folder) else ""
            raise RequestError(f"{folder} exists already; choose another --out{also}")
        nearest = next(p for p in folder.absolute().parents if p.exists())
        if not nearest.is_dir():
            raise RequestError(f"cannot write {folder}: {nearest} is not a folder; choose another --out")
        made, probe = _missing_parents(folder), _fresh(folder)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            probe.mkdir()
            probe.rmdir()
        finally:
            for parent in made:
                with suppress(OSError):
                    parent.rmdir()


def _missing_parents(folder: Path) -> list[Path]:
    return [p for p in folder.parents if not p.exists()]


def _fresh(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}.new")


def create(
    folder: Path, plan: Plan, *, prompts: Iterable[Prompt], manifest: dict[str, Any], costs: dict[str, Any]
) -> Store:
    """Write the head of a run beside its goal and rename it there. Raises RequestError; leaves nothing half-made."""
    check_free(folder)
    fresh = _fresh(folder)
    head = {"schema": SCHEMA, "run": folder.name, "mtplab": __version__, **manifest}
    try:
        with explained(folder):
            (fresh / "trials").mkdir(parents=True)
            write_json(
                fresh / "plan.json",
                {"schema": SCHEMA, "kind": plan.kind, "digest": plan.digest, "plan": plan.to_json()},
            )
            lines = "".join(dumps(p.to_json()) + "\n" for p in prompts)
            (fresh / "prompts.jsonl").write_text(lines, encoding="utf-8")
            write_json(fresh / "costs.json", costs)
            write_json(fresh / "manifest.json", head)
            os.rename(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return Store(folder)


def open_run(folder: Path, plan: Plan | DenoisePlan | None = None, *, kind: str | None = None) -> Store:
    """An existing run, to read it or to go on with it. A plan that differs from the stored one is an error, and so is
    a run of another verb than `kind`."""
    if not (folder / "plan.json").is_file():
        raise RequestError(f"{folder} holds no run (no plan.json in it); check the path, or start one without --resume")
    stored = _read(folder / "plan.json")
    if not isinstance(stored, dict):
        raise RequestError(f"{folder / 'plan.json'} is damaged (not an object); the run cannot be read")
    schema = stored.get("schema")
    if schema != SCHEMA:
        raise RequestError(f"{folder} has schema {schema!r}; this mtplab reads schema {SCHEMA}")
    found = stored.get("kind", Plan.kind)
    if found not in PLANS or kind not in (None, found):
        raise RequestError(f"{folder} is a run of `mtplab {found}`; go on with it, or read it, through that verb")
    store = Store(folder)
    if plan is not None and (changed := differences(store.plan, plan)):
        raise RequestError(
            f"{folder} was begun with another plan ({'; '.join(changed)}); resume it without these flags, or choose "
            "another --out"
        )
    return store


def read_trial(path: Path, trial: Trial) -> Stored:
    """A trial's file, whole: every line is right and the last one says that the worker was done."""
    *lines, last = _lines(path) or [{}]
    if "done" not in last:
        raise RequestError(f"{path} is not complete; delete it and resume the run")
    try:
        requests = tuple(_request(line["request"]) for line in lines)
        pieces = tuple(line["pieces"] for line in lines)
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"{path} is damaged ({error}); delete it and resume the run") from None
    return Stored(trial, requests, pieces, last["done"])


def _request(data: dict[str, Any]) -> Any:
    """A stored request as the record of its verb."""
    return (CanvasRequest if data.get("kind") == CANVAS else Request).from_json(data)


def _lines(path: Path) -> list[dict[str, Any]]:
    records = []
    with explained_reading(path):
        text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                raise RequestError(f"{path} is damaged at line {number}; delete it and resume the run") from None
    return records


def _read(path: Path) -> Any:
    with explained_reading(path):
        text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{path} is damaged (line {error.lineno}); the run cannot be read") from None


@contextmanager
def explained_reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise RequestError(f"cannot read {path}: {reason}") from None
