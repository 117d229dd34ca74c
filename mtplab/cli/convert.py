"""`mtplab convert`: a llama in GGUF as a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtplab.cli.options import Output, check_format, out


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="FILE.gguf", help="A llama-type model: F32, F16, BF16, Q4_0, Q4_1, Q8_0.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The checkpoint folder to make.")],
    dtype: Annotated[
        str, typer.Option("--dtype", help="float16, float32, or stored (quantized blocks stay quantized).")
    ] = "float16",
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="Take the tokenizer files of this folder instead.", show_default=False),
    ] = None,
    output: Output = "table",
) -> None:
    """Turn a GGUF file into a folder that mlx-lm and mtplab load, with its tokenizer."""
    check_format(output)
    from mtplab import backend

    backend.setup()
    from mtplab.models.convert import convert as run
    from mtplab.report.render import facts

    out(facts(run(source, folder, dtype=dtype, tokenizer=tokenizer), output))
