"""`mtplab demo`: the main job on what ships with mtplab, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtplab.cli.options import Output, Quiet, check_format, tell

# Small enough for a few minutes on two cores, large enough for intervals that say something. Point drafts are what many
# engines do under temperature, and where the texts differ most; `sweep --drafts sampled` shows the other exact rule.
SIZE = {
    "rounds": 3, "prompts": 6, "prompt_tokens": 96, "max_tokens": 64, "drafts": "point", "repeat_disturbed": False
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
    """Sweep MTP depth over a novel and C code with the bundled model: tables, conclusion, page."""
    check_format(output)
    from mtplab.cli import sweep
    from mtplab.trials.plan import Plan

    plan = Plan(**SIZE | {"rounds": rounds, "prompts": prompts})
    if not quiet:
        tell(f"{len(plan.arms)} arms x {rounds} rounds on {' and '.join(plan.corpora)}, {prompts} prompts each")
    sweep.finish(sweep.start(plan, folder, quiet=quiet, name="demo"), output, quiet=quiet)
