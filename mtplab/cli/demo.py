"""`mtplab demo`: the main jobs on what ships with mtplab, in a few minutes: depths compared, then denoising steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from mtplab.cli.options import Quiet, check_format, out, tell
from mtplab.errors import RequestError, TrialsFailed

# Small enough for a few minutes on two cores, large enough for intervals that say something. Point drafts are what many
# engines do under temperature, and where the texts differ most; `sweep --drafts sampled` shows the other exact rule.
SIZE = {
    "rounds": 3, "prompts": 6, "prompt_tokens": 96, "max_tokens": 64, "drafts": "point", "repeat_disturbed": False
}  # fmt: skip
# Two canvases a prompt; two seeds, so that there is a noise floor and a recommendation.
CANVAS = {
    "steps": (2, 4, 8, 16), "seeds": 2, "prompt_tokens": 48, "max_tokens": 64, "repeat_disturbed": False
}  # fmt: skip


def demo(
    folder: Annotated[
        Path | None, typer.Option("--out", help="Run folder [runs/TIME-demo].", show_default=False)
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Every round runs every arm once.")] = SIZE["rounds"],
    prompts: Annotated[int, typer.Option("--prompts", help="Prompts per text.")] = SIZE["prompts"],
    output: Annotated[
        str, typer.Option("-o", "--output", help="table, md, json, or jsonl: a row a line, its kind sweep or denoise.")
    ] = "table",
    quiet: Quiet = False,
) -> None:
    """Sweep MTP depth over a novel and C code with the bundled model: tables, conclusion, page.

    Then compare numbers of denoising steps with the bundled canvas model (in a second run folder, FOLDER-canvas).
    """
    if check_format(output) == "csv":
        raise RequestError("csv holds one table and the demo makes two; use -o table, md, json or jsonl")
    from mtplab.cli import denoise, sweep
    from mtplab.trials.canvas_plan import DenoisePlan
    from mtplab.trials.plan import Plan

    folder = folder or sweep.RUNS / sweep._stamp("demo")
    plan = Plan(**SIZE | {"rounds": rounds, "prompts": prompts})
    halves = [Half(sweep, plan, folder, f"{len(plan.arms)} arms x {rounds} rounds on {' and '.join(plan.corpora)}")]
    if has_canvas():
        second = DenoisePlan(**CANVAS | {"prompts": prompts})
        said = f"denoising steps {', '.join(map(str, second.steps))} x {second.seeds} seeds"
        halves.append(Half(denoise, second, folder.with_name(f"{folder.name}-canvas"), said))
    _check_free(halves)
    _finish(halves, _start(halves, quiet), output, quiet)


class Half(NamedTuple):
    """One of the demo's runs: the verb's module, its plan and folder, and what to say before it."""

    verb: Any
    plan: Any
    folder: Path
    said: str

    def announce(self, quiet: bool) -> None:
        if not quiet:
            tell(f"{self.said}, {self.plan.prompts} prompts each")


def _check_free(halves: Sequence[Half]) -> None:
    """The folders of all halves, before the minutes of the first."""
    from mtplab.trials.runner import resume_command
    from mtplab.trials.store import check_free, is_run

    for half in halves:
        if half.folder.exists():
            # Only what holds a run of this kind can be gone on with.
            run = is_run(half.folder, half.plan.kind)
            also = f", or go on with: {resume_command(half.folder, half.plan.kind)}" if run else ""
            raise RequestError(f"{half.folder} exists already; choose another --out{also}")
        check_free(half.folder)


def _start(halves: Sequence[Half], quiet: bool) -> list[Any]:
    """The run folders of all halves, or none."""
    halves[0].announce(quiet)
    stores: list[Any] = []
    try:
        for half in halves:
            stores.append(half.verb.start(half.plan, half.folder, quiet=quiet))
    except BaseException:
        for half in halves[: len(stores)]:
            shutil.rmtree(half.folder, ignore_errors=True)  # made just now; no trial has run
        raise
    return stores


def _finish(halves: Sequence[Half], stores: Sequence[Any], output: str, quiet: bool) -> None:
    """Run and print each half. Failed trials of one stop no other, and are told at the end whatever the others did."""
    texts: list[str] = []
    failed: list[str] = []
    try:
        for half, store in zip(halves, stores, strict=True):
            if half is not halves[0]:
                half.announce(quiet)
                _gap(output)
            try:
                half.verb.finish(store, output, quiet=quiet, show=_shown(half.plan.kind, output, texts))
            except TrialsFailed as error:
                failed.append(f"{half.plan.kind}: {error}")
    finally:
        if texts:
            out(_joined(texts))
    if failed:
        raise TrialsFailed("; ".join(failed))


def has_canvas() -> bool:
    """Whether this installation brings the canvas model; without it the demo has one half."""
    from mtplab.models import DATA

    return (DATA / "lab-canvas" / "config.json").is_file()


def _gap(output: str) -> None:
    if output in ("table", "md"):
        out("\nDenoising steps\n\n" if output == "table" else "\n**Denoising steps**\n\n")


def _shown(kind: str, output: str, texts: list[str]) -> Callable[[str], Any]:
    """Where a half's result goes: json waits for the other half, and lines of JSON say which half they are of."""
    from mtplab.trials.files import dumps

    def lines(rows: str) -> None:
        out("".join(dumps({"kind": kind} | json.loads(row)) + "\n" for row in rows.splitlines()))

    return {"json": texts.append, "jsonl": lines}.get(output, out)


def _joined(texts: list[str]) -> str:
    """One document: that of the sweep, and that of `denoise` under its name."""
    from mtplab.trials.files import dumps

    first, *rest = (json.loads(t) for t in texts)
    document: dict[str, Any] = first | ({"denoise": rest[0]} if rest else {})
    return dumps(document) + "\n"
