"""`mtplab head train` from beginning to end: a run folder, rows, training, the head.

    FOLDER/plan.json           the plan, the trunk's files and the BLAS
    FOLDER/rows-00000.npy ...  what the target wrote, with its hidden states; held-out.npy
    FOLDER/state.safetensors   head, optimizers, progress
    FOLDER/curve.jsonl         the learning curve
    FOLDER/head/               the head: config.json, model.safetensors, README.md

Ctrl-C, a polite or impolite kill and a power cut all leave a folder that goes on with --resume.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from mtplab import backend
from mtplab.errors import MtplabError, RequestError
from mtplab.models import load_target
from mtplab.models.loader import Loaded
from mtplab.train import plan as plans
from mtplab.train import write
from mtplab.train.collect import collect
from mtplab.train.loop import Stopped, Training
from mtplab.train.plan import PLAN, HeadPlan
from mtplab.train.texts import Texts
from mtplab.trials.files import explained, write_json
from mtplab.trials.progress import Progress, duration
from mtplab.trials.worker import file_sizes

HEAD = "head"


class Interrupted(MtplabError):
    """Ctrl-C or a polite kill: what is there stays (exit 130)."""

    code = 130


def train(folder: Path, plan: HeadPlan, progress: Progress, *, resume: bool, only_collect: bool = False) -> dict:
    """Everything that is still to be done in a run folder. Returns the summary of the finished head.

    Raises RequestError, ModelError, or Interrupted with the command to go on with.
    """
    if not resume and folder.exists():
        raise RequestError(f"{folder} exists already; choose another --out, or continue it with --resume")
    with explained(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with _stop_signals() as asked_to_stop:
        try:
            return _train(folder, plan, progress, resume, only_collect, asked_to_stop)
        except Stopped:
            raise Interrupted(f"stopped; go on with: {resume_command(folder)}") from None
        finally:
            progress.close()


def resume_command(folder: Path) -> str:
    return f"mtplab head train --resume --out {shlex.quote(str(folder))}"


def _train(folder: Path, plan: HeadPlan, progress: Progress, resume: bool, only_collect: bool, stopped: Any) -> dict:
    progress.stage(f"loading {plan.model}")
    loaded = load_target(plan.model, head="none", dtype=plan.dtype)
    texts = Texts(plan, loaded.tokenizer, loaded.context)
    head, config = write.new_head(loaded, plan.ffn)
    _settle(folder, plan, loaded, resume)

    def collecting(file: str, done: int) -> None:
        if stopped():
            raise Stopped
        progress.step(f"{file}: {done} of {plan.length} tokens a row")

    collect(folder, plan, loaded.target, texts, collecting)
    if only_collect:
        return {"folder": str(folder), "rows": plan.rows, "head": None}
    training = Training(folder, plan, loaded.target, head)

    def learning(at: Any, value: float) -> None:
        left = (1 - training.share) * at.seconds / max(training.share, 1e-9)
        progress.step(f"step {at.step}, loss {value:.3f}, about {duration(left)} left")

    curve = training.run(learning, stopped)
    training.save()
    count = sum(a.size for _, a in tree_flatten(head.parameters()))
    # A head is given away: names, not the paths of the machine that made it.
    names = {"model": Path(plan.model).name, "corpora": [Path(c).name for c in plan.corpora]}
    config[write.headfile.ABOUT] |= {"plan": plan.to_json() | names, "held_out": curve[-1]}
    write.write_head(folder / HEAD, head, config, write.card(plan, config, curve, count))
    return {"folder": str(folder), "rows": plan.rows, "head": str(folder / HEAD), "parameters": count, "curve": curve}


def _settle(folder: Path, plan: HeadPlan, loaded: Loaded, resume: bool) -> None:
    """Write the plan, or check that a resumed run meets the same trunk on the same BLAS."""
    blas = backend.facts()["blas"] or {}
    facts = {"files": file_sizes(loaded.folder), "blas": {k: blas.get(k) for k in ("kind", "version")}}
    path = folder / PLAN
    if resume:
        old = json.loads(path.read_text(encoding="utf-8"))
        for key, value in facts.items():
            if old.get(key) != value:
                raise RequestError(
                    f"{folder} was begun with {key} {old.get(key)} and this process has {value}; "
                    "restore that, or choose another --out"
                )
    with explained(folder):
        folder.mkdir(exist_ok=True)
        write_json(path, {"schema": plans.SCHEMA, "plan": plan.to_json(), **facts})


@contextmanager
def _stop_signals() -> Iterator[Any]:
    """Ctrl-C, SIGTERM and SIGHUP ask for an end between two steps; the second time they end at once."""
    asked = threading.Event()

    def note(number: int, _: Any) -> None:
        if asked.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    numbers = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]
    wanted = [n for n in numbers if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, note) for n in wanted}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
