"""`mtplab demo`: the main jobs on what ships with mtplab, in a few minutes: depths compared, then denoising steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mtplab.cli.options import Output, Quiet, check_format, out, tell

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
    output: Output = "table",
    quiet: Quiet = False,
) -> None:
    """Sweep MTP depth over a novel and C code with the bundled model: tables, conclusion, page.

    Then compare numbers of denoising steps with the bundled canvas model (in a second run folder, FOLDER-canvas).
    """
    check_format(output)
    from mtplab.cli import denoise, sweep
    from mtplab.trials.canvas_plan import DenoisePlan
    from mtplab.trials.plan import Plan

    folder = folder or sweep.RUNS / sweep._stamp("demo")
    plan, second = Plan(**SIZE | {"rounds": rounds, "prompts": prompts}), DenoisePlan(**CANVAS | {"prompts": prompts})
    if not quiet:
        tell(f"{len(plan.arms)} arms x {rounds} rounds on {' and '.join(plan.corpora)}, {prompts} prompts each")
    store, canvas = sweep.start(plan, folder, quiet=quiet), None
    if has_canvas():
        canvas = denoise.start(second, folder.with_name(f"{folder.name}-canvas"), quiet=quiet)
    texts: list[str] = []
    show = texts.append if output == "json" else out
    try:
        sweep.finish(store, output, quiet=quiet, show=show)
        if canvas is not None:
            if not quiet:
                steps = ", ".join(map(str, second.steps))
                tell(f"denoising steps {steps} x {second.seeds} seeds, {prompts} prompts each")
            _gap(output)
            denoise.finish(canvas, output, quiet=quiet, show=show)
    finally:
        if texts:
            out(_joined(texts))


def has_canvas() -> bool:
    """Whether this installation brings the canvas model; without it the demo has one half."""
    from mtplab.models import DATA

    return (DATA / "lab-canvas" / "config.json").is_file()


def _gap(output: str) -> None:
    if output in ("table", "md"):
        out("\nDenoising steps\n\n" if output == "table" else "\n**Denoising steps**\n\n")


def _joined(texts: list[str]) -> str:
    """One document: that of the sweep, and that of `denoise` under its name."""
    from mtplab.trials.files import dumps

    first, *rest = (json.loads(t) for t in texts)
    document: dict[str, Any] = first | ({"denoise": rest[0]} if rest else {})
    return dumps(document) + "\n"
