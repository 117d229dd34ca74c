"""Run a plan: one worker process after the other, everything stored as it comes, stoppable at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mtplab
from mtplab.errors import ModelError, MtplabError, RequestError
from mtplab.trials import store as stores
from mtplab.trials.corpus import Prompt, read_documents
from mtplab.trials.files import dumps
from mtplab.trials.plan import Plan, Trial, order
from mtplab.trials.progress import Progress
from mtplab.trials.store import Store

WORKER = (sys.executable, "-P", "-m", "mtplab.trials.worker")
PATIENCE = 3  # so many repeats that were disturbed again, and the machine counts as busy for good
PREPARE_TIMEOUT_S = 1800.0


class Interrupted(MtplabError):
    """Ctrl-C or a polite kill: what is complete stays (exit 130, as shells have it for SIGINT)."""

    code = 130


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker gave no result; `code` is the exit code it asks for."""

    reason: str
    kind: str
    code: int

    def to_json(self) -> dict[str, Any]:
        return {"reason": self.reason, "kind": self.kind}

    def error(self) -> MtplabError:
        """The same as the exception of its exit code."""
        kinds = {2: RequestError, 3: ModelError}
        return kinds.get(self.code, MtplabError)(self.reason)


def start(folder: Path, plan: Plan, progress: Progress, *, command: Sequence[str] = WORKER) -> Store:
    """Check, measure costs and create the run folder; no trial runs yet.

    Raises the worker's own error (a wrong model, an arm it cannot honour, a corpus that cannot be used) before
    anything is written.
    """
    stores.check_free(folder)
    for name in plan.corpora:
        read_documents(name)
    made = _prepare(plan, progress, command)
    for notice in made["notices"]:
        progress.note(notice)
    manifest = {k: made[k] for k in ("machine", "model", "files", "effective", "notices")}
    manifest |= {"blas": (made["machine"] or {}).get("blas"), "created": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    prompts = [Prompt.from_json(p) for p in made["prompts"]]
    return stores.create(folder, plan, prompts=prompts, manifest=manifest, costs=made["costs"])


def _prepare(plan: Plan, progress: Progress, command: Sequence[str]) -> dict[str, Any]:
    """What the "prepare" job found out: prompts, costs, facts and notices."""
    with _signals(), tempfile.TemporaryDirectory(prefix="mtplab-") as place:
        out = Path(place) / "prepared.json"
        spec = {"job": "prepare", "plan": plan.to_json(), "out": str(out)}
        progress.stage("loading the model")
        try:
            failure = _work(spec, Path(place), command, PREPARE_TIMEOUT_S, lambda e: progress.stage(e.get("stage")))
        except KeyboardInterrupt:
            raise Interrupted("stopped before the first trial; nothing was written") from None
        finally:
            progress.close()
        if failure is not None:
            raise failure.error()
        return json.loads(out.read_text(encoding="utf-8"))


def run(store: Store, progress: Progress, *, command: Sequence[str] = WORKER) -> int:
    """Run every trial that is not completed yet; returns the number of failed trials.

    Raises Interrupted on SIGINT and SIGTERM, RequestError where the disk is full; completed trials stay either way.
    """
    with store.locked(), _signals():
        store.discard_parts()
        try:
            _Sweep(store, progress, command).run()
        except KeyboardInterrupt:
            store.discard_parts()
            left, all_ = len(store.open_trials()), len(order(store.plan))
            raise Interrupted(
                f"stopped: {all_ - left} of {all_} trials are stored; "
                f"go on with: {resume_command(store.folder, store.plan.kind)}"
            ) from None
        finally:
            progress.close()
    return len(store.failed)


def resume_command(folder: Path, verb: str = "sweep") -> str:
    """What to type to go on with a run."""
    import shlex

    return f"mtplab {verb} --resume --out {shlex.quote(str(folder))}"


class _Sweep:
    """The loop over the trials of one run."""

    def __init__(self, store: Store, progress: Progress, command: Sequence[str]):
        self.store, self.plan, self.progress, self.command = store, store.plan, progress, command
        self.prompts, self.costs = [p.to_json() for p in store.prompts()], store.costs
        self.manifest, self.in_vain = store.manifest, 0

    def run(self) -> None:
        trials = self.store.open_trials()
        self.progress.begin(len(trials))
        for trial in trials:
            done = self._once(trial)
            if done is not None and self._worth_repeating(done):
                self.progress.note(f"{trial.name} was disturbed by other processes; once more")
                self.store.set_aside(trial)
                again = self._once(trial)
                self.in_vain += bool(again and _disturbed(again))
            self.progress.next()

    def _worth_repeating(self, done: dict[str, Any]) -> bool:
        if not (self.plan.repeat_disturbed and _disturbed(done)):
            return False
        if self.in_vain == PATIENCE:
            self.progress.note("other processes keep this machine busy: trials are flagged, not repeated, from here on")
            self.in_vain += 1
        return self.in_vain < PATIENCE

    def _once(self, trial: Trial) -> dict[str, Any] | None:
        """The worker's last words, or None if the trial failed (which is then stored)."""
        spec = {
            "job": "trial",
            "plan": self.plan.to_json(),
            "arm": trial.arm,
            "round": trial.round,
            "prompts": self.prompts,
            "costs": self.costs,
            "out": str(self.store.part(trial)),
        }
        self.progress.trial(trial.name)
        with tempfile.TemporaryDirectory(prefix="mtplab-") as place:
            failure = _work(spec, Path(place), self.command, self.plan.trial_timeout_s, self.progress.within)
        if failure is None:
            return self._accept(trial)
        self.store.part(trial).unlink(missing_ok=True)
        if failure.kind in ("ENOSPC", "EDQUOT"):
            # The next trial would fail the same way, and so would the note that this one did.
            raise RequestError(f"{failure.reason}; then: {resume_command(self.store.folder, self.plan.kind)}")
        self.progress.note(f"{trial.name} failed: {failure.reason}")
        self.store.fail(trial, failure.to_json())
        return None

    def _accept(self, trial: Trial) -> dict[str, Any] | None:
        try:
            done = stores.read_trial(self.store.part(trial), trial).done
        except RequestError as error:
            self.store.fail(trial, Failure(str(error), "incomplete", 4).to_json())
            return None
        self._same_machine(done)
        self.store.complete(trial)
        return done

    def _same_machine(self, done: dict[str, Any]) -> None:
        """A resume on another BLAS or other weights would mix two things into one row."""
        for key in ("blas", "files"):
            old, new = self.manifest.get(key), done.get(key)
            if key == "blas":
                old, new = ([(b or {}).get(k) for k in ("kind", "version", "threads")] for b in (old, new))
            if old != new:
                raise RequestError(
                    f"{self.store.folder} was begun with {key} {old} and this process has {new}; "
                    "restore that, or start a new run with another --out"
                )


def _disturbed(done: dict[str, Any]) -> bool:
    return bool((done.get("load") or {}).get("disturbed"))


def _work(spec: dict[str, Any], place: Path, command: Sequence[str], timeout_s: float, listen: Any) -> Failure | None:
    """Run one worker to its end. None means that it finished; every other end is a Failure."""
    path, errors = place / "spec.json", place / "stderr"
    path.write_text(dumps(spec), encoding="utf-8")
    with open(errors, "wb") as stderr:
        process = subprocess.Popen(
            [*command, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=_environment(),
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    late = threading.Event()
    timer = threading.Timer(timeout_s, lambda: (late.set(), process.kill()))
    timer.daemon = True
    timer.start()
    failed = None
    try:
        for event in _events(process.stdout):
            if "failed" in event:
                failed = Failure(str(event["failed"]), str(event.get("kind")), int(event.get("code", 4)))
            else:
                listen(event)
        code = process.wait()
    finally:
        timer.cancel()
        _end(process)
    if late.is_set():
        return Failure(f"it took longer than {timeout_s:g} s and was stopped", "timeout", 4)
    return failed or (None if code == 0 else Failure(_last_words(code, errors), "crash", 4))


def _environment() -> dict[str, str]:
    """The parent's environment; where the package is not installed, the worker must find it where the parent did."""
    root = str(Path(mtplab.__file__).resolve().parents[1])
    known = [str(Path(p or ".").resolve()) for p in sys.path]
    given = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(p for p in (root, given) if p) if root in known else given
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _events(stream: Any) -> Iterator[dict[str, Any]]:
    """JSON objects among the lines; a library that prints to stdout does no harm."""
    for line in stream:
        with suppress(json.JSONDecodeError):
            event = json.loads(line)
            if isinstance(event, dict):
                yield event


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe.close()


def _last_words(code: int, errors: Path) -> str:
    """Why a process without a reason of its own ended: the signal, or the last line it wrote to stderr."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (often: out of memory)" if name == "SIGKILL" else ""
        return f"the worker was killed by {name}{hint}"
    lines = [x for x in errors.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
    return f"the worker ended with exit code {code}: {lines[-1].strip() if lines else 'it said nothing'}"


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a run as Ctrl-C does: through KeyboardInterrupt, so that everything is cleaned up."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]
    # A run under nohup is meant to outlive its terminal.
    wanted = [n for n in numbers if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, stop) for n in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
