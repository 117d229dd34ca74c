"""`mtplab inspect`: what a checkpoint holds, from its headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtplab.cli.options import Output, check_format, out


def inspect(
    model: Annotated[str, typer.Argument(help="Bundled name, checkpoint folder or hub id (owner/name).")] = "lab-mtp",
    json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    output: Output = "table",
) -> None:
    """Show trunk, head family, quantization and cache kinds of a checkpoint without loading its weights."""
    form = check_format("json" if json else output)
    from mtplab.models.inspect import inspect_checkpoint
    from mtplab.report.inspection import inspection

    out(inspection(inspect_checkpoint(checkpoint(model)), form))


def checkpoint(name: str) -> Path:
    """The folder of a bundled model, a path or a hub id. mlx is needed for none of the first two."""
    from mtplab.models import BUNDLED, bundled

    if name in BUNDLED or Path(name).is_dir():
        return bundled(name) if name in BUNDLED else Path(name)
    from mtplab import backend

    backend.setup()
    from mtplab.models.loader import resolve

    return resolve(name)
